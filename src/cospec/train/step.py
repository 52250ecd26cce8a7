"""One co-training step: packed documents in, new policy and new draft weights out.

Read this file first. A step has five phases:

1. pack the documents into rows, each row one microbatch, and shard it over cp;
2. count the supervised tokens (policy) and pairs (draft) of the whole step;
3. for every row: policy forward (taps recorded), draft passes and loss, draft backward,
   policy loss, policy backward;
4. one norm and one clip each;
5. one optimizer update each.

Nothing of the draft reaches the policy's gradients: taps, embeddings, teacher and head
are detached, and the two updates share no number.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cospec.config import RunConfig
from cospec.data.packing import pack
from cospec.draft.eagle3 import Eagle3Draft
from cospec.draft.ttt import pairs
from cospec.mesh import Mesh
from cospec.ops.losses import draft_loss, token_logprobs
from cospec.ops.shift import shift, with_halo
from cospec.policy.runner import SequentialRunner
from cospec.records import Batch, Document, StepStats, Taps
from cospec.train.optim import Optimizer, clip_, global_norm


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
    return -rows.logp.sum()


@dataclass
class Learner:
    """Policy and draft, an optimizer each, on one mesh."""

    config: RunConfig
    mesh: Mesh
    runner: SequentialRunner
    policy_optim: Optimizer
    draft: Eagle3Draft | None = None
    draft_optim: Optimizer | None = None


@dataclass(frozen=True)
class _Row:
    batch: Batch
    labels: Tensor
    label_rows: Tensor
    """int64 [T']: local rows whose label is supervised."""
    draft_pairs: Tensor | None
    """int64 [K, S], see draft.ttt.pairs; None for rows outside the draft's share."""


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
        old_logp: `policy_logprobs` of the same documents with the same options, for the
            second and later updates on one batch.
    """
    mesh = learner.mesh
    train_draft = train_draft and learner.draft is not None
    started = time.perf_counter()

    # 1. Rows. Those that train the draft come first and are the same on every dp rank.
    rows = _pack_rows(learner, documents, draft_share)

    # 2. Normalisers over all rows of all ranks, known before the first backward.
    counts = torch.stack([torch.tensor(float(sum(r.label_rows.numel() for r in rows)))])
    trains_draft = [train_draft and row.draft_pairs is not None for row in rows]
    num_passes = learner.config.draft.num_passes
    pair_counts = torch.zeros(num_passes, dtype=torch.float64)
    for row, trains in zip(rows, trains_draft, strict=True):
        if trains:
            pair_counts += (row.draft_pairs >= 0).sum(1).cpu()
    counts = mesh.sum(torch.cat([counts.double(), pair_counts]).to(mesh.device)).cpu()
    num_labels = max(1.0, counts[0].item())
    pass_coef = _pass_coefficients(counts[1:], learner.config.draft.pass_decay).to(mesh.device)

    # 3. Microbatches.
    learner.policy_optim.zero_grad()
    if learner.draft_optim is not None:
        learner.draft_optim.zero_grad()
    policy_sum = torch.zeros((), dtype=torch.float64, device=mesh.device)
    draft_sums: list[Tensor] = []
    draft_s = 0.0

    def on_hidden(index: int, hidden_TD: Tensor, taps: Taps | None) -> Tensor:
        nonlocal draft_s
        row = rows[index]
        if taps is not None:
            begun = _clock(mesh)
            draft_sums.append(_draft_forward_backward(learner, row, taps, pass_coef))
            draft_s += _clock(mesh) - begun
        if not train_policy:
            return hidden_TD.sum()
        loss = _policy_row_loss(
            learner, row, hidden_TD, policy_loss, temperature, old_logp[index] if old_logp is not None else None
        )
        loss = loss / num_labels
        policy_sum.add_(loss.detach())
        return loss

    learner.runner.run([row.batch for row in rows], trains_draft, on_hidden, backward=train_policy)

    # 4. and 5. Norms, clips, updates: each its own.
    policy_norm, policy_total = float("nan"), float("nan")
    if train_policy:
        policy_total = mesh.sum(policy_sum).item()
        policy_norm = global_norm(learner.policy_optim.params, mesh)
        if math.isfinite(policy_norm) and math.isfinite(policy_total):
            clip_(learner.policy_optim.params, policy_norm, learner.policy_optim.config.clip_norm)
            learner.policy_optim.step(step)
    begun = _clock(mesh)
    draft_stats = _update_draft(learner, sum(draft_sums) if draft_sums else None, pass_coef, step)
    ended = _clock(mesh)
    draft_s += ended - begun
    return StepStats(
        policy_loss=policy_total,
        policy_grad_norm=policy_norm,
        policy_s=ended - started - draft_s,
        draft_s=draft_s,
        **draft_stats,
    )


def policy_logprobs(
    learner: Learner, documents: Sequence[Document], *, temperature: float = 1.0, draft_share: float = 1.0
) -> list[Tensor]:
    """Log-probability of each supervised token of each of this rank's rows, without gradient."""
    rows = _pack_rows(learner, documents, draft_share)
    out: list[Tensor] = []

    def on_hidden(index: int, hidden_TD: Tensor, taps: Taps | None) -> Tensor:
        with torch.no_grad():
            out.append(_row_logprobs(learner, rows[index], hidden_TD, temperature))
        return hidden_TD

    learner.runner.run([row.batch for row in rows], [False] * len(rows), on_hidden, backward=False)
    return out


def _pack_rows(learner: Learner, documents: Sequence[Document], draft_share: float) -> list[_Row]:
    """This rank's rows, those of the draft's share first. Every rank gets equally many of each."""
    mesh, config = learner.mesh, learner.config

    def batches(chosen: Sequence[Document]) -> list[Batch]:
        if not chosen:
            return []
        packed = pack(
            chosen,
            config.train.row_tokens,
            cp_size=mesh.cp_size,
            cp_rank=mesh.cp_rank,
            dp_size=mesh.dp_size,
            dp_rank=mesh.dp_rank,
        )
        return [batch.to(mesh.device) for batch in packed]

    picked = [math.floor((i + 1) * draft_share) > math.floor(i * draft_share) for i in range(len(documents))]
    rows = [_make_row(learner, b, True) for b in batches([d for d, p in zip(documents, picked, strict=True) if p])]
    rest = batches([d for d, p in zip(documents, picked, strict=True) if not p])
    return rows + [_make_row(learner, b, False) for b in rest]


def _make_row(learner: Learner, batch: Batch, in_draft_share: bool) -> _Row:
    group = learner.mesh.cp_group
    labels = shift(batch.input_ids, batch.layout, 1, cp_group=group)
    supervised = shift(batch.loss_mask, batch.layout, 1, cp_group=group, fill=False)
    draft_pairs = None
    if in_draft_share and learner.draft is not None:
        draft_config = learner.config.draft
        draft_pairs = pairs(
            batch,
            num_passes=draft_config.num_passes,
            cp_group=group,
            t2d=learner.draft.t2d if draft_config.drop_labels_outside_vocab else None,
        )
    return _Row(batch, labels, supervised.nonzero().squeeze(1), draft_pairs)


def _row_logprobs(learner: Learner, row: _Row, hidden_TD: Tensor, temperature: float) -> Tensor:
    return token_logprobs(
        hidden_TD[row.label_rows],
        learner.runner.head,
        row.labels[row.label_rows],
        temperature=temperature,
        chunk=learner.config.train.logit_chunk,
    )


def _policy_row_loss(
    learner: Learner,
    row: _Row,
    hidden_TD: Tensor,
    policy_loss: PolicyLoss,
    temperature: float,
    old_logp: Tensor | None,
) -> Tensor:
    logp = _row_logprobs(learner, row, hidden_TD, temperature)
    group = learner.mesh.cp_group
    rollout_logp = shift(row.batch.rollout_logp, row.batch.layout, 1, cp_group=group)
    rows = LossRows(logp, row.batch.advantages[row.label_rows], rollout_logp[row.label_rows], old_logp)
    # The added zero keeps the graph of a rank without supervised rows, so that it runs
    # the same collectives in backward as its peers.
    return policy_loss(rows) + 0.0 * hidden_TD.sum()


def _draft_forward_backward(learner: Learner, row: _Row, taps, pass_coef: Tensor) -> Tensor:
    """K passes, the loss and its backward; returns the local sums as one float64 vector."""
    config, mesh, draft = learner.config, learner.mesh, learner.draft
    num_passes = config.draft.num_passes
    hidden_KTD = draft(
        taps,
        row.batch,
        num_passes=num_passes,
        cp_group=mesh.cp_group,
        mode=config.attention.cp_mode,
        kernel=None if config.attention.kernel == "auto" else config.attention.kernel,
        checkpoint=config.draft.checkpoint_passes,
    )
    result = draft_loss(
        hidden_KTD,
        draft.lm_head.weight,
        with_halo(taps.final_hidden, row.batch.layout, num_passes, cp_group=mesh.cp_group),
        learner.runner.head.detach(),
        row.draft_pairs,
        pass_coef,
        vocab_map_U=draft.policy_ids,
        chunk=config.draft.loss_chunk,
        renormalise=config.draft.renormalise_teacher,
    )
    (result.loss + 0.0 * sum(h.sum() for h in hidden_KTD)).backward()
    return torch.cat(
        [
            result.loss_sum,
            result.alpha_sum,
            result.top1_sum,
            result.count,
            result.length_sum.view(1),
            result.length_count.view(1),
        ]
    ).to(torch.float64)


def _update_draft(learner: Learner, sums: Tensor | None, pass_coef: Tensor, step: int) -> dict:
    """Reduce the draft's figures, clip, update; a non-finite loss or norm skips the update."""
    if learner.draft is None or sums is None:
        return {}
    num_passes = learner.config.draft.num_passes
    totals = learner.mesh.sum(sums).cpu()
    loss_sum, alpha, top1, count = totals[: 4 * num_passes].view(4, num_passes)
    length_sum, length_count = totals[4 * num_passes :].tolist()
    loss = (pass_coef.cpu().double() * loss_sum).sum().item()
    norm = global_norm(learner.draft_optim.params, learner.mesh)
    skipped = not (math.isfinite(loss) and math.isfinite(norm))
    if not skipped:
        clip_(learner.draft_optim.params, norm, learner.draft_optim.config.clip_norm)
        learner.draft_optim.step(step)
    return {
        "draft_loss": loss,
        "draft_grad_norm": norm,
        "draft_acceptance": tuple((alpha / count).tolist()),
        "draft_top1": tuple((top1 / count).tolist()),
        "draft_simulated_acceptance_length": length_sum / length_count if length_count else float("nan"),
        "draft_skipped": skipped,
    }


def _pass_coefficients(counts: Tensor, decay: float) -> Tensor:
    """float32 [K]: what multiplies the loss sum of each pass (design: sum_k w_k S_k / N_k / sum_k w_k)."""
    weights = decay ** torch.arange(counts.numel(), dtype=torch.float64)
    coef = torch.where(counts > 0, weights / counts.clamp(min=1), 0.0) / weights.sum()
    return coef.to(torch.float32)


def _clock(mesh: Mesh) -> float:
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
    return time.perf_counter()
