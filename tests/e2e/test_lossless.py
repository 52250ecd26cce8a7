"""Speculation changes the speed, never the distribution (known failure 42)."""

import pytest
import torch

from cospec.records import SamplingParams
from cospec.rollout import NativeEngine, acceptance_length, native
from support.toy_lm import (
    chi_square_p,
    joint_distribution,
    marginal,
    random_prompts,
    table_draft,
    tiny_draft,
    tiny_policy,
)

PROMPT, STEPS, SAMPLES, VOCAB = [3, 1, 4], 5, 4200, 7
LEAST_P = 1e-4


@pytest.fixture(scope="module")
def policy():
    return tiny_policy(vocab_size=VOCAB, size=16, sharpness=3.0, context=4.0)


@pytest.fixture(scope="module")
def joints(policy):
    cache = {}

    def get(params):
        if params not in cache:
            cache[params] = joint_distribution(policy, PROMPT, STEPS, params)
        return cache[params]

    return get


def make_draft(policy, kind):
    if kind == "eagle3":  # untrained, proposing from five of the seven tokens
        return tiny_draft(policy, vocab=torch.tensor([0, 2, 3, 4, 6]))
    return None if kind == "none" else table_draft(policy, kind)


def sample_responses(policy, draft, params):
    engine = NativeEngine(policy, draft, num_draft_tokens=3, max_batch=1024, max_len=16)
    rollouts = engine.generate([PROMPT] * SAMPLES, params)
    return torch.tensor([r.token_ids for r in rollouts]), rollouts


def p_values(tokens, joint):
    """Marginals of every response position, joints of neighbours, and of the whole response."""
    groups = [(i,) for i in range(STEPS)] + [(i, i + 1) for i in range(STEPS - 1)] + [tuple(range(STEPS))]
    for group in groups:
        probs = marginal(joint, *group)
        flat = torch.zeros(len(tokens), dtype=torch.int64)
        for i in group:
            flat = flat * VOCAB + tokens[:, i]
        yield group, chi_square_p(torch.bincount(flat, minlength=probs.numel()), probs)


PLAIN = [SamplingParams(max_new_tokens=STEPS, temperature=t, seed=11) for t in (0.7, 1.0)]
FILTERED = SamplingParams(max_new_tokens=STEPS, temperature=1.3, top_k=5, top_p=0.9, seed=12)


CASES = [(p, kind) for p in PLAIN for kind in ("none", "good", "bad", "adversarial", "eagle3")]
CASES += [(FILTERED, "good"), (FILTERED, "eagle3")]


@pytest.mark.parametrize("params, kind", CASES, ids=lambda c: c if isinstance(c, str) else f"t{c.temperature}")
def test_samples_have_the_policys_distribution(policy, joints, kind, params):
    """21 000 sampled tokens against exact probabilities, at every position of the response."""
    tokens, rollouts = sample_responses(policy, make_draft(policy, kind), params)
    joint = joints(params)
    assert joint.sum().item() == pytest.approx(1, abs=1e-6)
    rejected = {group: p for group, p in p_values(tokens, joint) if p < LEAST_P}
    assert not rejected
    if kind == "good":
        assert acceptance_length(rollouts) > 1.8  # the chains were really accepted
    if kind == "adversarial" and params in PLAIN:
        assert acceptance_length(rollouts) < 1.1  # proposals were near impossible


@pytest.mark.parametrize("fault", ["resample from the policy", "accept too often", "one uniform for two purposes"])
def test_the_test_refuses_lossy_rules(policy, joints, monkeypatch, fault):
    if fault == "resample from the policy":
        monkeypatch.setattr(native, "resample", lambda policy_BV, draft_BV, u_B: native.draw(policy_BV, u_B, PLAIN[1]))
    elif fault == "accept too often":
        rule = native.accept
        monkeypatch.setattr(native, "accept", lambda p, q, tokens, u: rule(p, q, tokens, 0.7 * u))
    else:
        monkeypatch.setattr(native, "ACCEPT", native.PROPOSE)
    tokens, _ = sample_responses(policy, make_draft(policy, "bad"), PLAIN[1])
    assert min(p for _, p in p_values(tokens, joints(PLAIN[1]))) < LEAST_P


@pytest.mark.parametrize("kind", ["good", "bad", "eagle3"])
def test_greedy_output_is_the_same_with_a_draft(kind):
    """200 prompts of mixed lengths, more than there are slots."""
    policy = tiny_policy(vocab_size=40, layers=3, sharpness=2.0, context=3.0)
    draft = tiny_draft(policy) if kind == "eagle3" else table_draft(policy, kind)
    prompts = random_prompts(200, 40, longest=20)
    params = SamplingParams(max_new_tokens=24, temperature=0, stop_token_ids=(7,))
    plain = NativeEngine(policy, max_batch=64, max_len=48).generate(prompts, params)
    fast = NativeEngine(policy, draft, num_draft_tokens=4, max_batch=64, max_len=48).generate(prompts, params)
    assert [r.token_ids for r in fast] == [r.token_ids for r in plain]
    assert [r.finish_reason for r in fast] == [r.finish_reason for r in plain]
    assert {r.finish_reason for r in plain} == {"stop", "length"}
    for a, b in zip(fast, plain, strict=True):
        torch.testing.assert_close(torch.tensor(a.logp), torch.tensor(b.logp), rtol=0, atol=2e-4)
    if kind == "good":
        assert acceptance_length(fast) > 1.3
