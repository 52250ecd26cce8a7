"""The engine's self-test: uniform for a sound sampler, refused for a biased one (known failure 42)."""

import pytest
import torch

from cospec.records import SamplingParams
from cospec.rollout.probe import LEAST_P, ProbeResult, chi_square, rank_uniforms
from cospec.rollout.sampling import distribution
from cospec.rollout.vllm_worker import expand_batch_to_tokens, expands_rightly

VOCAB, TOKENS, TOP = 50, 3000, 20
PLAIN = SamplingParams(temperature=0.7)
FILTERED = SamplingParams(temperature=1.0, top_k=8, top_p=0.9)


def draw(params, bias=1.0):
    """Tokens of as many contexts, from the policy's distribution to the power `bias`, and what is known of them."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(TOKENS, VOCAB, generator=generator).double()
    logp = torch.log_softmax(logits / params.temperature, -1)
    sampled_from = distribution(torch.log_softmax(logp * bias, -1), params)
    token = torch.multinomial(sampled_from, 1, generator=generator)
    rank = (logp > logp.gather(1, token)).sum(1) + 1
    u = torch.rand(TOKENS, generator=generator, dtype=torch.float64)
    return logp.topk(TOP).values, rank, u


@pytest.mark.parametrize("params", [PLAIN, FILTERED], ids=["plain", "filtered"])
def test_a_sound_sampler_passes_and_a_biased_one_does_not(params):
    values, forbidden = rank_uniforms(*draw(params), params)
    assert forbidden == 0
    assert len(values) == TOKENS
    assert chi_square(values)[0] > 1e-3
    values, _ = rank_uniforms(*draw(params, bias=1.4), params)
    p, z = chi_square(values)
    assert p < LEAST_P
    assert z > 5


def test_tokens_that_a_filter_forbids_are_counted():
    _, forbidden = rank_uniforms(*draw(PLAIN), FILTERED)
    assert forbidden > 10


def test_what_counts_as_lossless():
    assert ProbeResult(1000, 0.3, 0.5, 1e-6).lossless
    assert not ProbeResult(1000, 1e-9, 40.0, 1e-6).lossless
    assert not ProbeResult(1000, 0.3, 0.5, 0.4).lossless  # verified on another distribution than recorded


def test_filters_need_their_log_probabilities():
    with pytest.raises(ValueError, match="top_k=30: must be 1..20"):
        rank_uniforms(*draw(PLAIN), SamplingParams(top_k=30))


def test_the_repair_does_what_is_missing_and_knows_when_it_is_not():
    x, cu = torch.tensor([0.0, 2.0, 3.0]), torch.tensor([2, 2, 5], dtype=torch.int32)
    assert expand_batch_to_tokens(x, cu, 5, 0, 1).tolist() == [1, 1, 3, 3, 3]
    assert expand_batch_to_tokens(x.int(), cu, 5).tolist() == [0, 0, 3, 3, 3]
    assert expands_rightly(expand_batch_to_tokens)
    assert not expands_rightly(lambda x, cu, n, *_: x.new_empty(n))  # the fault: nothing is written
    assert not expands_rightly(lambda x, cu, n, *_: expand_batch_to_tokens(x, cu, n))  # nothing is replaced
