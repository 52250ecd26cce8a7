"""Dense float64 oracles of the ops: the formula as it reads, plain autograd, no care for speed.

Tests compare everything else with this file, so it imports nothing of cospec.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def attention(
    q_TNH: Tensor,
    k_TMH: Tensor,
    v_TMH: Tensor,
    lengths: Sequence[int],
    k_branches: Sequence[Tensor] = (),
    v_branches: Sequence[Tensor] = (),
    *,
    scale: float | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Packed causal trunk attention joined with each row's own branch keys.

    Row t of a document sees the trunk keys j <= t of that document and, of every branch
    i = 1..K, the key in its own row. With K branches the query stands at position t + K
    and branch key i at t + i; a `window` keeps keys less than `window` positions back.

    Shapes: q [T, N, H], k and v [T, M, H], branches [T, M, H] each, with M dividing N and
    T = sum(lengths) (no padding). Returns out [T, N, H] and lse [T, N] in float64.
    """
    q, k, v = (x.double() for x in (q_TNH, k_TMH, v_TMH))
    num_rows, num_heads, head_dim = q.shape
    group = num_heads // k.shape[1]
    scale = head_dim**-0.5 if scale is None else scale
    device = q.device

    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
    row = torch.arange(num_rows, device=device)
    depth = len(k_branches)
    distance = row[:, None] + depth - row[None, :]
    visible = (document[:, None] == document[None, :]) & (row[:, None] >= row[None, :])
    if window is not None:
        visible &= distance < window

    def per_head(x: Tensor) -> Tensor:
        return x.double().repeat_interleave(group, dim=1)

    scores = torch.einsum("tnh,jnh->tnj", q, per_head(k)) * scale
    scores = [torch.where(visible[:, None, :], scores, -torch.inf)]
    for i, key in enumerate(k_branches, start=1):
        score = (q * per_head(key)).sum(-1, keepdim=True) * scale
        if window is not None and depth - i >= window:
            score = torch.full_like(score, -torch.inf)
        scores.append(score)
    joined = torch.cat(scores, dim=-1)
    lse = torch.logsumexp(joined, dim=-1)
    weights = torch.exp(joined - lse[..., None])
    out = torch.einsum("tnj,jnh->tnh", weights[..., :num_rows], per_head(v))
    for i, value in enumerate(v_branches):
        out = out + weights[..., num_rows + i, None] * per_head(value)
    return out, lse
