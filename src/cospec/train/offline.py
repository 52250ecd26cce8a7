"""Draft training on saved features: the policy is never run.

    features -> documents -> packed rows -> draft passes, loss and backward -> draft update

The step is the draft's half of `train.step`: on features that the policy itself would have
produced it gives the same loss and gradients.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from cospec.config import ConfigError, RunConfig, require
from cospec.data.source import DocumentStream, LazyDocuments
from cospec.durable import check_free
from cospec.export.card import Card, commit
from cospec.export.eagle3 import save_draft
from cospec.features.foreign import open_features
from cospec.features.rows import FeatureRow, load_rows
from cospec.features.source import BadSamples, FeatureInfo, FeatureSource, split_by_document, token_key
from cospec.features.store import POLICY, FeatureStore
from cospec.features.teacher import PolicyEnds, check_features_fit, read_ends, read_stored_ends
from cospec.mesh import Mesh, choose_dtype
from cospec.records import StepStats
from cospec.titan import build_config
from cospec.train import checkpoint
from cospec.train.draft_side import DraftSide, pass_coefficients
from cospec.train.faults import doing
from cospec.train.metrics import CHECKPOINTS, MetricsLog, check_run_folder, step_row
from cospec.train.optim import Skips
from cospec.train.setup import build_draft, open_mesh
from cospec.train.state import Part


@dataclass
class OfflineLearner:
    """A draft, its optimizer, and what stands in for the policy."""

    config: RunConfig
    mesh: Mesh
    source: FeatureSource
    ends: PolicyEnds
    draft: DraftSide
    bad: BadSamples
    skips: Skips = field(default_factory=Skips)

    @property
    def info(self) -> FeatureInfo:
        return self.source.info


def offline_step(learner: OfflineLearner, rows: Sequence[FeatureRow], step: int) -> StepStats:
    """One update of the draft on this rank's rows of the step's documents; collective."""
    draft, mesh = learner.draft, learner.mesh
    started = time.perf_counter()
    pairs = [_pairs(draft, row) for row in rows]
    counts_K = torch.zeros(learner.config.draft.num_passes, dtype=torch.float64, device=mesh.device)
    for pairs_KS in pairs:
        counts_K += (pairs_KS >= 0).sum(1)
    coef_K = pass_coefficients(mesh.sum(counts_K).cpu(), learner.config.draft.pass_decay).to(mesh.device)
    draft.optim.zero_grad()
    sums = []
    for row, pairs_KS in zip(rows, pairs, strict=True):
        taps = row.taps(learner.info, learner.ends)
        sums.append(draft.forward_backward(row.batch, pairs_KS, taps, learner.ends.head_VD, coef_K))
    stats = draft.update(sum(sums, draft.no_sums()), coef_K, step)
    learner.skips.see(stats["draft_skipped"], "draft", step)
    nan = float("nan")
    return StepStats(
        policy_loss=nan, policy_grad_norm=nan, policy_s=0.0, draft_s=time.perf_counter() - started, **stats
    )


def _pairs(draft: DraftSide, row: FeatureRow) -> Tensor:
    pairs_KS = draft.pairs(row.batch)
    assert pairs_KS is not None  # without pipeline stages the draft lives on every rank
    return pairs_KS


def evaluate(learner: OfflineLearner, indices: Sequence[int], step: int) -> dict[str, Any]:
    """Loss, acceptance of each pass and simulated acceptance length on held-out documents; collective."""
    doing(f"the evaluation after {step} steps")
    size, sums = learner.config.train.batch_documents, learner.draft.no_sums()
    for start in range(0, len(indices), size):
        for row in load(learner, indices[start : start + size]):
            taps = row.taps(learner.info, learner.ends)
            sums += learner.draft.measure(row.batch, _pairs(learner.draft, row), taps, learner.ends.head_VD)
    if isinstance(learner.draft.model, FSDPModule):
        learner.draft.model.reshard()  # no backward follows that would
    figures = learner.draft.figures(sums)
    row = {"step": step, "documents": len(indices), "draft_loss": figures["draft_loss"]}
    row |= {f"draft_acceptance_pass_{k}": a for k, a in enumerate(figures["draft_acceptance"])}
    return row | {"draft_simulated_acceptance_length": figures["draft_simulated_acceptance_length"]}


def load(learner: OfflineLearner, indices: Sequence[int]) -> list[FeatureRow]:
    """This rank's rows of these documents, on its device; see `features.rows.load_rows`."""
    rows = load_rows(learner.source, indices, learner.config.train.row_tokens, learner.mesh, learner.bad)
    return [row.to(learner.mesh.device, learner.ends.embed_VD.dtype) for row in rows]


