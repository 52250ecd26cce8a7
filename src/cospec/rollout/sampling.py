"""Distributions that are sampled from, and randomness that depends on the sample alone.

A uniform number is a pure function of (seed, sample id, token position, purpose): a
sample's tokens depend neither on the batch that it sits in nor on the number of ranks.
Reusing the number of a position after a rejection further left is sound: the rejection
was decided by numbers of earlier positions only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cospec.ops.acceptance import sample
from cospec.records import SamplingParams

PROPOSE, ACCEPT, SAMPLE = 0, 1, 2
"""Purposes: the draft's proposal, its acceptance, the token drawn from the policy or the rest."""

_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def _mix(x: Tensor) -> Tensor:
    """The splitmix64 finaliser on int64 (products wrap; right shifts made logical)."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def stream_keys(seed: int, sample_ids_B: Tensor) -> Tensor:
    """One int64 key per sample [B], to be computed once and handed to `uniforms`."""
    signed = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
    seed_key = _mix(torch.full_like(sample_ids_B, signed) + _GAMMA)
    return _mix(seed_key ^ _mix(sample_ids_B + _GAMMA))


def uniforms(keys: Tensor, positions: Tensor, purpose: int) -> Tensor:
    """float64 in [0, 1) with 53 random bits; `keys` and `positions` (int64) broadcast.

    Source: Steele, Lea & Flood 2014 (SplitMix), used here as a hash of a counter.
    """
    bits = _mix(_mix(keys + (positions * 4 + purpose + 1) * _GAMMA))
    return ((bits >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def policy_logp(logits: Tensor, temperature: float) -> Tensor:
    """float32 (float64 for float64) log-probabilities [..., V] at `temperature`; 0 means 1.

    These are what a rollout records: before top-k and top-p, and at temperature 1 when greedy.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(logits / temperature if temperature not in (0.0, 1.0) else logits, dim=-1)


def distribution(logp: Tensor, params: SamplingParams) -> Tensor:
    """The distribution that is sampled from [..., V], given `policy_logp`.

    temperature 0: one-hot at the most probable token (lowest id on ties). Else top-k
    (exactly k tokens, lowest ids first on ties), then top-p (the smallest set of the
    remaining tokens whose renormalised mass reaches top_p), renormalised.
    """
    if params.temperature == 0:
        return torch.zeros_like(logp).scatter_(-1, logp.argmax(-1, keepdim=True), 1.0)
    probs = logp.exp()
    top_k = params.top_k if 0 < params.top_k < probs.shape[-1] else 0
    if not top_k and params.top_p >= 1:
        return probs
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    if top_k:
        ordered[..., top_k:] = 0
    if params.top_p < 1:
        ordered = ordered / ordered.sum(-1, keepdim=True)
        before = ordered.double().cumsum(-1) - ordered
        ordered = ordered.masked_fill(before >= params.top_p, 0)
    ordered = ordered / ordered.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, index, ordered)


def draw(probs: Tensor, u: Tensor, params: SamplingParams) -> Tensor:
    """One token [...] per distribution [..., V]; a greedy one is one-hot and needs no random number."""
    return probs.argmax(-1) if params.temperature == 0 else sample(probs, u)
