"""Counter-based randomness, temperature, top-k and top-p against plain loops."""

import math

import pytest
import torch

from cospec.records import SamplingParams
from cospec.rollout.sampling import ACCEPT, PROPOSE, SAMPLE, distribution, policy_logp, stream_keys, uniforms

MASK = (1 << 64) - 1


def splitmix(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def reference_uniform(seed, sample_id, position, purpose):
    gamma = 0x9E3779B97F4A7C15
    key = splitmix(splitmix((seed + gamma) & MASK) ^ splitmix((sample_id + gamma) & MASK))
    bits = splitmix(splitmix((key + (position * 4 + purpose + 1) * gamma) & MASK))
    return (bits >> 11) * 2.0**-53


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**64 - 1, -1])
def test_uniforms_are_a_pure_function_of_the_counter(seed):
    ids = torch.tensor([0, 1, 12345, 2**62])
    keys = stream_keys(seed, ids)
    for purpose in (PROPOSE, ACCEPT, SAMPLE):
        values = uniforms(keys[:, None], torch.arange(5), purpose)
        expected = [[reference_uniform(seed, i, t, purpose) for t in range(5)] for i in ids.tolist()]
        assert values.dtype == torch.float64
        assert values.tolist() == expected


def test_uniforms_are_uniform_and_uncorrelated():
    keys = stream_keys(7, torch.arange(2000))
    draws = torch.stack([uniforms(keys[:, None], torch.arange(50), p) for p in (PROPOSE, ACCEPT, SAMPLE)])
    assert draws.min() >= 0
    assert draws.max() < 1
    n = draws[0].numel()
    for flat in draws.flatten(1):
        assert abs(flat.mean() - 0.5) < 5 / math.sqrt(12 * n)
        counts = torch.histc(flat, 64, 0, 1)
        assert ((counts - n / 64) ** 2 / (n / 64)).sum() < 63 + 6 * math.sqrt(2 * 63)
    centred = draws - 0.5
    pairs = [
        (centred[0], centred[1]),
        (centred[1], centred[2]),
        (centred[0][:, 1:], centred[0][:, :-1]),
        (centred[2][1:], centred[2][:-1]),
    ]
    for a, b in pairs:
        assert abs((a * b).mean() * 12) < 5 / math.sqrt(a.numel())


def naive_distribution(logits, params):
    probs = [math.exp(x / params.temperature) for x in logits]
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    if params.top_k:
        order = order[: params.top_k]
    mass, kept, reached = sum(probs[i] for i in order), [], 0.0
    for i in order:
        if reached >= params.top_p and params.top_p < 1:
            break
        kept.append(i)
        reached += probs[i] / mass
    mass = sum(probs[i] for i in kept)
    return [probs[i] / mass if i in kept else 0.0 for i in range(len(probs))]


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 3, 50])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 1e-6])
def test_distribution_against_a_plain_loop(temperature, top_k, top_p):
    torch.manual_seed(0)
    logits = torch.randn(6, 11, dtype=torch.float64)
    logits[0, 3] = logits[0, 7]  # a tie
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    probs = distribution(policy_logp(logits, temperature), params)
    expected = torch.tensor([naive_distribution(row, params) for row in logits.tolist()], dtype=torch.float64)
    torch.testing.assert_close(probs, expected, rtol=0, atol=1e-12)


def test_top_k_keeps_exactly_k_on_ties():
    probs = distribution(policy_logp(torch.zeros(1, 6), 1.0), SamplingParams(top_k=2))
    assert probs.tolist() == [[0.5, 0.5, 0, 0, 0, 0]]


def test_greedy_is_one_hot_at_the_argmax_and_logp_at_temperature_one():
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    logp = policy_logp(logits, 0.0)
    torch.testing.assert_close(logp, logits.log_softmax(-1))
    assert distribution(logp, SamplingParams(temperature=0)).tolist() == [[0, 1, 0]]
