"""The lse merge: against the joint softmax, at extremes, and over random partitions of the keys."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cospec.ops.merge import merge
from support.attention_case import error

INF = float("inf")


def attend(scores_TNJ, values_JH):
    """out and lse over a key set; an empty one gives 0 and -inf."""
    if scores_TNJ.shape[-1] == 0:
        zeros = scores_TNJ.new_zeros(*scores_TNJ.shape[:2], values_JH.shape[-1])
        return zeros, scores_TNJ.new_full(scores_TNJ.shape[:2], -INF)
    return scores_TNJ.softmax(-1) @ values_JH, scores_TNJ.logsumexp(-1)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-14), (torch.float32, 1e-6)])
@given(cuts=st.lists(st.integers(0, 12), min_size=1, max_size=4), seed=st.integers(0, 1000), order=st.randoms())
def test_any_partition_in_any_order(dtype, tolerance, cuts, seed, order):
    """Known failure 8: out and lse of a split key set are those of the whole."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, 2, 12, generator=generator, dtype=torch.float64)
    values = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    bounds = [0, *sorted(cuts), 12]
    parts = [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]
    order.shuffle(parts)
    out, lse = torch.zeros(3, 2, 4, dtype=dtype), torch.full((3, 2), -INF, dtype=dtype)
    for part in parts:
        new_out, new_lse = attend(scores[..., part], values[part])
        out, lse = merge(out, lse, new_out.to(dtype), new_lse.to(dtype))
    expected_out, expected_lse = attend(scores, values)
    assert error(out, expected_out) < tolerance
    assert error(lse, expected_lse) < tolerance


@given(a=st.floats(-1e4, 1e4, width=32), gap=st.floats(-30, 30, width=32), x=st.floats(-1, 1), y=st.floats(-1, 1))
def test_huge_scores_keep_float32_precision(a, gap, x, y):
    """Known failure 9: at |lse| 1e4 the weights come from the difference, not from exp(lse - joint)."""
    lse = torch.tensor([[a]])
    new_lse = lse + gap
    out, joint = merge(torch.tensor([[[x]]]), lse, torch.tensor([[[y]]]), new_lse)
    weight = torch.sigmoid(new_lse.double() - lse.double()).item()
    assert abs(out.item() - (x + weight * (y - x))) < 1e-6
    assert abs(joint.item() - torch.logaddexp(lse.double(), new_lse.double()).item()) <= 1e-6 * max(
        1, abs(joint.item())
    )


def test_overflowing_scores_stay_finite():
    """Known failure 9."""
    lse = torch.tensor([[1e4, -1e4, 3e38, -3e38]])
    out, joint = merge(torch.ones(1, 4, 1), lse, torch.zeros(1, 4, 1), -lse)
    assert out.flatten().tolist() == [1, 0, 1, 0]
    assert joint.tolist() == lse.abs().tolist()


def test_empty_sets():
    """Known failure 5: an empty partial adds nothing, two of them give 0 and -inf, never nan."""
    value, empty = (torch.full((1, 1, 2), 3.0), torch.tensor([[2.0]])), (torch.zeros(1, 1, 2), torch.tensor([[-INF]]))
    for left, right in ((value, empty), (empty, value)):
        out, lse = merge(*left, *right)
        assert out.tolist() == value[0].tolist()
        assert lse.item() == 2.0
    out, lse = merge(*empty, *empty)
    assert out.tolist() == [[[0.0, 0.0]]]
    assert lse.item() == -INF


def test_accumulators_keep_their_dtype():
    out, lse = merge(
        torch.zeros(1, 1, 2), torch.zeros(1, 1), torch.ones(1, 1, 2, dtype=torch.bfloat16), torch.zeros(1, 1)
    )
    assert out.dtype == lse.dtype == torch.float32
    assert out.tolist() == [[[0.5, 0.5]]]
