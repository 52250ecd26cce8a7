"""One co-training step: packed documents in, new policy and new draft weights out.

Read this file first. A step has five phases:

1. pack the documents into rows, each row one microbatch, and shard it over cp;
2. count the supervised tokens (policy) and pairs (draft) of the whole step;
3. for every row: policy forward (taps recorded), draft passes, draft loss and backward,
   policy loss and backward; with pipeline stages each rank does its part (docs/pipeline.md);
4. one norm and one clip each;
5. one optimizer update each.

Nothing of the draft reaches the policy's gradients: taps, embeddings, teacher and head
are detached, and the two updates share no number.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cospec.config import RunConfig
from cospec.data.packing import pack
from cospec.mesh import Mesh
from cospec.ops.losses import token_logprobs
from cospec.ops.shift import shift
from cospec.policy.runner import Runner
from cospec.records import Batch, Document, StepStats, Taps
from cospec.rl.grpo import sft_loss
from cospec.train.draft_side import DraftSide, pass_coefficients
from cospec.train.optim import Optimizer, Skips, clip_, global_norm


@dataclass(frozen=True)
class LossRows:
    """The supervised rows of one microbatch, as the policy loss sees them; all [T']."""

    logp: Tensor
    """Log-probability of each label under the trained policy, with gradient."""
    advantages: Tensor
    rollout_logp: Tensor
    old_logp: Tensor | None = None
    """Log-probabilities before the first update on the batch, where there are several."""


PolicyLoss = Callable[[LossRows], Tensor]
"""Sum of the loss over the rows given; the step divides by the global number of rows."""


def next_token_loss(rows: LossRows) -> Tensor:
    return sft_loss(rows.logp)


@dataclass
class Learner:
    """Policy and draft, an optimizer each, on one mesh."""

    config: RunConfig
    mesh: Mesh
    runner: Runner
    policy_optim: Optimizer
    draft: DraftSide | None = None
    skips: Skips = field(default_factory=Skips)


@dataclass(frozen=True)
class Row:
    """One microbatch with what the losses need to know of it."""

    batch: Batch
    label_rows: Tensor
    """int64 [T']: local rows whose label is supervised."""
    labels: Tensor
    """int64 [T']: their labels."""
    rollout_logp: Tensor
    """float32 [T']: log-probability under which each label was sampled."""
    trains_draft: bool
    draft_pairs: Tensor | None
    """int64 [K, S], see draft.ttt.pairs; None for rows that no draft on this rank trains on."""


def cotrain_step(
    learner: Learner,
    documents: Sequence[Document],
    *,
    step: int,
    policy_loss: PolicyLoss = next_token_loss,
    temperature: float = 1.0,
    draft_share: float = 1.0,
    train_policy: bool = True,
    train_draft: bool = True,
    old_logp: Sequence[Tensor] | None = None,
) -> StepStats:
    """Train policy and draft on the step's global batch of documents.

    Args:
        documents: all documents of the step, the same list on every rank.
        step: index of the step, for the learning-rate schedules.
        temperature: the logits are divided by it, as they were when sampling.
        draft_share: share of the documents the draft trains on, spread evenly.
        train_policy: False freezes the policy (warm start of a draft).
        train_draft: False leaves the draft alone; the rows are the same.
        old_logp: `policy_logprobs` of the same documents with the same `draft_share`, for
            the second and later updates on one batch.
    """
    mesh, runner = learner.mesh, learner.runner
    draft = learner.draft if train_draft else None
    started = _clock(mesh)

    # 1. Rows. Those of the draft's share come first; every rank gets equally many of each.
    rows = pack_rows(learner, documents, draft_share, with_draft=draft is not None)

    # 2. Normalisers over all rows of all ranks, known before the first backward.
    label_count, pair_count_K = _global_counts(learner, rows)
    coef_K = pass_coefficients(pair_count_K, learner.config.draft.pass_decay).to(mesh.device)

    # 3. Microbatches.
    learner.policy_optim.zero_grad()
    if draft is not None:
        draft.optim.zero_grad()
    policy_total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    draft_sums: list[Tensor] = []
    draft_s = 0.0

    def on_taps(index: int, taps: Taps) -> None:
        nonlocal draft_s
        row = rows[index]
        if draft is not None and row.draft_pairs is not None:
            begun = _clock(mesh)
            draft_sums.append(draft.forward_backward(row.batch, row.draft_pairs, taps, runner.head, coef_K))
            draft_s += _clock(mesh) - begun

    def on_hidden(index: int, hidden_TD: Tensor) -> Tensor:
        row = rows[index]
        if not train_policy:
            return hidden_TD.sum()
        logp = row_logprobs(learner, row, hidden_TD, temperature)
        old = None if old_logp is None else old_logp[index]
        loss = policy_loss(LossRows(logp, row.batch.advantages[row.label_rows], row.rollout_logp, old)) / label_count
        policy_total.add_(loss.detach())
        # The added zero keeps the graph of a rank without supervised rows, so that it runs
        # the same collectives in backward as its peers.
        return loss + 0.0 * hidden_TD.sum()

    with_taps = [row.trains_draft for row in rows]
    # For each row: policy forward, on_taps, on_hidden, policy backward.
    runner.run([row.batch for row in rows], with_taps, on_hidden, on_taps, backward=train_policy)

    # 4. and 5. Norms, clips, updates: each its own.
    policy_loss_value, policy_norm, policy_skipped = float("nan"), float("nan"), False
    if train_policy:
        policy_loss_value = mesh.sum_all(policy_total).item()
        policy_norm = global_norm(learner.policy_optim.params, mesh)
        policy_skipped = not (math.isfinite(policy_norm) and math.isfinite(policy_loss_value))
        if not policy_skipped:
            clip_(learner.policy_optim.params, policy_norm, learner.policy_optim.config.clip_norm)
            learner.policy_optim.step(step)
    begun = _clock(mesh)
    draft_stats = (
        draft.update(sum(draft_sums, draft.no_sums()), coef_K, step) if draft is not None and any(with_taps) else {}
    )
    ended = _clock(mesh)
    draft_s += ended - begun
    if mesh.pp_size > 1:  # the time of the ranks that have the draft, on the others too
        own = torch.tensor(draft_s if runner.last_stage else 0.0, dtype=torch.float64, device=mesh.device)
        draft_s = mesh.sum_all(own).item() / (mesh.dp_size * mesh.cp_size)
    if train_policy:
        learner.skips.see(policy_skipped, "policy", step)
    if draft_stats:
        learner.skips.see(draft_stats["draft_skipped"], "draft", step)
    return StepStats(
        policy_loss=policy_loss_value,
        policy_grad_norm=policy_norm,
        policy_s=ended - started - draft_s,
        draft_s=draft_s,
        policy_skipped=policy_skipped,
        **draft_stats,
    )


def policy_logprobs(
    learner: Learner, documents: Sequence[Document], *, temperature: float = 1.0, draft_share: float = 1.0
) -> list[Tensor]:
    """Log-probability of each supervised token of each of this rank's rows, without gradient."""
    rows = pack_rows(learner, documents, draft_share, with_draft=False)
    out: list[Tensor] = []

    def on_hidden(index: int, hidden_TD: Tensor) -> Tensor:
        with torch.no_grad():
            out.append(row_logprobs(learner, rows[index], hidden_TD, temperature))
        return hidden_TD

    learner.runner.run([row.batch for row in rows], [False] * len(rows), on_hidden, backward=False)
    return out


def row_logprobs(learner: Learner, row: Row, hidden_TD: Tensor, temperature: float) -> Tensor:
    """float32 [T'] of the row's supervised labels, with gradient to hidden states and head."""
    head_VD, chunk = learner.runner.head, learner.config.train.logit_chunk
    return token_logprobs(hidden_TD[row.label_rows], head_VD, row.labels, temperature=temperature, chunk=chunk)


def pack_rows(learner: Learner, documents: Sequence[Document], draft_share: float, *, with_draft: bool) -> list[Row]:
    """This rank's rows: those of the draft's share first, every rank equally many of each."""
    mesh, config = learner.mesh, learner.config

    def batches(chosen: list[Document], min_rows: int = 1) -> list[Batch]:
        if not chosen:
            return []
        axes = {"cp_size": mesh.cp_size, "cp_rank": mesh.cp_rank, "dp_size": mesh.dp_size, "dp_rank": mesh.dp_rank}
        equal = learner.runner.microbatches is not None
        packed = pack(chosen, config.train.row_tokens, equal_rows=equal, min_rows=min_rows, **axes)
        return [batch.to(mesh.device) for batch in packed]

    picked = [math.floor((i + 1) * draft_share) > math.floor(i * draft_share) for i in range(len(documents))]
    chosen = [d for d, p in zip(documents, picked, strict=True) if p]
    others = [d for d, p in zip(documents, picked, strict=True) if not p]
    for_draft, rest = batches(chosen), batches(others)
    short = -(len(for_draft) + len(rest)) % (learner.runner.microbatches or 1)
    if short and rest:  # a pipeline wants more rows: spread the documents over them
        rest = batches(others, len(rest) + short)
    elif short:
        for_draft = batches(chosen, len(for_draft) + short)
    return [_make_row(learner, b, with_draft) for b in for_draft] + [_make_row(learner, b, False) for b in rest]


def _make_row(learner: Learner, batch: Batch, with_draft: bool) -> Row:
    group = learner.mesh.cp_group
    label_rows = shift(batch.loss_mask, batch.layout, 1, cp_group=group, fill=False).nonzero().squeeze(1)
    labels = shift(batch.input_ids, batch.layout, 1, cp_group=group)[label_rows]
    rollout_logp = shift(batch.rollout_logp, batch.layout, 1, cp_group=group)[label_rows]
    draft_pairs = learner.draft.pairs(batch) if with_draft and learner.draft is not None else None
    return Row(batch, label_rows, labels, rollout_logp, with_draft, draft_pairs)


def _global_counts(learner: Learner, rows: Sequence[Row]) -> tuple[float, Tensor]:
    """Supervised tokens (at least 1) and pairs of each pass, float64 [K] on CPU, over dp x cp and all rows.

    Counted where the losses are, on the last pipeline stage.
    """
    counts = torch.zeros(1 + learner.config.draft.num_passes, dtype=torch.float64, device=learner.mesh.device)
    for row in rows if learner.runner.last_stage else []:
        counts[0] += row.label_rows.numel()
        if row.draft_pairs is not None:
            counts[1:] += (row.draft_pairs >= 0).sum(1)
    counts = learner.mesh.sum_all(counts).cpu()
    return max(1.0, counts[0].item()), counts[1:]


def _clock(mesh: Mesh) -> float:
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
    return time.perf_counter()
