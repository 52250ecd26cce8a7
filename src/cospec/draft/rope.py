"""Rotary position embedding of the draft: Hugging Face's half-rotation layout.

cos and sin are computed from the positions themselves, so there is no table that a
position could run off: a draft reads positions up to the longest document plus K.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from cospec.config import RopeConfig
from cospec.hf import rope_frequencies


@lru_cache(maxsize=16)
def _frequencies(rope: RopeConfig, head_dim: int, device: torch.device) -> tuple[Tensor, float]:
    freq, factor = rope_frequencies(rope, head_dim)
    return freq.to(device, torch.float64), factor


def cos_sin(rope: RopeConfig, head_dim: int, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, H] of the positions; angles in float64, for they grow with the position."""
    freq, factor = _frequencies(rope, head_dim, positions_T.device)
    angle = positions_T.to(torch.float64)[:, None] * freq
    cos, sin = ((x * factor).to(dtype) for x in (angle.cos(), angle.sin()))
    return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)
