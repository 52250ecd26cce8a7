"""Group-relative advantages and the clipped policy loss; pure tensor functions.

Losses are sums over the rows given, divided by `normaliser`: the number of supervised
tokens of the *global* batch, so that shares of ranks and microbatches add up to its mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def length_penalty(rewards: Sequence[float], lengths: Sequence[int], coef: float, max_tokens: int) -> list[float]:
    """`reward - coef * length / max_tokens`: a response of `max_tokens` loses all of `coef`."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} must be >= 1")
    return [r - coef * min(n / max_tokens, 1.0) for r, n in zip(rewards, lengths, strict=True)]


def group_advantages(rewards: Sequence[float], group_size: int, *, eps: float = 1e-6) -> list[float]:
    """`(reward - mean) / (std + eps)` within each group of `group_size` consecutive samples.

    std is the population's (divisor `group_size`). A group of equal rewards teaches
    nothing: its advantages are exactly 0. Source: GRPO, Shao et al. 2024, section 4.1.

    Raises ValueError when the samples do not make whole groups, or a reward is not finite.
    """
    if group_size < 2 or len(rewards) % group_size:
        raise ValueError(f"{len(rewards)} rewards do not make groups of group_size={group_size} (>= 2)")
    rewards_GB = torch.tensor(list(rewards), dtype=torch.float64).view(-1, group_size)
    bad = (~rewards_GB.isfinite()).flatten().nonzero().flatten().tolist()
    if bad:
        raise ValueError(f"the rewards of samples {bad} are not finite")
    centred_GB = rewards_GB - rewards_GB.mean(1, keepdim=True)
    equal_G1 = rewards_GB.amax(1, keepdim=True) == rewards_GB.amin(1, keepdim=True)
    std_G1 = centred_GB.pow(2).mean(1, keepdim=True).sqrt()
    return torch.where(equal_G1, 0.0, centred_GB / (std_G1 + eps)).flatten().tolist()


def policy_loss(
    logp_T: Tensor,
    advantages_T: Tensor,
    rollout_logp_T: Tensor,
    *,
    old_logp_T: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    importance_cap: float = 2.0,
    kl_coef: float = 0.0,
    normaliser: float = 1.0,
) -> Tensor:
    """Clipped surrogate with truncated importance weights, summed over the supervised rows.

    With `old` the trainer's policy when the batch came in and `rollout` the engine's:

        ratio  = exp(logp - old_logp)
        weight = min(exp(old_logp - rollout_logp), importance_cap)        (no gradient)
        loss   = -weight * min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)
                 + kl_coef * (exp(d) - 1 - d),   d = rollout_logp - logp

    Without `old_logp_T` (one update per batch) the old policy is the current one: the
    ratio is 1, with gradient.

    Args:
        logp_T: log-probability of the sampled token under the trained policy, with gradient.
        rollout_logp_T: the same under the engine's policy, as it was sampled.
        normaliser: supervised tokens of the global batch.

    Shapes: all [T] -> scalar. T may be 0: the loss is 0, and still has a gradient.
    Sources: PPO (Schulman et al. 2017); wider upper clip, DAPO (Yu et al. 2025);
        truncated weights, IMPALA (Espeholt et al. 2018); k3 estimate, Schulman 2020.
    """
    _check(logp_T, normaliser, advantages=advantages_T, rollout_logp=rollout_logp_T)
    old_logp_T = logp_T.detach() if old_logp_T is None else old_logp_T.detach()
    _check(logp_T, normaliser, old_logp=old_logp_T)
    ratio_T = (logp_T - old_logp_T).exp()
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    surrogate_T = torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    weight_T = (old_logp_T - rollout_logp_T).exp().clamp(max=importance_cap)
    loss_T = -weight_T * surrogate_T
    if kl_coef:
        difference_T = rollout_logp_T - logp_T
        loss_T = loss_T + kl_coef * (difference_T.expm1() - difference_T)
    return loss_T.sum() / normaliser


def sft_loss(logp_T: Tensor, *, normaliser: float = 1.0) -> Tensor:
    """Negative log-likelihood of the supervised rows: sum / normaliser."""
    _check(logp_T, normaliser)
    return -logp_T.sum() / normaliser


METRICS = ("policy_clip_fraction", "policy_truncated_fraction", "policy_kl_rollout")
"""What `policy_metrics` counts, as shares of the supervised rows or means over them."""


def policy_metrics(
    logp_T: Tensor,
    advantages_T: Tensor,
    rollout_logp_T: Tensor,
    *,
    old_logp_T: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    importance_cap: float = 2.0,
) -> Tensor:
    """float64 [4]: sums over the rows of METRICS (clipped, truncated, k3 KL to the rollout policy), and their number.

    Sums of ranks and microbatches add up; divide by the last only then.

    A row is clipped where the clip stops its gradient: the ratio beyond the upper bound
    with a positive advantage, beyond the lower one with a negative.
    """
    with torch.no_grad():
        old_logp_T = logp_T if old_logp_T is None else old_logp_T
        ratio_T = (logp_T - old_logp_T).exp()
        clipped_T = ((ratio_T > 1 + clip_high) & (advantages_T > 0)) | ((ratio_T < 1 - clip_low) & (advantages_T < 0))
        truncated_T = (old_logp_T - rollout_logp_T).exp() > importance_cap
        difference_T = rollout_logp_T - logp_T
        kl_T = difference_T.expm1() - difference_T
        counted = torch.stack([clipped_T, truncated_T, kl_T, torch.ones_like(kl_T)])
        return counted.to(torch.float64).sum(1)


def _check(logp_T: Tensor, normaliser: float, **others: Tensor) -> None:
    for name, value in others.items():
        if value.shape != logp_T.shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, logp has {tuple(logp_T.shape)}")
    if not normaliser > 0:
        raise ValueError(f"normaliser={normaliser} must be > 0: the supervised tokens of the global batch")
