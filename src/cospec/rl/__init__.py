"""Verifiable tasks and the policy loss of RL."""
