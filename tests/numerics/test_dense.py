"""Norm, feed-forward and rotation: values and every gradient are those of plain autograd; what they keep is bounded."""

import pytest
import torch
import torch.nn.functional as F

from cospec.ops.dense import rms_norm, rotate_halves, swiglu

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def plain_rms_norm(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def plain_swiglu(x, gate, up, down):
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def plain_rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


def inputs(kind):
    g = torch.Generator().manual_seed(0)

    def draw(*shape, scale=1.0):
        return torch.randn(*shape, generator=g, dtype=torch.float64) * scale

    if kind == "norm":
        return (rms_norm, plain_rms_norm), [draw(7, 3, 16), draw(16)], [1e-6]
    if kind == "swiglu":
        return (swiglu, plain_swiglu), [draw(7, 8), *(draw(*s, scale=0.3) for s in ((12, 8), (12, 8), (8, 12)))], []
    angle = draw(7, 4).repeat(1, 2)
    return (rotate_halves, plain_rotate), [draw(7, 3, 8)], [angle.cos(), angle.sin()]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", ["norm", "swiglu", "rotate"])
def test_values_and_gradients(kind, dtype):
    (ours, plain), leaves, rest = inputs(kind)
    rest = [r.to(torch.promote_types(dtype, torch.float32)) if isinstance(r, torch.Tensor) else r for r in rest]
    leaves = [x.to(dtype).requires_grad_() for x in leaves]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    out = ours(*leaves, *rest)
    want = plain(*exact, *[r.double() if isinstance(r, torch.Tensor) else r for r in rest])
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    grads = torch.autograd.grad(out, leaves, grad)
    want_grads = torch.autograd.grad(want, exact, grad.double())
    for got, expected in zip((out, *grads), (want, *want_grads), strict=True):
        assert got.dtype == dtype
        error = (got.double() - expected).abs() / expected.abs().clamp(min=1)
        assert error.max() <= TOLERANCE[dtype]


@pytest.mark.parametrize("kind", ["norm", "swiglu"])
def test_inputs_without_gradient_get_none(kind):
    """A frozen weight, or detached features, cost no product."""
    (ours, _), leaves, rest = inputs(kind)
    for wanted in range(len(leaves)):
        leaves = [x.detach().requires_grad_(i == wanted) for i, x in enumerate(leaves)]
        ours(*leaves, *rest).sum().backward()
        assert [x.grad is not None for x in leaves] == [i == wanted for i in range(len(leaves))]


def test_rows_of_zeros_are_finite():
    x = torch.zeros(3, 8, requires_grad=True)
    rms_norm(x, torch.ones(8), 1e-6).sum().backward()
    assert torch.isfinite(x.grad).all()


def test_what_is_kept_for_backward():
    (_, _), (x, gate, up, down), _ = inputs("swiglu")
    leaves = [t.requires_grad_() for t in (x, gate, up, down)]
    kept = {}

    def keep(t):
        kept[t.data_ptr()] = t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        swiglu(*leaves)
    rows, width = x.shape[0], gate.shape[0]
    assert sum(kept.values()) - sum(t.numel() for t in leaves) == 2 * rows * width