@dataclass(frozen=True)
class Order:
    """Which documents of the source a step trains on: the seed and the step decide, not the ranks."""

    stream: DocumentStream
    train: list[int]
    batch_documents: int

    def of_step(self, step: int) -> list[int]:
        return [self.train[i] for i in self.stream.indices(step, self.batch_documents)]


def run_offline(config: RunConfig) -> None:
    """Train an EAGLE-3 draft on saved features (`--offline.features FOLDER`)."""
    with open_mesh(config) as mesh:
        check_run_folder(config)
        learner = build_offline(config, mesh)
        train, validation = split_by_document(learner.source, config.offline.validation_share)
        require(len(train) > 0, "offline.validation_share", config.offline.validation_share, "leaves no document")
        documents = LazyDocuments(len(train), lambda i: learner.source.tokens(train[i]))
        order = Order(DocumentStream(documents, config.seed), train, config.train.batch_documents)
        saves = Saves(config, learner, len(train))
        with MetricsLog(config, rank=mesh.world_rank) as log:
            if config.checkpoint.resume:
                log.resume(saves.found["step"] if saves.found else None)
            log.note(describe(learner, len(train), len(validation)))
            first = saves.enter(order)
            if not first and validation:
                log.evaluation(evaluate(learner, validation, 0))
            _train(learner, order, validation, saves, log, first)
            log.note(f"draft saved in {export(learner)}")
            if learner.bad.reasons:
                log.note(f"{len(learner.bad.reasons)} samples were skipped:\n{learner.bad.report()}")
            learner.bad.check(final=True)


def _train(
    learner: OfflineLearner, order: Order, validation: list[int], saves: Saves, log: MetricsLog, first: int
) -> None:
    config, steps = learner.config, learner.config.train.steps
    for step in range(first, steps):
        doing(f"training step {step}")
        begun = time.perf_counter()
        rows = load(learner, order.of_step(step))
        load_s = time.perf_counter() - begun
        if rows:
            log.step(step, step_row(offline_step(learner, rows, step)) | {"load_s": load_s})
        else:
            log.note(f"step {step}: every sample is bad, nothing was trained")
        last = step + 1 == steps
        if validation and (last or (config.eval.every and (step + 1) % config.eval.every == 0)):
            log.evaluation(evaluate(learner, validation, step + 1))
        if config.checkpoint.every and (last or (step + 1) % config.checkpoint.every == 0):
            saves.save(step + 1)


def build_offline(config: RunConfig, mesh: Mesh) -> OfflineLearner:
    """Features, ends of the policy and draft, checked against each other.

    Raises ConfigError naming what does not fit.
    """
    path = config.offline.features
    require(path is not None, "offline.features", None, "must name a folder of saved features")
    require(config.draft.enabled, "draft.enabled", False, "must be true: there is nothing else to train")
    _draft_folder(config)  # not only when all is trained
    for axis in ("pp", "ep"):
        size = getattr(config.mesh, axis)
        require(size == 1, f"mesh.{axis}", size, "must be 1: no policy is run; use dp and cp")
    source = open_features(str(path), tap_layers=config.draft.tap_layers)
    has_own = isinstance(source, FeatureStore) and (source.folder / POLICY).is_file()
    stored = read_stored_ends(str(path), source.info) if has_own or config.policy.hf_path is None else None
    ends = read_ends(config.policy.hf_path) if config.policy.hf_path is not None else stored
    assert ends is not None
    if source.info.vocab_size is None:
        source.info = replace(source.info, vocab_size=ends.config.vocab_size)
    check_features_fit(source.info, ends, stored)
    dtype = choose_dtype(config.train.dtype, mesh.device)
    taps = source.info.tap_layers
    config = replace(config, draft=replace(config.draft, tap_layers=taps))
    policy = SimpleNamespace(config=build_config(ends.config))
    tokenizer = ends.tokenizer or source.info.tokenizer
    draft = build_draft(config, mesh, policy, dtype=dtype, total_steps=config.train.steps, tokenizer=tokenizer)
    rule = f"{path} holds the outputs of layers {taps}"
    require(draft.model.config.tap_layers == taps, "draft.tap_layers", draft.model.config.tap_layers, rule)
    ends = ends.to(mesh.device, dtype)
    return OfflineLearner(config, mesh, source, ends, draft, BadSamples(config.offline.max_bad_share))


