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


def draft_loss(
    hidden_KTD: Sequence[Tensor],
    head_UD: Tensor,
    teacher_SD: Tensor,
    teacher_head_VD: Tensor,
    rows_KS: Tensor,
    coef_K: Tensor,
    *,
    vocab_map_U: Tensor | None = None,
    renormalise: bool = False,
) -> dict[str, Tensor]:
    """Soft-label loss of K passes, one pair after another, and its metrics.

    Same arguments and meaning as `ops.losses.draft_loss`; returns a dict with its fields.
    """
    num_passes, num_rows = len(hidden_KTD), hidden_KTD[0].shape[0]
    policy_SV = (teacher_SD.detach().double() @ teacher_head_VD.detach().double().T).softmax(-1)
    ids_U = torch.arange(head_UD.shape[0]) if vocab_map_U is None else vocab_map_U
    loss = torch.zeros((), dtype=torch.float64)
    loss_sum, alpha_sum, top1_sum, count = (torch.zeros(num_passes, dtype=torch.float64) for _ in range(4))
    alpha_of: list[dict[int, Tensor]] = [{} for _ in range(num_passes)]
    for k in range(num_passes):
        for s in range(rows_KS.shape[1]):
            row = int(rows_KS[k, s])
            if row < 0:
                continue
            policy_U = policy_SV[s, ids_U]
            log_draft_U = (hidden_KTD[k][row].double() @ head_UD.double().T).log_softmax(-1)
            target_U = policy_U / policy_U.sum() if renormalise else policy_U
            cross_entropy = -(target_U * log_draft_U).sum()
            loss = loss + coef_K[k].double() * cross_entropy
            alpha = torch.minimum(policy_U, log_draft_U.detach().exp()).sum()
            loss_sum[k] += cross_entropy.detach()
            alpha_sum[k] += alpha
            top1_sum[k] += float(policy_SV[s].argmax() == ids_U[log_draft_U.argmax()])
            count[k] += 1
            alpha_of[k][row] = alpha
    length_sum, length_count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for row in range(num_rows):
        if all(row in alpha_of[k] for k in range(num_passes)):
            accepted = torch.stack([alpha_of[k][row] for k in range(num_passes)])
            length_sum += 1 + accepted.cumprod(0).sum()
            length_count += 1
    return {
        "loss": loss,
        "loss_sum": loss_sum,
        "alpha_sum": alpha_sum,
        "top1_sum": top1_sum,
        "count": count,
        "length_sum": length_sum,
        "length_count": length_count,
    }


def token_logprobs(hidden_TD: Tensor, head_VD: Tensor, labels_T: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-probability of each label, float64 [T]; see `ops.losses.token_logprobs`."""
    logits_TV = hidden_TD.double() @ head_VD.double().T / temperature
    return logits_TV.log_softmax(-1).gather(1, labels_T[:, None]).squeeze(1)
