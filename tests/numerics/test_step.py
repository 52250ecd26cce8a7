"""The co-training step: what the draft may not touch, what packing may not change, what stops an update."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cospec.config import DraftConfig, OptimConfig, PolicyConfig, RunConfig, TrainConfig
from cospec.mesh import Mesh
from cospec.records import Diverged, Document
from cospec.train.setup import build_learner
from cospec.train.step import LossRows, cotrain_step, next_token_loss, policy_logprobs

VOCAB = 48


def config(**draft) -> RunConfig:
    return RunConfig(
        policy=PolicyConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
        ),
        policy_optim=OptimConfig(lr=1e-3),
        draft=DraftConfig(**{"num_passes": 3, **draft}),
        draft_optim=OptimConfig(lr=1e-3),
        train=TrainConfig(steps=5, row_tokens=64, logit_chunk=16),
    )


def learner(run: RunConfig):
    return build_learner(run, Mesh(torch.device("cpu")))


def documents(seed: int, lengths=(5, 1, 17, 9, 30, 2, 3)) -> list[Document]:
    generator = torch.Generator().manual_seed(seed)
    out = []
    for n in lengths:
        mask = torch.rand(n, generator=generator) < 0.8
        mask[-1] = True
        out.append(Document(torch.randint(0, VOCAB, (n,), generator=generator), mask))
    return out


def policy_state(side) -> dict:
    return {name: value.clone() for name, value in side.runner.policy.state_dict().items()}


def test_policy_is_bit_equal_with_and_without_a_draft():
    """Known failure 10: gradients at every step and weights after 5, to the bit."""
    with_draft, without = learner(config()), learner(config(enabled=False))
    for step in range(5):
        for side in (with_draft, without):
            cotrain_step(side, documents(step), step=step)
        named = zip(with_draft.runner.policy.named_parameters(), without.runner.policy.named_parameters(), strict=True)
        for (name, a), (_, b) in named:
            assert torch.equal(a.grad, b.grad), f"step {step}: gradient of {name}"
    first, second = policy_state(with_draft), policy_state(without)
    assert all(torch.equal(first[name], second[name]) for name in first)
    start = policy_state(learner(config()))
    assert any(not torch.equal(first[name], start[name]) for name in first), "nothing was trained"


def test_draft_does_not_depend_on_the_policys_loss():
    """Known failure 17: scale the policy's loss, the draft's update stays."""
    stats = []
    for factor in (1.0, 100.0):
        side = learner(config())
        stats.append(
            cotrain_step(side, documents(0), step=0, policy_loss=lambda rows, f=factor: f * next_token_loss(rows))
        )
    assert stats[0].draft_loss == stats[1].draft_loss
    assert stats[0].draft_grad_norm == stats[1].draft_grad_norm
    assert stats[1].policy_grad_norm == pytest.approx(100 * stats[0].policy_grad_norm, rel=1e-5)


def test_clips_are_separate():
    """Known failure 11: a tiny clip of the draft leaves the policy's update as it was."""
    states = []
    for clip in (1.0, 1e-9):
        run = config()
        side = learner(replace(run, draft_optim=replace(run.draft_optim, clip_norm=clip)))
        cotrain_step(side, documents(0), step=0)
        states.append(policy_state(side))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("row_tokens", [32, 64, 256])
def test_rows_do_not_change_losses(row_tokens):
    """Known failures 7 and 14: however the documents are packed, the same losses and norms."""
    run = config()
    reference = cotrain_step(learner(run), documents(1), step=0)
    packed = cotrain_step(learner(replace(run, train=replace(run.train, row_tokens=row_tokens))), documents(1), step=0)
    for field in ("policy_loss", "policy_grad_norm", "draft_loss", "draft_grad_norm", "draft_acceptance"):
        assert getattr(packed, field) == pytest.approx(getattr(reference, field), rel=1e-5), field


