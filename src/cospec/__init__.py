"""Train a speculative-decoding draft together with its policy during RL, on torchtitan models."""

__version__ = "0.1.0"
