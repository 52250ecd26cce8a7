"""Acceptance probabilities, acceptance length and the lossless rule of speculative sampling."""

from __future__ import annotations

import torch
from torch import Tensor


def acceptance(policy_logp: Tensor, draft_logp: Tensor) -> Tensor:
    """Probability that one draft token is accepted: `sum_v min(policy_v, draft_v)`.

    Shapes: log-probabilities [..., V] -> [...]. Both sides cover the policy's whole
    vocabulary: a token that the draft cannot propose has -inf and adds nothing, so it
    counts as a rejection.
    Source: Leviathan, Kalman & Matias 2023, theorem 3.5.
    """
    return torch.minimum(policy_logp, draft_logp).exp().sum(-1)


def sample(probs_BV: Tensor, u_B: Tensor) -> Tensor:
    """Inverse-CDF sampling: the first token whose cumulative probability exceeds u.

    Rows need not be normalised. A token of zero probability is never returned, whatever
    the rounding of the cumulative sum, unless the whole row is zero.

    Shapes:   probs [..., V] >= 0, u [...] in [0, 1) -> int64 [...].
    Numerics: the cumulative sum is float64, so that tail tokens keep their share.
    """
    cdf_BV = probs_BV.double().cumsum(-1)
    cdf_BV = cdf_BV.masked_fill(probs_BV <= 0, -1.0)
    total_B = cdf_BV.amax(-1)
    # u * total may round up to total, which no entry exceeds.
    threshold_B = torch.minimum(u_B.double() * total_B, torch.nextafter(total_B, torch.full_like(total_B, -1.0)))
    return (cdf_BV > threshold_B.unsqueeze(-1)).to(torch.uint8).argmax(-1)


def accept_or_resample(
    policy_probs_BV: Tensor, draft_probs_BV: Tensor, proposed_B: Tensor, u_accept_B: Tensor, u_resample_B: Tensor
) -> tuple[Tensor, Tensor]:
    """The lossless rule: the returned token is distributed exactly as the policy says.

    `proposed` (drawn from the draft's distribution) is kept with probability
    `min(1, policy / draft)`; else the token is drawn from the normalised positive part of
    `policy - draft`. One-hot distributions make it the greedy rule (accept iff equal).
    A draft row of zeros proposes nothing: pass any `proposed` and the token comes from
    the policy, unless the caller accepts it.

    Shapes: probabilities [..., V], the rest [...] -> (accepted bool [...], token int64 [...]).
    Source: Leviathan, Kalman & Matias 2023, appendix A.1; Chen et al. 2023, theorem 1.
    """
    accepted_B = accept(policy_probs_BV, draft_probs_BV, proposed_B, u_accept_B)
    return accepted_B, torch.where(accepted_B, proposed_B, resample(policy_probs_BV, draft_probs_BV, u_resample_B))


def accept(policy_probs_BV: Tensor, draft_probs_BV: Tensor, proposed_B: Tensor, u_B: Tensor) -> Tensor:
    """Keep the proposed token with probability min(1, policy / draft); bool [...].

    Written as `u * draft < policy`: no division, and what the policy cannot say is never kept.
    """
    index = proposed_B.unsqueeze(-1)
    policy_B = policy_probs_BV.gather(-1, index).squeeze(-1).double()
    draft_B = draft_probs_BV.gather(-1, index).squeeze(-1).double()
    return u_B.double() * draft_B < policy_B


def resample(policy_probs_BV: Tensor, draft_probs_BV: Tensor, u_B: Tensor) -> Tensor:
    """A token from the normalised positive part of policy - draft; int64 [...].

    Where the difference is empty (equal distributions) a rejection has probability zero up
    to rounding; the policy's own distribution then stands in.
    """
    rest_BV = (policy_probs_BV - draft_probs_BV).clamp_min(0)
    empty_B = rest_BV.sum(-1, keepdim=True) <= 0
    return sample(torch.where(empty_B, policy_probs_BV, rest_BV), u_B)