def test_a_policy_that_stays_non_finite_ends_the_run():
    """A skipped update is reported; ten in a row mean that the weights are lost, not one batch."""
    side = learner(config())
    broken = next(iter(side.runner.policy.parameters()))
    healthy = broken.detach().clone()
    for step in range(9):
        broken.data.fill_(float("nan"))
        assert cotrain_step(side, documents(2), step=step).policy_skipped
    broken.data.copy_(healthy)
    assert not cotrain_step(side, documents(2), step=9).policy_skipped
    broken.data.fill_(float("nan"))
    for step in range(10, 19):
        cotrain_step(side, documents(2), step=step)
    with pytest.raises(Diverged, match=r"policy's loss .* last 10 updates \(up to step 19\)"):
        cotrain_step(side, documents(2), step=19)


def test_a_draft_that_stays_non_finite_ends_the_run():
    """The policy goes on for a while; a draft that is lost is not trained on in silence."""
    side = learner(config())
    with torch.no_grad():
        side.draft.model.fc.weight[0, 0] = float("nan")
    for step in range(9):
        assert cotrain_step(side, documents(2), step=step).draft_skipped
        assert side.skips.in_a_row == step + 1  # checkpoints are kept meanwhile
    with pytest.raises(Diverged, match=r"draft's loss .* last 10 updates \(up to step 9\)"):
        cotrain_step(side, documents(2), step=9)


def test_documents_too_short_for_the_draft():
    """Two tokens make no pair: the draft has no loss, keeps its weights, and nothing was skipped for a fault."""
    side = learner(config())
    cotrain_step(side, documents(2), step=0)  # momentum that a step on zero gradients would follow
    before = {name: value.clone() for name, value in side.draft.model.named_parameters()}
    stats = cotrain_step(side, documents(3, lengths=(2, 2, 1)), step=1)
    assert math.isnan(stats.draft_loss)
    assert not stats.draft_skipped
    assert math.isfinite(stats.policy_loss)
    assert all(torch.equal(value, before[name]) for name, value in side.draft.model.named_parameters())


def test_non_finite_draft_skips_its_update_only():
    """Known failure 28's kind: the policy goes on, the draft's weights stay, and the step says so."""
    side, healthy = learner(config()), learner(config())
    with torch.no_grad():
        side.draft.model.fc.weight[0, 0] = float("nan")
    before = {name: value.clone() for name, value in side.draft.model.named_parameters()}
    stats = cotrain_step(side, documents(2), step=0)
    assert stats.draft_skipped
    assert math.isfinite(stats.policy_loss)
    for name, value in side.draft.model.named_parameters():
        assert torch.equal(value.nan_to_num(7.0), before[name].nan_to_num(7.0)), name
    cotrain_step(healthy, documents(2), step=0)
    expected = policy_state(healthy)
    assert all(torch.equal(value, expected[name]) for name, value in policy_state(side).items())


def test_frozen_policy_stays_and_the_draft_learns():
    side = learner(config())
    before = policy_state(side)
    losses = [cotrain_step(side, documents(3), step=step, train_policy=False).draft_loss for step in range(8)]
    assert all(torch.equal(value, before[name]) for name, value in policy_state(side).items())
    assert losses[-1] < losses[0]


def test_a_step_without_supervised_tokens_changes_nothing_finite():
    """Known failure 16's kind: counts of zero add zero."""
    side = learner(config())
    silent = [Document(torch.arange(6), torch.zeros(6, dtype=torch.bool))]
    stats = cotrain_step(side, silent, step=0)
    assert stats.policy_loss == 0.0
    assert stats.policy_grad_norm == 0.0
    assert math.isnan(stats.draft_loss)  # no pair, no loss


def test_old_logprobs_line_up_with_the_rows_of_the_step():
    """The second update on a batch sees, row for row, the log-probabilities of the first."""
    side = learner(config())
    batch = documents(4)
    old = policy_logprobs(side, batch, draft_share=0.5)
    differences = []

    def loss(rows: LossRows):
        assert rows.old_logp is not None
        differences.append((rows.logp - rows.old_logp).abs().max().item())
        return next_token_loss(rows)

    cotrain_step(side, batch, step=0, policy_loss=loss, old_logp=old, draft_share=0.5)
    assert max(differences) < 1e-6
    cotrain_step(side, batch, step=1, policy_loss=loss, old_logp=old, draft_share=0.5)
    assert max(differences) > 1e-4
