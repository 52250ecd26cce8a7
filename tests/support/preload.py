"""Imported once by the fork server, so that every worker starts with it loaded."""

import contextlib

import torch.distributed.tensor  # noqa: F401

with contextlib.suppress(Exception):  # a fault there must fail its own tests, not the pool
    import cospec.titan  # noqa: F401
