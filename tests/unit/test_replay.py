"""The native engine's chains recomputed by the training code (known failures 26, 43)."""

import pytest
import torch

from cospec.records import SamplingParams
from cospec.rollout import NativeEngine
from cospec.rollout.replay import Chain, chains_of, replay
from support.toy_lm import random_prompts, tiny_draft, tiny_policy

VOCAB = torch.arange(0, 40, 2)


@pytest.fixture(scope="module")
def models():
    policy = tiny_policy(vocab_size=40, layers=4, sharpness=2.0, context=3.0)
    return policy, tiny_draft(policy, vocab=VOCAB)


def run(models, temperature, **filters):
    policy, draft = models
    engine = NativeEngine(policy, draft, num_draft_tokens=3, max_len=48, record_proposals=True)
    params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=4, **filters)
    prompts = [[1, *p] for p in random_prompts(24, 40, longest=12)]
    return chains_of(engine.generate(prompts, params), engine.proposals), params


def test_greedy_proposals_and_acceptances_are_equal(models):
    chains, params = run(models, 0)
    found = replay(*models, chains, params)
    assert found.proposals >= 200
    assert found.agrees, found
    assert (found.proposals_differ, found.kept_differ) == (0, 0)


@pytest.mark.parametrize("filters", [{}, {"top_k": 12, "top_p": 0.9}], ids=["plain", "filtered"])
def test_sampled_acceptances_are_as_many_as_expected(models, filters):
    chains, params = run(models, 0.8, **filters)
    found = replay(*models, chains, params)
    assert found.tested > 200
    assert found.agrees, found


def test_other_weights_and_other_counts_do_not_agree(models):
    policy, draft = models
    chains, params = run(models, 0)
    other = tiny_draft(policy, seed=9, vocab=VOCAB)
    assert replay(policy, other, chains, params).proposals_differ > 50
    shifted = [Chain(c.prefix, c.proposed, None if c.kept is None else c.kept + 1) for c in chains]
    assert replay(policy, draft, shifted, params).kept_differ > 50
