"""When a run is saved, what defines it, and how it finds its way back.

A run is a few phases of optimizer steps (a warm start of the policy, one of the draft, the
run proper). A checkpoint belongs to a phase and says how many of its steps are done; its
folder is numbered by the optimizer steps of all phases. What depends on a step only
(documents, prompts, random numbers of samples, learning rates) is recomputed, not saved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from cospec.config import RunConfig
from cospec.policy.stream import WeightStream
from cospec.rollout.engine import load_state
from cospec.titan import policy_config
from cospec.train import checkpoint
from cospec.train.draft_side import DraftSide
from cospec.train.faults import doing
from cospec.train.metrics import CHECKPOINTS
from cospec.train.state import Part
from cospec.train.step import Learner


class Checkpoints:
    """The checkpoints of one run. Collective: all ranks make it and call it together.

    Args:
        learner: freshly built; `enter` fills it.
        data: JSON settings that fix which data a step sees; must be equal on resume.
        phases: names, in order.

    Raises:
        CheckpointError: on resume, for checkpoints none of which can be read, one of a later
            format, or one of another run (names the setting and both values).
    """

    def __init__(self, config: RunConfig, learner: Learner, *, data: Mapping[str, Any], phases: tuple[str, ...]):
        self.config = config.checkpoint
        self.folder = Path(config.output_dir) / CHECKPOINTS
        self.phases = phases
        self.definition = define_run(config, learner, data)
        self.steps_done = 0
        self.path: Path | None = None
        self.found: dict[str, Any] | None = None
        """`progress` of the checkpoint to resume from; None starts anew."""
        if self.config.resume and (found := checkpoint.to_resume(self.folder, self.definition)):
            self.path, self.found = found
            self.steps_done = self.found["step"]

    @property
    def recorded_steps(self) -> int | None:
        """Steps of the run proper that the checkpoint holds; None where the run starts anew or in an earlier phase."""
        if self.found is None or self.found["phase"] != self.phases[-1]:
            return None
        return self.found["phase_step"]

    def enter(self, phase: str, learner: Learner, static_draft: nn.Module | None = None) -> int | None:
        """How many steps of the phase are done, with all state loaded; None when a later phase had begun."""
        if self.found is None or self.path is None:
            return 0
        saved, ours = self.phases.index(self.found["phase"]), self.phases.index(phase)
        if saved != ours:
            return None if saved > ours else 0
        doing(f"loading {self.path}")
        progress = checkpoint.load(
            self.path, _parts(learner, static_draft), definition=self.definition, check_files=False
        )
        return progress["phase_step"]

    def step_done(
        self, phase: str, step: int, total: int, learner: Learner, static_draft: nn.Module | None = None
    ) -> None:
        """`step` of the phase's `total` steps are done: save when it is time to, and at the end of the run."""
        self.steps_done += 1
        last = phase == self.phases[-1]
        due = self.config.every and step % self.config.every == 0
        # The end of a warm start is the beginning of the next phase: numbered alike, saved once.
        if (due and (last or step < total)) or (last and step == total):
            self.save(phase, step, learner, static_draft)

    def save(self, phase: str, step: int, learner: Learner, static_draft: nn.Module | None = None) -> None:
        """Save now, unless checkpoints are off."""
        if not self.config.every:
            return
        doing(f"the checkpoint after {self.steps_done} steps")
        checkpoint.save(
            self.folder,
            self.steps_done,
            _parts(learner, static_draft),
            progress={"phase": phase, "phase_step": step},
            definition=self.definition,
            keep=None if learner.skips.in_a_row else self.config.keep,  # what is skipped now may be bad since long
        )


def define_run(config: RunConfig, learner: Learner, data: Mapping[str, Any]) -> dict[str, Any]:
    """JSON of what a resumed run must share with the saved one: models, vocabulary, draft passes, data order."""
    definition: dict[str, Any] = {
        "seed": config.seed,
        "data": dict(data),
        "policy": asdict(policy_config(learner.runner.parts[0].config)),
        "policy_optim": {"name": config.policy_optim.name},
    }
    if learner.draft is not None:
        settings = config.draft
        names = ("num_passes", "pass_decay", "share", "renormalise_teacher", "drop_labels_outside_vocab")
        definition["draft"] = {
            **asdict(learner.draft.model.config),
            **{name: getattr(settings, name) for name in names},
            "vocabulary_sha256": _tensor_hash(learner.draft.model.d2t),
        }
        definition["draft_optim"] = {"name": config.draft_optim.name}
        definition["eval"] = {"static_control": config.eval.static_control}
    return definition


def frozen_copy(draft: DraftSide, ranks: Collection[int]) -> nn.Module:
    """The draft's weights as they are now, whole, on the CPU, as a module that checkpoints can hold. Collective.

    Only `ranks` (of the world) get it; the others an empty module.
    """
    weights = WeightStream(draft.parts, draft.mesh, ranks)
    if draft.mesh.world_rank not in ranks:
        weights.drain()
        return nn.Module()
    copy = type(draft.model)(draft.model.config).requires_grad_(False)
    load_state(copy, weights)
    return copy


def _parts(learner: Learner, static_draft: nn.Module | None) -> dict[str, Part]:
    parts = {"policy": Part(learner.runner.parts, learner.policy_optim.optimizers)}
    if learner.draft is not None:
        parts["draft"] = Part(learner.draft.parts, learner.draft.optim.optimizers)
    if static_draft is not None:
        parts["static_draft"] = Part([static_draft])
    return parts


def _tensor_hash(x: Tensor) -> str:
    return hashlib.sha256(x.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]
