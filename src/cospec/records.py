"""What the parts of cospec hand to each other, and the shape legend.

Shape suffixes (logical shapes; docstrings say how a tensor is sharded):
    B rows, T query tokens, J trunk keys, D model, N query heads, M key/value heads,
    H head dim, F ffn, V policy vocabulary, U draft vocabulary, P taps, K passes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cospec.layout import PackedLayout

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Document:
    """One training sequence.

    input_ids: int64 [T]. loss_mask: bool [T], True where the token is supervised as a
    *label* (unshifted: the mask sits on the token that is predicted). For RL,
    `advantage` is the sequence's advantage and `rollout_logp` float32 [T] the
    log-probability under which each supervised token was sampled (0 elsewhere).
    """

    input_ids: Tensor
    loss_mask: Tensor
    advantage: float = 0.0
    rollout_logp: Tensor | None = None

    def __post_init__(self) -> None:
        if self.input_ids.ndim != 1 or self.input_ids.numel() < 1:
            raise ValueError(f"Document.input_ids must be a non-empty [T], got shape {tuple(self.input_ids.shape)}")
        if self.loss_mask.shape != self.input_ids.shape:
            raise ValueError(
                f"Document.loss_mask has shape {tuple(self.loss_mask.shape)}, "
                f"input_ids has {tuple(self.input_ids.shape)}: they must be equal"
            )


@dataclass(frozen=True)
class Batch:
    """One packed row as one cp rank holds it: one microbatch.

    All tensors are [T] with T = `layout.num_local_rows`; padding rows hold token 0 and
    mask False.
    """

    layout: PackedLayout
    cp_rank: int
    input_ids: Tensor  # int64
    positions: Tensor  # int64, position inside the document
    loss_mask: Tensor  # bool, True where the token is supervised as a label
    advantages: Tensor  # float32, the advantage of the token's sequence
    rollout_logp: Tensor  # float32, see Document

    def to(self, device: torch.device) -> Batch:
        return replace(self, **{k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)})


@dataclass(frozen=True)
class Taps:
    """What the draft reads of the policy for one microbatch; all detached.

    hidden: P tensors [T, Dt], low layer to high, residual stream after the block.
    embeddings: [T, Dt], the policy's token embeddings.
    final_hidden: [T, Dt], after the policy's final norm: the teacher's head input.
    """

    hidden: tuple[Tensor, ...]
    embeddings: Tensor
    final_hidden: Tensor


EMBEDDINGS = -1
"""Stands for the token embeddings where taps are named by their layer."""


@dataclass(frozen=True)
class TapStream:
    """The taps that leave one pipeline stage: for each microbatch one message per layer, in order.

    source: pp rank of the stage. layers: ascending, EMBEDDINGS first where the stage has them.
    order: microbatches in the order of the stage's forwards. queue: microbatches that the
    stage runs ahead of the draft in an undisturbed schedule.
    """

    stage: int
    source: int
    layers: tuple[int, ...]
    order: tuple[int, ...]
    queue: int


@dataclass(frozen=True)
class TapPlan:
    """Which taps go from where to where in one run of a pipeline schedule.

    home: pp rank of the last stage, where the draft lives. slots: microbatches that each
    stream from another rank can have landed and not yet consumed. shape: [T, Dt] of every
    tap on one rank. dtype: as they travel; source_dtype: as the policy computes them.
    """

    streams: tuple[TapStream, ...]
    home: int
    slots: int
    shape: tuple[int, int]
    dtype: torch.dtype
    source_dtype: torch.dtype


class PipelineError(RuntimeError):
    """A pipeline stage or one of its taps failed: names stage, microbatch and layer."""


@dataclass(frozen=True)
class DraftOutput:
    """Result of the draft loss over the local rows of one microbatch.

    loss: scalar, already weighted and globally normalised (sums over microbatches and
    ranks to the step's loss). loss_sum, alpha_sum, top1_sum, count: float64 [K], sums
    over the counted local rows. length_sum, length_count: float64 scalars, the sum over
    rows for which every pass counts of `1 + sum_k prod_{i<=k} alpha_i`, and their number.
    """

    loss: Tensor
    loss_sum: Tensor
    alpha_sum: Tensor
    top1_sum: Tensor
    count: Tensor
    length_sum: Tensor
    length_count: Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How an engine samples. temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    max_new_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be >= 1, got {self.max_new_tokens}")
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0 = off), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1] (1 = off), got {self.top_p}")


@dataclass(frozen=True)
class Rollout:
    """One generated sequence.

    prompt_ids, token_ids: int lists, the response without the prompt (stop token included).
    logp: per response token, log-probability under the policy's temperature-scaled
    distribution before top-k/top-p (temperature 1 is used when sampling greedily).
    proposed, accepted: per draft position 0..k-1, how often a token was proposed and
    accepted there. verify_steps: policy passes that produced a token by verification
    (the prefill is not one).
    """

    prompt_ids: list[int]
    token_ids: list[int]
    logp: list[float]
    finish_reason: str  # "stop" or "length"
    policy_version: int
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    verify_steps: int = 0


@dataclass(frozen=True)
class StepStats:
    """Mesh-wide figures of one optimisation step; see train.metrics for the row names."""

    policy_loss: float
    policy_grad_norm: float
    policy_s: float
    draft_loss: float = float("nan")
    draft_grad_norm: float = float("nan")
    draft_s: float = 0.0
    draft_acceptance: tuple[float, ...] = ()
    draft_top1: tuple[float, ...] = ()
    draft_simulated_acceptance_length: float = float("nan")
    draft_skipped: bool = False
    policy_skipped: bool = False


class Diverged(RuntimeError):
    """A model's figures are no longer finite and do not become so again."""
