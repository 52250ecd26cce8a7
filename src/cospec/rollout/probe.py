"""Is what an engine samples what its policy says? A chi-square test that needs no enumeration.

For a token drawn from p, with the vocabulary ordered by probability, the share of p before
the token plus a random part of its own share is uniform in [0, 1), whatever p is and whatever
came before it (Rosenblatt's transform, randomised at the jumps). So tokens of every context,
vocabulary size and position can be counted in one histogram.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cospec.records import SamplingParams
from cospec.rollout.sampling import distribution

LEAST_P = 1e-6
"""Below this p-value an engine is called biased: a sound one is refused once in a million starts."""


LARGEST_GAP = 0.05
"""Mean difference of log-probabilities: rounding of bfloat16 stays below it, wrong caches do not."""


@dataclass(frozen=True)
class ProbeResult:
    """tokens: how many were tested. p_value, z: of the worst histogram, see `chi_square`. logp_gap: mean
    difference between recorded log-probabilities and those of a plain pass over the same tokens."""

    tokens: int
    p_value: float
    z: float
    logp_gap: float

    @property
    def lossless(self) -> bool:
        return self.p_value >= LEAST_P and self.logp_gap <= LARGEST_GAP


def rank_uniforms(top_logp_TM: Tensor, rank_T: Tensor, u_T: Tensor, params: SamplingParams) -> tuple[Tensor, int]:
    """Numbers that are uniform in [0, 1) when the tokens were sampled from the policy.

    Args:
        top_logp_TM: the policy's M largest log-probabilities, descending, at the temperature of
            `params` and before top-k and top-p; a top-k must be <= M.
        rank_T: int64, rank of the sampled token, 1 is the most probable.
        u_T: float64 in [0, 1), independent.

    Returns (float64 [T'], the number of tokens that top-k or top-p forbids: left out).
    """
    most = top_logp_TM.shape[1]
    filtered = params.top_k > 0 or params.top_p < 1
    if filtered and not 0 < params.top_k <= most:
        raise ValueError(f"top_k={params.top_k}: must be 1..{most}, the log-probabilities that are known")
    probs_TM = distribution(top_logp_TM.double(), params)
    tail_T1 = (1 - probs_TM.sum(1, keepdim=True)).clamp(min=0) if not filtered else torch.zeros_like(probs_TM[:, :1])
    probs = torch.cat([probs_TM, tail_T1], 1)
    index = (rank_T - 1).clamp(max=most)[:, None]
    share_T = probs.gather(1, index)[:, 0]
    before_T = probs.cumsum(1).gather(1, index)[:, 0] - share_T
    allowed = share_T > 0
    return (before_T + u_T * share_T)[allowed], int((~allowed).sum())


def chi_square(values: Tensor, bins: int = 16) -> tuple[float, float]:
    """(p-value, z) of numbers in [0, 1) against the uniform distribution; z is about normal when they are."""
    counts = torch.bincount((values * bins).long().clamp(0, bins - 1), minlength=bins).double()
    expected = len(values) / bins
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor(float(bins - 1), dtype=torch.float64)
    p = torch.special.gammaincc(freedom / 2, statistic / 2)
    return float(p), float((statistic - freedom) / (2 * freedom).sqrt())
