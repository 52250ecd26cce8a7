"""Save and resume a whole run: models, optimizers, random state, position in the data.

A checkpoint is a folder `step-00000010` of safetensors files and one `checkpoint.json`, which
holds the format version, what defines the run, where every piece of every tensor lies,
and size and hash of every file. It is written under a temporary name and renamed when all
of it is on disk, so a folder of that name is whole unless something broke it later. Nothing
in it is a pickle. Tensors are stored by their global shape: any mesh can read what any mesh wrote.

Every function here that takes part in a run is collective: all ranks call it, and an
error on one rank is raised on all.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from cospec.durable import fsync
from cospec.records import FORMAT_VERSION
from cospec.train.state import Part, Room, collect, model_state, optimizer_room, random_state, set_random_state
from cospec.train.storage import SafetensorsReader, SafetensorsWriter, file_hash

FORMAT = "cospec-checkpoint"
MANIFEST = "checkpoint.json"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; names the folder and the reason."""


class NewerFormatError(CheckpointError):
    """Written by a later cospec."""


def save(
    folder: str | Path,
    step: int,
    parts: Mapping[str, Part],
    *,
    progress: Mapping[str, Any],
    definition: Mapping[str, Any],
    keep: int | None = 2,
) -> Path:
    """Write `folder/step-XXXXXXXX` and drop all but the newest `keep` good ones (None: drop none).

    Args:
        step: optimization steps done.
        progress: small JSON state to get back from `load`: data position, engine version.
        definition: JSON settings that must be equal on resume (sizes, tap layers, passes, vocabulary).

    Raises:
        CheckpointError: on every rank when any rank could not write; earlier checkpoints are untouched.
    """
    folder = Path(folder)
    final, temporary = folder / f"step-{step:08d}", folder / f".writing-step-{step:08d}"

    def prepare() -> None:
        for old in folder.glob(".writing-*"):  # left by a run that was killed while it saved
            shutil.rmtree(old)
        temporary.mkdir(parents=True)

    def publish() -> None:
        manifest = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "step": step,
            "world_size": _world_size(),
            "definition": definition,
            "progress": progress,
            "optimizers": with_optimizers,
            **writer.index,
        }
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
        fsync(temporary / MANIFEST)
        fsync(temporary)
        replaced = folder / f".writing-replaced-{step:08d}"
        if final.exists():
            final.rename(replaced)
        temporary.rename(final)
        fsync(folder)
        shutil.rmtree(replaced, ignore_errors=True)
        if keep is not None:
            _prune(folder, keep)

    writer = SafetensorsWriter(temporary)
    what = f"cannot save checkpoint {final}"
    _together(prepare if _rank() == 0 else None, what)
    try:
        state = _together(lambda: {**collect(parts), **_own_random_state()}, what)
        with_optimizers = _anywhere([name for name, part in parts.items() if part.optimizers])
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        _dcp(lambda: dcp.save(state, storage_writer=writer, planner=planner), what)
        _together(publish if _rank() == 0 else None, what)
    except CheckpointError:
        if _rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def newest_good(folder: str | Path, *, say: Callable[[str], None] = print) -> Path | None:
    """The newest checkpoint in `folder` whose files are all there and unharmed; None without one.

    Broken ones are passed over with a message on rank 0.

    Raises:
        NewerFormatError: the newest was written by a later cospec (not broken: upgrade, or move it away).
    """
    paths = _together(lambda: sorted(Path(folder).glob("step-*"), reverse=True) if _rank() == 0 else [], str(folder))
    if dist.is_initialized():
        box = [paths]
        dist.broadcast_object_list(box)
        paths = box[0]
    for path in paths:
        try:
            verify(path)
        except NewerFormatError:
            raise
        except CheckpointError as error:
            if _rank() == 0:
                say(f"skipping a broken checkpoint: {error}")
        else:
            return path
    return None


def to_resume(folder: Path, definition: Mapping[str, Any]) -> tuple[Path, dict[str, Any]] | None:
    """The newest good checkpoint and its `progress`; None for a folder without checkpoints: the run starts anew.

    Raises CheckpointError when there are checkpoints, none of which can be read, and for one
    of another run (names the setting and both values).
    """
    path = newest_good(folder)
    if path is not None:
        return path, check_definition(path, definition)
    if any(folder.glob("step-*")):
        raise CheckpointError(f"{folder}: none of its checkpoints can be read; move them away to start anew")
    return None