def export(learner: OfflineLearner) -> Path:
    """Write the draft for servers to `output_dir/draft`, its vocabulary map with it; collective."""
    doing("writing the draft for servers")
    folder = _draft_folder(learner.config)
    policy, features = learner.config.policy.hf_path or learner.info.policy, learner.config.offline.features
    card = Card(policy=policy, data=f"saved features in {features}", commit=commit())
    try:
        save_draft(learner.draft.model, folder, verifier=policy, card=card, overwrite=True)
    except OSError as error:
        raise ConfigError("output_dir", learner.config.output_dir, str(error)) from error
    return folder


def _draft_folder(config: RunConfig) -> Path:
    """Where the draft goes. Raises ConfigError for a folder that must not be replaced."""
    folder = Path(config.output_dir) / "draft"
    try:
        check_free(folder, overwrite=True)
    except OSError as error:
        raise ConfigError("output_dir", config.output_dir, str(error)) from error
    return folder


def describe(learner: OfflineLearner, train: int, validation: int) -> str:
    mesh, info = learner.mesh, learner.info
    size = sum(p.numel() for p in learner.draft.model.parameters())
    layers = ", ".join(map(str, info.tap_layers or ()))
    return (
        f"{train} documents to train on, {validation} held out ({info.format} features, layers {layers}); draft "
        f"{size / 1e6:.2f} M parameters; {mesh.device.type}, dp {mesh.dp_size} x cp {mesh.cp_size}"
    )


class Saves:
    """Checkpoints of an offline run; collective. See train.checkpoint for what is raised."""

    def __init__(self, config: RunConfig, learner: OfflineLearner, num_documents: int):
        self.config, self.learner = config, learner
        self.folder = Path(config.output_dir) / CHECKPOINTS
        draft, source = learner.draft, learner.source
        names = ("num_passes", "pass_decay", "renormalise_teacher", "drop_labels_outside_vocab")
        self.definition = {
            "seed": config.seed,
            "data": {
                "documents": num_documents,
                "store": source.description["id"] if isinstance(source, FeatureStore) else source.info.format,
                "batch_documents": config.train.batch_documents,
                "validation_share": config.offline.validation_share,
            },
            "draft": {**asdict(draft.model.config), **{name: getattr(config.draft, name) for name in names}},
            "vocabulary": token_key(draft.model.d2t.cpu()),
            "draft_optim": {"name": config.draft_optim.name},
        }
        self.path: Path | None = None
        self.found: dict[str, Any] | None = None
        if config.checkpoint.resume and (found := checkpoint.to_resume(self.folder, self.definition)):
            self.path, self.found = found

    @property
    def _parts(self) -> dict[str, Part]:
        return {"draft": Part([self.learner.draft.model], self.learner.draft.optim.optimizers)}

    def enter(self, order: Order) -> int:
        """Steps that are done, with their state loaded."""
        if self.path is None:
            return 0
        doing(f"loading {self.path}")
        progress = checkpoint.load(self.path, self._parts, definition=self.definition, check_files=False)
        bad = self.learner.bad
        for step in range(progress["step"]):
            bad.seen.update(order.of_step(step))
        bad.reasons.update({int(i): reason for i, reason in progress["bad"].items()})
        return progress["step"]

    def save(self, step: int) -> None:
        doing(f"the checkpoint after {step} steps")
        progress = {"bad": {str(i): reason for i, reason in self.learner.bad.reasons.items()}}
        keep = None if self.learner.skips.in_a_row else self.config.checkpoint.keep
        checkpoint.save(self.folder, step, self._parts, progress=progress, definition=self.definition, keep=keep)
