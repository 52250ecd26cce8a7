"""One trunk-and-branch problem: inputs by seed, the oracle's answer, cospec's answer on one rank of many."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cospec.layout import PackedLayout
from cospec.ops import reference
from cospec.ops.ring import open_trunk, trunk_branch_attention

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def inputs(
    lengths: Sequence[int],
    depth: int,
    dtype: torch.dtype,
    *,
    heads: int = 4,
    key_heads: int = 2,
    head_dim: int = 16,
    size: float = 1.0,
    seed: int = 0,
) -> list[Tensor]:
    """q, trunk k, trunk v, branch keys, branch values, gradient of out: unpadded rows, rounded to `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    widths = [heads, key_heads, key_heads, *[key_heads] * (2 * depth), heads]
    tensors = [torch.randn(sum(lengths), n, head_dim, generator=generator, dtype=torch.float64) for n in widths]
    return [(x * size).to(dtype) for x in tensors]


def oracle(tensors: Sequence[Tensor], lengths: Sequence[int], **options) -> list[Tensor]:
    """float64 out and the gradients of all inputs but the last, which is the gradient of out."""
    *leaves, grad = [x.double() for x in tensors]
    for x in leaves:
        x.requires_grad_()
    k, v = _branches(leaves)
    out, _ = reference.attention(*leaves[:3], lengths, k_branches=k, v_branches=v, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def local(
    tensors: Sequence[Tensor],
    layout: PackedLayout,
    *,
    rank: int = 0,
    group=None,
    mode: str = "ring",
    kernel: str | None = None,
    garbage: float = float("nan"),
    **options,
) -> list[Tensor]:
    """out and gradients as one rank holds them; padding rows of all inputs hold `garbage`."""
    *leaves, grad = [layout.shard(x, rank, fill=garbage) for x in tensors]
    for x in leaves:
        x.requires_grad_()
    k, v = _branches(leaves)
    trunk = open_trunk(*leaves[1:3], layout, cp_group=group, mode=mode, kernel=kernel)
    out = trunk_branch_attention(leaves[0], trunk, k, v, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def error(got: Tensor, expected: Tensor) -> float:
    """Largest difference relative to max(1, |expected|); nan counts as infinite."""
    relative = (got.double() - expected.double()).abs() / expected.double().abs().clamp(min=1)
    return relative.nan_to_num(nan=float("inf")).max().item()


def assert_close(got: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    assert len(got) == len(expected)
    errors = [error(a, b) for a, b in zip(got, expected, strict=True)]
    assert max(errors) <= tolerance, f"out, dq, dk, dv, branches: {[f'{e:.1e}' for e in errors]} > {tolerance}"


def _branches(leaves: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    depth = (len(leaves) - 3) // 2
    return list(leaves[3 : 3 + depth]), list(leaves[3 + depth :])
