"""Norm, gated feed-forward and rotation that keep for backward only what cannot be formed again cheaply.

Written with autograd alone, a draft layer keeps every intermediate: at width D and ffn F that is
6 F + 8 D numbers a row; with these 2 F + 2 D, and fewer passes over memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from cospec.ops.merge import accumulator_dtype


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, computed in float32 (float64 for float64); x's dtype.

    Keeps x and one number a row. Source: Zhang & Sennrich 2019.
    """
    return _RMSNorm.apply(x, weight_D, eps)


def swiglu(x_TD: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> Tensor:
    """silu(x gate^T) * (x up^T), then down: [T, D]. All in one dtype.

    Keeps x and the two products [T, F]; what lies between them and the result is formed again.
    Source: Shazeer 2020.
    """
    return _SwiGLU.apply(x_TD, gate_FD, up_FD, down_DF)


def rotate_halves(x_TNH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """x with dims (i, i + H/2) of every head turned by the row's angle; computed in the dtype of cos, x's dtype.

    cos and sin [T, H] hold each angle twice, in both halves; no gradient flows to them.
    """
    return _Rotate.apply(x_TNH, cos_TH, sin_TH)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        dtype = accumulator_dtype(x.dtype)
        wide = x.to(dtype)
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight.to(dtype)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight, scale = ctx.saved_tensors
        normed = x.to(scale.dtype) * scale
        grad = grad.to(scale.dtype)
        product = grad * normed
        dweight = product.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, dweight, None
        # y = n w with n = x s: dx = s (g w - n mean(g w n))
        weight = weight.to(scale.dtype)
        mean = (product @ weight).unsqueeze(-1).div_(x.shape[-1])
        dx = torch.mul(grad, weight, out=product).sub_(normed.mul_(mean)).mul_(scale)
        return dx.to(x.dtype), dweight, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, gate_w: Tensor, up_w: Tensor, down_w: Tensor) -> Tensor:
        gate, up = F.linear(x, gate_w), F.linear(x, up_w)
        ctx.save_for_backward(x, gate, up, gate_w, up_w, down_w)
        return F.linear(F.silu(gate).mul_(up), down_w)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, gate, up, gate_w, up_w, down_w = ctx.saved_tensors
        wants_x, wants_gate, wants_up, wants_down = ctx.needs_input_grad
        active = F.silu(gate)
        ddown = _outer(grad, active * up) if wants_down else None
        dhidden = grad @ down_w
        dgate = torch.ops.aten.silu_backward(dhidden * up, gate)
        dup = dhidden.mul_(active)
        dx = None
        if wants_x:
            dx = dgate @ gate_w
            dx.flatten(0, -2).addmm_(dup.flatten(0, -2), up_w)
        return dx, _outer(dgate, x) if wants_gate else None, _outer(dup, x) if wants_up else None, ddown


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, 1), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    wide = x.to(cos.dtype)
    out = wide * cos
    (first, second), (sin_first, sin_second) = wide.chunk(2, dim=-1), sin.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    out_first.addcmul_(second, sin_first, value=sign)
    out_second.addcmul_(first, sin_second, value=-sign)
    return out.to(x.dtype)


def _outer(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of a weight: grad^T x over all rows."""
    return grad.flatten(0, -2).mT @ x.flatten(0, -2)
