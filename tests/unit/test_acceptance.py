"""The lossless rule, inverse-CDF sampling and acceptance figures."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cospec.ops.acceptance import accept_or_resample, acceptance, sample

WEIGHTS = st.lists(st.floats(0, 1, allow_subnormal=False), min_size=5, max_size=5).filter(lambda w: sum(w) > 1e-3)


def normalised(weights):
    probs = torch.tensor(weights, dtype=torch.float64)
    return probs / probs.sum()


@settings(derandomize=True, deadline=None, max_examples=60)
@given(WEIGHTS, WEIGHTS)
def test_rule_reproduces_the_policy_exactly(policy_weights, draft_weights):
    """Known failure 42. Integrate the rule over a grid of uniforms: the token has the policy's distribution."""
    policy, draft = normalised(policy_weights), normalised(draft_weights)
    grid = (torch.arange(400, dtype=torch.float64) + 0.5) / 400
    u_accept, u_resample = (u.flatten() for u in torch.meshgrid(grid, grid, indexing="ij"))
    result = torch.zeros(5, dtype=torch.float64)
    for token in range(5):
        proposed = torch.full_like(u_accept, token, dtype=torch.int64)
        rows = u_accept.numel()
        _, tokens = accept_or_resample(policy.expand(rows, 5), draft.expand(rows, 5), proposed, u_accept, u_resample)
        result += draft[token] * torch.bincount(tokens, minlength=5) / rows
    assert (result - policy).abs().max() < 5e-3
    assert (result[policy == 0] == 0).all()


def test_acceptance_rate_is_the_overlap():
    torch.manual_seed(0)
    policy, draft = torch.rand(7).softmax(0), (2 * torch.rand(7)).softmax(0)
    rows = 200_000
    proposed = sample(draft.expand(rows, 7), torch.rand(rows, dtype=torch.float64))
    accepted, _ = accept_or_resample(
        policy.expand(rows, 7), draft.expand(rows, 7), proposed, torch.rand(rows), torch.rand(rows)
    )
    expected = acceptance(policy.log(), draft.log())
    assert abs(accepted.double().mean() - expected) < 4 * 0.5 / rows**0.5


def test_out_of_vocabulary_is_a_rejection():
    """Known failure 18."""
    policy = torch.tensor([0.25, 0.75])
    draft = torch.tensor([1.0, 0.0])
    assert acceptance(policy.log(), draft.log()).item() == pytest.approx(0.25)


def test_greedy_rule_is_equality():
    one_hot = torch.eye(3)
    accepted, tokens = accept_or_resample(
        one_hot[torch.tensor([1, 1])],
        one_hot[torch.tensor([1, 2])],
        torch.tensor([1, 2]),
        torch.tensor([0.999999, 0.0]),
        torch.tensor([0.3, 0.3]),
    )
    assert accepted.tolist() == [True, False]
    assert tokens.tolist() == [1, 1]


def test_impossible_proposal_is_never_kept():
    policy = torch.tensor([[0.0, 1.0]])
    accepted, token = accept_or_resample(
        policy, torch.tensor([[1.0, 0.0]]), torch.tensor([0]), torch.zeros(1), torch.zeros(1)
    )
    assert not accepted.item()
    assert token.item() == 1


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1e-8, 0.3, 1.0]), min_size=1, max_size=9).filter(any),
    st.sampled_from([0.0, 1e-17, 0.25, 0.5, 1 - 2**-53]),
)
def test_sample_never_returns_a_zero_probability_token(weights, u):
    probs = torch.tensor(weights)
    token = sample(probs, torch.tensor(u, dtype=torch.float64))
    assert 0 <= token < len(weights)
    assert probs[token] > 0


def test_sample_inverts_the_cdf():
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0]).expand(5, 6)
    u = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75], dtype=torch.float64)
    assert sample(probs, u).tolist() == [1, 1, 3, 3, 4]


def test_sample_keeps_the_tail_of_a_large_vocabulary():
    """A float32 cumulative sum would lose tokens of probability 1e-9 behind a mass near 1."""
    probs = torch.full((100_001,), 1e-9)
    probs[0] = 1 - 1e-4
    u = torch.tensor([1 - 0.5e-4 - 1e-12], dtype=torch.float64)
    assert abs(int(sample(probs.unsqueeze(0), u)) - 50_000) < 5
