"""Hugging Face folders without Hugging Face code: config.json, RoPE tables, sharded safetensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cospec.config import RopeConfig


def rope_frequencies(rope: RopeConfig, dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies float32 [dim / 2] (CPU) and the factor of cos and sin.

    Written in the order of operations that transformers uses, so that tables are equal to
    the bit. Sources: Su et al. 2021 (RoPE); the Llama 3.1 release (`llama3`);
    Peng et al. 2023, YaRN, section 3.2 and appendix A.2 (`yarn`).
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float() / dim
    powers = rope.theta**exponents
    inv_freq = 1.0 / powers
    if rope.scaling == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.scaling == "llama3":
        return _llama3_frequencies(rope, inv_freq), 1.0
    if rope.scaling == "yarn":
        factor = rope.attention_factor
        if factor is None:
            factor = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
        return _yarn_frequencies(rope, powers, dim), factor
    return inv_freq, 1.0


def _llama3_frequencies(rope: RopeConfig, inv_freq: Tensor) -> Tensor:
    old = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    smooth = (old / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    slow = torch.where(wavelength > old / rope.low_freq_factor, inv_freq / rope.factor, inv_freq)
    blended = (1 - smooth) * slow / rope.factor + smooth * slow
    between = (wavelength >= old / rope.high_freq_factor) & (wavelength <= old / rope.low_freq_factor)
    return torch.where(between, blended, slow)


def _yarn_frequencies(rope: RopeConfig, powers: Tensor, dim: int) -> Tensor:
    def dim_of(rotations: float) -> float:
        return (
            dim
            * math.log(rope.original_max_position_embeddings / (rotations * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # keeps the ramp finite
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept
