"""Rollout engines: what generates from the newest policy and draft."""

from cospec.rollout.engine import Engine, acceptance_by_position, acceptance_length
from cospec.rollout.native import NativeEngine

__all__ = ["Engine", "NativeEngine", "acceptance_by_position", "acceptance_length"]