def verify(path: str | Path) -> dict[str, Any]:
    """The manifest of a checkpoint, after a check of size and hash of all its files (shared out over the ranks)."""
    path = Path(path)

    def check() -> dict[str, Any]:
        manifest = read_manifest(path)
        for i, (name, file) in enumerate(sorted(manifest["files"].items())):
            _check_size(path, name, file)
            if i % _world_size() == _rank() and file_hash(path / name) != file["sha256"]:
                raise CheckpointError(f"{path}: {name} is damaged (its sha256 is not the recorded one)")
        return manifest

    return _together(check, str(path))


def load(
    path: str | Path, parts: Mapping[str, Part], *, definition: Mapping[str, Any], check_files: bool = True
) -> dict[str, Any]:
    """Fill `parts` and the random state from a checkpoint and return its `progress`, with `step` added.

    Args:
        path: as `newest_good` returns it.
        definition: must equal the saved one.
        check_files: False right after `newest_good`, which has read all files once.

    Raises:
        CheckpointError: no checkpoint, a broken one, one of a later format, another definition
            (names the setting and both values), tensors missing, left over or of another
            shape or dtype.
    """
    path = Path(path)
    manifest = verify(path) if check_files else _together(lambda: read_manifest(path), str(path))

    same_ranks = manifest["world_size"] == _world_size()

    def prepare() -> tuple[dict[str, Tensor], list[Room]]:
        _check_definition(path, manifest["definition"], json.loads(json.dumps(definition)))
        for name, part in parts.items():
            if part.optimizers and name not in manifest["optimizers"]:
                raise CheckpointError(f"{path}: {name} was saved without its optimizer state")
        rooms = optimizer_room(parts, manifest["tensors"])
        wanted = {**model_state(parts), **{name: tensor for room in rooms for name, tensor in room.named.items()}}
        if same_ranks:  # with another number of ranks a rank's random state means nothing: it keeps its own seed
            wanted.update(_own_random_state())
        _check_tensors(path, wanted, manifest["tensors"])
        return wanted, rooms

    wanted, rooms = _together(prepare, str(path))
    _check_leftovers(path, parts, wanted, manifest["tensors"])
    reader = SafetensorsReader(path, manifest)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    _dcp(lambda: dcp.load(wanted, storage_reader=reader, planner=planner), f"cannot load checkpoint {path}")

    def apply() -> None:
        for name, part in parts.items():
            for module in part.modules:
                module.load_state_dict({k: wanted[f"{name}.model.{k}"] for k in module.state_dict()})
        for room in rooms:
            room.optimizer.state[room.param] = room.state
        if same_ranks:
            prefix = f"rng.{_rank()}."
            set_random_state({k.removeprefix(prefix): v for k, v in wanted.items() if k.startswith(prefix)})

    _together(apply, str(path))
    return {**manifest["progress"], "step": manifest["step"]}


def check_definition(path: str | Path, definition: Mapping[str, Any]) -> dict[str, Any]:
    """The `progress` of a checkpoint, with `step` added; nothing is loaded.

    Raises CheckpointError as `load` does for what its manifest shows.
    """
    path = Path(path)

    def check() -> dict[str, Any]:
        manifest = read_manifest(path)
        _check_definition(path, manifest["definition"], json.loads(json.dumps(definition)))
        return {**manifest["progress"], "step": manifest["step"]}

    return _together(check, str(path))


