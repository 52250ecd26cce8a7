"""Saved features of a policy: a store of our own, files of other projects, and training rows from either."""
