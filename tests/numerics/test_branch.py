"""Branch attention: alone, joined with the trunk, and what goes wrong when its lse path is dropped."""

import pytest
import torch

from cospec.layout import PackedLayout
from cospec.ops import reference
from cospec.ops.branch import branch_backward, branch_forward
from cospec.ops.ring import open_trunk, trunk_branch_attention
from support.attention_case import TOLERANCE, assert_close, error, inputs, local, oracle

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("kernel", ["cpu_flash", "math"])
def test_trunk_and_branches(kernel, depth, dtype):
    """Known failure 8: every gradient, of trunk and branches, against the float64 oracle."""
    lengths = (13, 1, 34, 2)
    layout = PackedLayout(lengths, 1, 60)
    tensors = inputs(lengths, depth, dtype)
    got = [layout.unshard([x]) for x in local(tensors, layout, kernel=kernel)]
    assert_close(got, oracle(tensors, lengths), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_branches_alone(dtype):
    """The partial attention over branch keys only, and its closed-form gradient."""
    q, *rest = inputs((6,), 3, dtype)
    k, v, grad = rest[2:5], rest[5:8], rest[-1]
    leaves = [x.double().requires_grad_() for x in (q, *k, *v)]
    keys = torch.stack(leaves[1:4], dim=2).repeat_interleave(2, dim=1)
    values = torch.stack(leaves[4:], dim=2).repeat_interleave(2, dim=1)
    scores = torch.einsum("tnh,tnih->tni", leaves[0], keys) * 0.3
    expected = torch.einsum("tni,tnih->tnh", scores.softmax(-1), values)
    with torch.no_grad():
        out, lse = branch_forward(q, k, v, 0.3)
        dq, dk, dv = branch_backward(grad, q, k, v, out, lse, 0.3)
    assert error(lse, scores.logsumexp(-1)) < TOLERANCE[dtype]
    assert_close(
        [out, dq, *dk, *dv], [expected, *torch.autograd.grad(expected, leaves, grad.double())], TOLERANCE[dtype]
    )


def test_the_lse_path_matters():
    """Known failure 8: with each part's own out and lse in place of the merged ones, dq and dk are far off.

    So the comparison above is able to see the fault.
    """
    lengths, depth = (12,), 2
    tensors = inputs(lengths, depth, torch.float64)
    q, k, v, k1, k2, v1, v2, grad = tensors
    expected = oracle(tensors, lengths)
    leaves = [x.clone().requires_grad_() for x in tensors[:-1]]
    trunk_out, trunk_lse = reference.attention(*leaves[:3], lengths)
    branch_out, branch_lse = branch_forward(leaves[0], leaves[3:5], leaves[5:], 0.25)
    weight = torch.sigmoid(branch_lse - trunk_lse).detach()[..., None]  # the fault: a constant weight
    out = trunk_out + weight * (branch_out - trunk_out)
    wrong = torch.autograd.grad(out, leaves, grad)
    assert error(out, expected[0]) < 1e-12
    for name, i in (("dq", 0), ("trunk dk", 1), ("branch dk 1", 3), ("branch dk 2", 4)):
        assert error(wrong[i], expected[1 + i]) > 1e-2, name
    right = [PackedLayout(lengths).unshard([x]) for x in local(tensors, PackedLayout(lengths))]
    assert_close(right, expected, 1e-12)


def test_branch_keys_of_other_rows_are_invisible():
    lengths = (9, 4)
    before = inputs(lengths, 2, torch.float64)
    after = [x.clone() for x in before]
    for x in after[3:7]:
        x[4] += 1
    layout = PackedLayout(lengths)
    a, b = (layout.unshard([local(x, layout)[0]]) for x in (before, after))
    others = torch.arange(13) != 4
    assert torch.equal(a[others], b[others])
    assert not torch.equal(a[4], b[4])


@pytest.mark.parametrize("size", [1e2, 1e3])
def test_huge_branch_scores(size):
    """Known failure 9."""
    lengths = (7,)
    tensors = inputs(lengths, 3, torch.float32)
    tensors[3:6] = [x * size for x in tensors[3:6]]
    tensors[0] *= 10
    layout = PackedLayout(lengths)
    got = [layout.unshard([x]) for x in local(tensors, layout)]
    assert all(torch.isfinite(x).all() for x in got)
    assert error(got[0], oracle(tensors, lengths)[0]) < 1e-2


def test_branches_that_need_no_gradient():
    lengths = (5,)
    layout = PackedLayout(lengths, 1)
    q, k, v, k1, v1, grad = (layout.shard(x, 0) for x in inputs(lengths, 1, torch.float64))
    q.requires_grad_()
    out = trunk_branch_attention(q, open_trunk(k, v, layout), [k1], [v1])
    (dq,) = torch.autograd.grad(out, q, grad)
    expected = oracle(inputs(lengths, 1, torch.float64), lengths)
    assert error(layout.unshard([dq]), expected[1]) < 1e-12
