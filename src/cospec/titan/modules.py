"""What a policy of torchtitan has of ours inside: the attention and the RoPE tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torchtitan.models.common import ComplexRoPE, CosSinRoPE
from torchtitan.models.common.rope import RoPE
from torchtitan.protocols.module import Module

from cospec import hf
from cospec.config import RopeConfig


class PackedAttention(Module):
    """Inner attention that hands the packed rows to the attention context of the call.

    The context is whatever the model was given as `attention_masks`: an object with
    `attend(layer_id, q_TNH, k_TMH, v_TMH, scale) -> out_TNH`. So one model serves
    training (packed documents, context parallel) and decoding (key/value caches).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        layer_id: int

    def __init__(self, config: Config):
        super().__init__()
        self.layer_id = config.layer_id

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks, scale=None, enable_gqa=False, **_) -> Tensor:
        if not hasattr(attention_masks, "attend"):
            raise TypeError(
                f"attention_masks is a {type(attention_masks).__name__}; the policy needs an attention context with "
                "attend(layer_id, q, k, v, scale)"
            )
        if scale is None:
            scale = q_BLNH.shape[-1] ** -0.5
        out_TNH = attention_masks.attend(
            self.layer_id, q_BLNH.flatten(0, 1), k_BLNH.flatten(0, 1), v_BLNH.flatten(0, 1), scale
        )
        return out_TNH.unflatten(0, q_BLNH.shape[:2])


class PolicyCosSinRoPE(CosSinRoPE):
    """Rotate-half RoPE with every scaling of `RopeConfig` (torchtitan's lacks some)."""

    config: PolicyCosSinRoPE.Config

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        settings: RopeConfig

    def _precompute_cache(self) -> Tensor:
        angles, factor = _rope_angles(self.config, self.config.settings)
        return torch.cat([angles.cos(), angles.cos(), angles.sin(), angles.sin()], dim=-1) * factor


class PolicyComplexRoPE(ComplexRoPE):
    """Adjacent-pair RoPE with every scaling of `RopeConfig`."""

    config: PolicyComplexRoPE.Config

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        settings: RopeConfig

    def _precompute_cache(self) -> Tensor:
        angles, factor = _rope_angles(self.config, self.config.settings)
        return torch.complex(angles.cos() * factor, angles.sin() * factor)


def _rope_angles(config: RoPE.Config, settings: RopeConfig) -> tuple[Tensor, float]:
    """Angles [max_seq_len, dim / 2] on the default device, and the factor of cos and sin."""
    inv_freq, factor = hf.rope_frequencies(settings, config.dim)
    positions = torch.arange(config.max_seq_len, dtype=torch.float32)
    return torch.outer(positions, inv_freq.to(positions.device)), factor
