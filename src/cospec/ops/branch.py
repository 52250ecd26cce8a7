"""Branch attention: each row attends to its own few keys. Rank-local, closed form.

Forward gives a partial attention (out, lse) to be merged with the trunk; backward takes
the *merged* out and lse, so that the gradient through the common normaliser is right.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cospec.ops.merge import accumulator_dtype


def branch_forward(
    q_TNH: Tensor, k_branches: Sequence[Tensor], v_branches: Sequence[Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of row t to the keys k_branches[i][t], i = 0..K-1, K >= 1.

    Shapes:   q [T, N, H]; every k and v [T, M, H], M divides N. Returns out [T, N, H] and
              lse [T, N] in the accumulator dtype.
    Sharding: T is a cp shard; no communication.
    """
    dtype = accumulator_dtype(q_TNH.dtype)
    q = _grouped(q_TNH, k_branches[0]).to(dtype)
    scores = torch.stack([_row_dot(q, key.to(dtype)) for key in k_branches]) * scale
    lse = torch.logsumexp(scores, dim=0)
    weights = torch.exp(scores - lse)
    out = weights[0].unsqueeze(-1) * v_branches[0].to(dtype).unsqueeze(2)
    for weight, value in zip(weights[1:], v_branches[1:], strict=True):
        out.addcmul_(weight.unsqueeze(-1), value.to(dtype).unsqueeze(2))
    return out.flatten(1, 2), lse.flatten(1, 2)


def branch_backward(
    grad_TNH: Tensor,
    q_TNH: Tensor,
    k_branches: Sequence[Tensor],
    v_branches: Sequence[Tensor],
    out_TNH: Tensor,
    lse_TN: Tensor,
    scale: float,
    dq_TNH: Tensor | None = None,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Gradients of the merged attention with respect to q (branch share), k and v of the branches.

    With p_i = exp(s_i - lse): dv_i = sum_g p_i dout, ds_i = p_i (dout . v_i - dout . out),
    dq = scale sum_i ds_i k_i, dk_i = scale sum_g ds_i q, g over the query heads of a key head.
    `out_TNH`, `lse_TN` belong to the merged attention (trunk and all branches). Given `dq_TNH`, contiguous
    and in the accumulator dtype, the branch share is added to it in place.

    Shapes:   as `branch_forward`; dq [T, N, H] in the accumulator dtype, dk and dv lists of
              [T, M, H] in the dtype of the branches.
    Source:   FlashAttention-2, section 3.1 (backward), for one key.
    """
    dtype = accumulator_dtype(q_TNH.dtype)
    q, grad, out = (_grouped(x, k_branches[0]).to(dtype) for x in (q_TNH, grad_TNH, out_TNH))
    lse = lse_TN.to(dtype).view(q.shape[:3])
    scratch = torch.empty_like(q)
    delta = torch.mul(grad, out, out=scratch).sum(-1)
    dq = torch.zeros_like(q) if dq_TNH is None else dq_TNH.view(q.shape)
    dk_branches, dv_branches = [], []
    for k_branch, v_branch in zip(k_branches, v_branches, strict=True):
        key, value = k_branch.to(dtype), v_branch.to(dtype)
        weight = torch.exp(_row_dot(q, key, scratch) * scale - lse)
        dscore = weight * (_row_dot(grad, value, scratch) - delta) * scale
        dq.addcmul_(dscore.unsqueeze(-1), key.unsqueeze(2))
        dk_branches.append(_weighted_sum(dscore, q, scratch).to(k_branch.dtype))
        dv_branches.append(_weighted_sum(weight, grad, scratch).to(v_branch.dtype))
    return dq.flatten(1, 2), dk_branches, dv_branches


def _grouped(x_TNH: Tensor, key_TMH: Tensor) -> Tensor:
    """[T, N, H] as [T, M, N / M, H]: the query heads of each key head."""
    rows, heads, head_dim = x_TNH.shape
    return x_TNH.reshape(rows, key_TMH.shape[1], -1, head_dim)


# Elementwise products: matrix products this small cost more in calls than in arithmetic.
def _row_dot(x_TMGH: Tensor, y_TMH: Tensor, scratch: Tensor | None = None) -> Tensor:
    """[T, M, G]: the dot product of every row and head with its own key."""
    return torch.mul(x_TMGH, y_TMH.unsqueeze(2), out=scratch).sum(-1)


def _weighted_sum(weight_TMG: Tensor, x_TMGH: Tensor, scratch: Tensor | None = None) -> Tensor:
    """[T, M, H]: the sum over the query heads of each key head."""
    return torch.mul(x_TMGH, weight_TMG.unsqueeze(-1), out=scratch).sum(2)