def read_manifest(path: Path) -> dict[str, Any]:
    """Parse `checkpoint.json`; local, no other file is read."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint folder")
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: not a cospec checkpoint (it has no {MANIFEST})") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {MANIFEST} cannot be read: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not a cospec checkpoint ({MANIFEST} has another format)")
    version = manifest.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise NewerFormatError(f"{path}: format version {version}, this cospec reads up to {FORMAT_VERSION}")
    lacking = [
        k
        for k in ("step", "world_size", "definition", "progress", "optimizers", "files", "tensors")
        if k not in manifest
    ]
    if lacking:
        raise CheckpointError(f"{path}: {MANIFEST} lacks {', '.join(lacking)}")
    for name in manifest["files"]:
        if Path(name).name != name:
            raise CheckpointError(f"{path}: file name {name!r} leads out of the checkpoint")
    return manifest


# Checks


def _check_size(path: Path, name: str, file: Mapping[str, Any]) -> None:
    try:
        size = (path / name).stat().st_size
    except FileNotFoundError:
        raise CheckpointError(f"{path}: {name} is missing") from None
    if size != file["bytes"]:
        raise CheckpointError(f"{path}: {name} has {size} bytes instead of {file['bytes']}")


def _check_definition(path: Path, saved: Any, ours: Any, name: str = "") -> None:
    if isinstance(saved, dict) and isinstance(ours, dict):
        for key in sorted(saved.keys() | ours.keys()):
            _check_definition(path, saved.get(key), ours.get(key), f"{name}.{key}" if name else key)
    elif saved != ours:
        raise CheckpointError(f"{path}: {name} was {saved!r} when it was saved and is {ours!r} in this run")


def _check_tensors(path: Path, wanted: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    for name, tensor in wanted.items():
        if name not in saved:
            raise CheckpointError(f"{path}: tensor {name} is missing")
        shape, dtype = saved[name]["shape"], saved[name]["dtype"]
        if list(tensor.shape) != shape or str(tensor.dtype) != f"torch.{dtype}":
            raise CheckpointError(
                f"{path}: tensor {name} is {dtype} {shape} there and "
                f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} in this run"
            )


def _check_leftovers(
    path: Path, parts: Mapping[str, Part], wanted: Mapping[str, Tensor], saved: Mapping[str, Any]
) -> None:
    """Nothing that was saved for these parts may be left unread by all ranks together."""
    prefixes = tuple(
        f"{name}.{kind}."
        for name, part in parts.items()
        for kind in (["model", "optim"] if part.optimizers else ["model"])
    )
    needed = set(wanted)
    if dist.is_initialized():
        everyone: list[Any] = [None] * _world_size()
        dist.all_gather_object(everyone, (prefixes, needed))
        prefixes = tuple(p for their, _ in everyone for p in their)
        needed = set().union(*(names for _, names in everyone))
    left = sorted(n for n in saved if n.startswith(prefixes) and n not in needed)
    if left:
        raise CheckpointError(f"{path}: this run has no place for {len(left)} saved tensors, the first is {left[0]}")


# Ranks


def _own_random_state() -> dict[str, Tensor]:
    return {f"rng.{_rank()}.{kind}": value for kind, value in random_state().items()}


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _together(work: Callable[[], Any] | None, what: str) -> Any:
    """Do local work; if it fails on any rank, raise on every rank, else return the result."""
    result: Any = None
    error: Exception | None = None
    try:
        result = work() if work is not None else None
    except Exception as e:
        error = e
    if not dist.is_initialized():
        if error is not None:
            raise error if isinstance(error, CheckpointError) else _wrap(what, error)
        return result
    errors: list[Any] = [None] * _world_size()
    dist.all_gather_object(errors, None if error is None else (type(error).__name__, str(error)))
    for rank, found in enumerate(errors):
        if found is None:
            continue
        name, text = found
        kind = NewerFormatError if name == "NewerFormatError" else CheckpointError
        message = text if name in ("CheckpointError", "NewerFormatError") else f"{what}: {name}: {text}"
        raise kind(f"{message} (rank {rank})") from error
    return result


def _anywhere(names: list[str]) -> list[str]:
    """The names that any rank has: with pipeline stages, a part may live on some ranks only."""
    if not dist.is_initialized():
        return names
    everyone: list[Any] = [None] * _world_size()
    dist.all_gather_object(everyone, names)
    return sorted({name for theirs in everyone for name in theirs})


def _dcp(work: Callable[[], Any], what: str) -> None:
    """Run a DCP call, which reports errors of one rank to all, and make them readable."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
            work()
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, KeyboardInterrupt):
            raise cause from None
        raise CheckpointError(f"{what}: {type(cause).__name__}: {cause} (rank {rank})") from error


def _wrap(what: str, error: Exception) -> CheckpointError:
    wrapped = CheckpointError(f"{what}: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def _prune(folder: Path, keep: int) -> None:
    good = 0
    for path in sorted(folder.glob("step-*"), reverse=True):
        if good >= keep:
            shutil.rmtree(path)
            continue
        try:
            manifest = read_manifest(path)
            for name, file in manifest["files"].items():
                _check_size(path, name, file)
            good += 1
        except CheckpointError:
            continue  # does not count as one to keep
