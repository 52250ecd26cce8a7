"""The draft or the policy of a run's checkpoint, to be exported without loading the rest of the run."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from cospec.config import ConfigError, Eagle3Config, PolicyConfig, RopeConfig
from cospec.draft.eagle3 import Eagle3Draft
from cospec.export.card import Card, commit
from cospec.export.eagle3 import read_raw
from cospec.export.eagle3_config import read_config
from cospec.titan import DecoderConfig, build_config
from cospec.train import checkpoint
from cospec.train.checkpoint import MANIFEST, CheckpointError
from cospec.train.loop import RUN
from cospec.train.metrics import CHECKPOINTS, EVALUATIONS, METRICS, read_rows
from cospec.train.storage import SafetensorsReader

MEASURED = "acceptance_length_cotrained"


def find_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that a run's folder or a checkpoint's folder means; None for any other folder.

    Raises CheckpointError for a run without a good one.
    """
    if (folder / MANIFEST).is_file():
        return folder
    if not (folder / CHECKPOINTS).is_dir():
        if (folder / METRICS).is_file():
            raise CheckpointError(f"{folder}: the run kept no checkpoint (checkpoint.every is 0)")
        return None
    found = checkpoint.newest_good(folder / CHECKPOINTS)
    if found is None:
        raise CheckpointError(f"{folder}: the run has no good checkpoint")
    return found


def read_draft(path: Path) -> tuple[Eagle3Draft, Mapping[str, Tensor], Card]:
    """The draft's shape (on the meta device), its tensors, each read when asked for, and what the run knew.

    Raises CheckpointError for a checkpoint that is broken or has no draft.
    """
    manifest = checkpoint.verify(path)
    said = manifest["definition"].get("draft")
    if said is None:
        raise CheckpointError(f"{path}: the run had no draft (draft.enabled was off)")
    names = {field.name for field in fields(Eagle3Config)}
    with _understood(path, "draft"), torch.device("meta"):
        shape = {name: value for name, value in said.items() if name in names}
        shape |= {"rope": RopeConfig(**shape["rope"]), "tap_layers": tuple(shape["tap_layers"])}
        draft = Eagle3Draft(Eagle3Config(**shape))
    run = path.parent.parent
    settings = _read(run / "config.json")
    init = _section(settings, "draft").get("init")
    if init is None:
        draft.init_seed = manifest["definition"]["seed"]
    else:
        draft.kept_config = _kept(init, draft.config)
    return draft, _Tensors(path, manifest, "draft.model."), _card(run, settings, manifest)


@dataclass(frozen=True)
class SavedPolicy:
    """A checkpoint's policy: its spec, and tensors that are read when asked for."""

    spec: DecoderConfig
    tensors: Mapping[str, Tensor]
    dtype: torch.dtype
    """Of the embeddings, known without reading them."""
    start: str | None
    """The folder that it was made from, if any."""
    stop_token_id: int | None
    """Of the task that it was trained on, where there was one."""


def read_policy(path: Path) -> SavedPolicy:
    """The policy of a checkpoint.

    Raises CheckpointError for a checkpoint that is broken or has no policy, as those of offline runs.
    """
    manifest = checkpoint.verify(path)
    said = manifest["definition"].get("policy")
    if said is None:
        raise CheckpointError(f"{path}: the run trained no policy")
    with _understood(path, "policy"):
        sizes: dict[str, Any] = {**said, "rope": RopeConfig(**said["rope"])}
        spec = build_config(PolicyConfig(**sizes))
    start = _section(_read(path.parent.parent / "config.json"), "policy").get("hf_path")
    stop = _section(manifest["definition"], "data").get("stop_token_id")
    tensors = _Tensors(path, manifest, "policy.model.")
    return SavedPolicy(spec, tensors, tensors.dtype("tok_embeddings.weight"), start, stop)


class _Tensors(Mapping[str, Tensor]):
    """Whole tensors of a part of a checkpoint; one at a time is in memory."""

    def __init__(self, path: Path, manifest: dict[str, Any], prefix: str):
        self.path, self.manifest, self.prefix = path, manifest, prefix
        self.names = [n.removeprefix(prefix) for n in manifest["tensors"] if n.startswith(prefix)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> Tensor:
        wanted = {self.prefix + name: torch.empty(self._entry(name)["shape"], dtype=self.dtype(name))}
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
            dcp.load(wanted, storage_reader=SafetensorsReader(self.path, self.manifest), planner=planner, no_dist=True)
        tensor = wanted[self.prefix + name]
        if tensor.is_floating_point() and not tensor.isfinite().all():
            why = "the run had diverged; take an earlier checkpoint"
            raise CheckpointError(f"{self.path}: tensor {self.prefix + name} is not finite: {why}")
        return tensor

    def dtype(self, name: str) -> torch.dtype:
        """Without reading the tensor."""
        return getattr(torch, self._entry(name)["dtype"])

    def _entry(self, name: str) -> dict[str, Any]:
        entry = self.manifest["tensors"].get(self.prefix + name)
        if entry is None:
            raise CheckpointError(f"{self.path}: tensor {self.prefix + name} is missing")
        return entry


@contextmanager
def _understood(path: Path, what: str) -> Iterator[None]:
    """Sizes in a manifest that make no model raise CheckpointError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: its {what} is not understood: {type(error).__name__}: {error}") from error


def _kept(folder: str, config: Eagle3Config) -> dict[str, Any]:
    """Keys of the config.json that the run started from which change nothing; none when it is gone."""
    try:
        return read_config(read_raw(folder), tap_layers=config.tap_layers)[2]
    except ConfigError:
        return {}


def _card(run: Path, settings: Mapping[str, Any], manifest: Mapping[str, Any]) -> Card:
    """What the run's own files say; figures of the last step that the checkpoint holds."""
    policy = _section(settings, "policy")
    name = policy.get("hf_path") or policy.get("flavor")
    task, data = _section(manifest["definition"], "data").get("task"), _section(settings, "data")
    progress = manifest["progress"]
    done = progress["phase_step"] if progress["phase"] == RUN else 0
    rows = [r for r in read_rows(run / METRICS) if r["step"] < done]
    last = rows[-1] if rows else {}
    features = _section(settings, "offline").get("features")
    rollouts = last.get("rollout_acceptance_length") is not None
    source = f"rollouts of {task}" if rollouts else features or data.get("path") or "synthetic documents"
    acceptance = None
    measured = [r for r in read_rows(run / EVALUATIONS) if r["step"] <= done and r.get(MEASURED) is not None]
    if measured:
        acceptance = f"{measured[-1][MEASURED]:.3f} tokens a verification on held-out prompts"
    elif rollouts:
        acceptance = f"{last['rollout_acceptance_length']:.3f} tokens a verification, rollouts of step {last['step']}"
    elif last.get("draft_simulated_acceptance_length") is not None:
        figure = last["draft_simulated_acceptance_length"]
        acceptance = f"{figure:.3f} tokens a verification, simulated on the documents of step {last['step']}"
    return Card(
        policy=name,
        data=f"{source}, {manifest['step']} optimizer steps",
        acceptance=acceptance,
        commit=_read(run / "run.json").get("commit") or commit(),
    )


def _read(path: Path) -> dict[str, Any]:
    """The object in a JSON file; nothing where there is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _section(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = settings.get(name)
    return found if isinstance(found, dict) else {}
