"""rl.grpo against numbers worked out by hand."""

import math

import pytest
import torch

from cospec.rl.grpo import group_advantages, length_penalty, policy_loss, policy_metrics, sft_loss

D = torch.float64


def logs(*probabilities):
    return torch.tensor(probabilities, dtype=D).log()


def test_advantages_by_hand():
    got = group_advantages([1, 0, 0, 1, 3, 3, 3, 7], 4, eps=0.0)
    assert got[:4] == pytest.approx([1, -1, -1, 1])
    assert got[4:] == pytest.approx([-1 / math.sqrt(3)] * 3 + [math.sqrt(3)])


def test_equal_rewards_teach_nothing():
    """Also where the mean is not a float: 0.1 + 0.1 + 0.1 over 3 leaves a residue."""
    assert group_advantages([0.1] * 3 + [0.7] * 3, 3) == [0.0] * 6


def test_advantages_stay_bounded_when_rewards_hardly_differ():
    assert max(map(abs, group_advantages([0.5, 0.5 + 1e-9], 2))) < 1e-2


def test_incomplete_groups_and_bad_rewards():
    with pytest.raises(ValueError, match="5 rewards.*group_size=2"):
        group_advantages([1.0] * 5, 2)
    with pytest.raises(ValueError, match=r"samples \[1\]"):
        group_advantages([1.0, float("nan")], 2)


def test_length_penalty():
    assert length_penalty([1.0, 0.0, 1.0], [48, 96, 200], 0.2, 96) == pytest.approx([0.9, -0.2, 0.8])


def test_first_update_is_the_weighted_policy_gradient():
    """Old = current: the gradient is -weight * A / N, whatever the clip."""
    logp = logs(0.5, 0.2, 0.1).requires_grad_()
    rollout = logs(0.4, 0.4, 0.01)
    advantages = torch.tensor([1.0, -2.0, 3.0], dtype=D)
    loss = policy_loss(logp, advantages, rollout, clip_low=0.01, clip_high=0.01, importance_cap=2.0, normaliser=10)
    loss.backward()
    weight = torch.tensor([1.25, 0.5, 2.0], dtype=D)  # the third, 10, is cut
    torch.testing.assert_close(logp.grad, -weight * advantages / 10)
    torch.testing.assert_close(loss.detach(), -(weight * advantages).sum() / 10)


def test_clip_is_asymmetric():
    old = logs(0.5, 0.5, 0.5, 0.5, 0.5)
    ratio = [1.25, 1.35, 0.85, 0.7, 1.35]
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0], dtype=D)
    logp = (old + torch.tensor(ratio, dtype=D).log()).requires_grad_()
    loss = policy_loss(logp, advantages, old, old_logp_T=old, clip_low=0.2, clip_high=0.28)
    loss.backward()
    assert loss.item() == pytest.approx(-(1.25 + 1.28 - 0.85 - 0.8 - 1.35))
    # Outside the clip on the side that the advantage pushes to, there is no gradient.
    assert logp.grad.tolist() == pytest.approx([-1.25, 0, 0.85, 0, 1.35])
    metrics = policy_metrics(logp, advantages, old, old_logp_T=old)
    assert metrics[[0, 3]].tolist() == [2, 5]


def test_importance_weight_uses_the_old_policy_and_has_no_gradient():
    logp, old, rollout = logs(0.3).requires_grad_(), logs(0.25), logs(0.5)
    policy_loss(logp, torch.ones(1, dtype=D), rollout, old_logp_T=old).backward()
    assert logp.grad.item() == pytest.approx(-(0.25 / 0.5) * (0.3 / 0.25))


def test_kl_to_the_rollout_policy():
    logp, rollout = logs(0.5, 0.25).requires_grad_(), logs(0.25, 0.5)
    loss = policy_loss(logp, torch.zeros(2, dtype=D), rollout, kl_coef=0.1, normaliser=2)
    k3 = (0.5 - 1 - math.log(0.5)) + (2 - 1 - math.log(2))
    assert loss.item() == pytest.approx(0.1 * k3 / 2)
    loss.backward()
    assert logp.grad.tolist() == pytest.approx([0.1 * (1 - 0.5) / 2, 0.1 * (1 - 2) / 2])
    assert policy_metrics(logp, torch.zeros(2), rollout)[2].item() == pytest.approx(k3)


def test_parts_of_a_batch_add_up():
    """Known failure 14: the mean is over the global batch, not over what a rank happens to hold."""
    g = torch.Generator().manual_seed(0)
    logp, rollout, advantages = (torch.randn(7, generator=g, dtype=D) for _ in range(3))
    whole = policy_loss(logp, advantages, rollout, kl_coef=0.1, normaliser=7)
    parts = [
        policy_loss(logp[part], advantages[part], rollout[part], kl_coef=0.1, normaliser=7)
        for part in (slice(0, 2), slice(2, 2), slice(2, 7))
    ]
    torch.testing.assert_close(sum(parts), whole)
    torch.testing.assert_close(sft_loss(logp[:2], normaliser=7) + sft_loss(logp[2:], normaliser=7), -logp.mean())


def test_no_supervised_rows():
    """Known failure 16: an empty share is zero with a gradient, not nan."""
    logp = torch.zeros(0, requires_grad=True)
    loss = policy_loss(logp, torch.zeros(0), torch.zeros(0), normaliser=5)
    loss.backward()
    assert loss == 0
    assert logp.grad.shape == (0,)


def test_bad_input():
    with pytest.raises(ValueError, match="advantages"):
        policy_loss(torch.zeros(3), torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="normaliser"):
        sft_loss(torch.zeros(3), normaliser=0)
