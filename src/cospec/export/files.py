"""Safetensors written tensor by tensor into a folder that appears when it is complete.

A draft may be larger than what a rank can hold beside its training state: of what is
written, one tensor at a time is in memory. On the reading side, nothing outside a folder is opened.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cospec.config import ConfigError, require
from cospec.hf import INDEX, TensorFolder

SINGLE = "model.safetensors"

# fmt: off
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.int64: "I64", torch.bool: "BOOL",
}
# fmt: on


@dataclass(frozen=True)
class Spec:
    """What a tensor will be in the file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class TensorWriter:
    """Writes tensors in the order of their `key`, in as many files as `max_shard_bytes` asks for.

    The bytes depend on names, shapes, dtypes and values only. A file's header is known before
    its first tensor, so that nothing is collected.

    Args:
        specs: what will be written.
        max_shard_bytes: of tensor data in a file; a larger tensor has a file of its own.
    """

    def __init__(self, folder: Path, specs: Sequence[Spec], *, max_shard_bytes: int):
        require(max_shard_bytes >= 1, "max_shard_bytes", max_shard_bytes, "must be >= 1")
        self.folder = folder
        # Wide items first keeps every tensor aligned.
        self.order = sorted(specs, key=self.key)
        self.shards = _split(self.order, max_shard_bytes)
        count = len(self.shards)
        self.names = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        self._next = 0
        self._first_of = {shard[0].name: i for i, shard in enumerate(self.shards)}
        self._file = None

    @staticmethod
    def key(spec: Spec) -> tuple[int, str]:
        """Sorts specs into the order in which they are written."""
        return -spec.dtype.itemsize, spec.name

    def write(self, name: str, tensor: Tensor) -> None:
        """The next tensor of `order`; raises ValueError for another one."""
        spec = self.order[self._next]
        if (name, tuple(tensor.shape), tensor.dtype) != (spec.name, spec.shape, spec.dtype):
            raise ValueError(f"got {name} {tuple(tensor.shape)} {tensor.dtype}, the file has room for {spec}")
        if name in self._first_of:
            self.close()
            shard = self._first_of[name]
            self._file = open(self.folder / self.names[shard], "wb")  # noqa: SIM115  (open over many calls)
            self._file.write(_header(self.shards[shard]))
        assert self._file is not None
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        self._file.write(flat.view(torch.uint8).numpy().data)
        self._next += 1

    def finish(self) -> None:
        """The index, where there are several files; everything is on disk afterwards."""
        if self._next != len(self.order):
            raise ValueError(f"{self.order[self._next].name} was not written")
        self.close()
        if len(self.shards) > 1:
            weight_map = {s.name: self.names[i] for i, shard in enumerate(self.shards) for s in shard}
            total = sum(s.nbytes for s in self.order)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_json(self.folder / INDEX, index)

    def close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def _split(order: Sequence[Spec], max_bytes: int) -> list[list[Spec]]:
    shards: list[list[Spec]] = [[]]
    size = 0
    for spec in order:
        if shards[-1] and size + spec.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.nbytes
    return shards


def _header(specs: Sequence[Spec]) -> bytes:
    """Length (8 bytes, little endian) and JSON, padded with spaces to a multiple of 8."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + spec.nbytes
        entries[spec.name] = {"dtype": DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def open_tensors(folder: str | Path) -> TensorFolder:
    """The tensors of a folder, after a check that its files and its index tell one story.

    Raises ConfigError naming the file or key: outside the folder, unreadable, truncated, in
    the index only, in a file only, in two files.
    """
    folder = Path(folder)
    index, tensors = folder / INDEX, sorted(folder.glob("*.safetensors"))
    for path in [index, *tensors]:
        if path.is_symlink() or path.exists():
            check_inside(path, folder)
    weight_map: Mapping[str, str] = {}
    if index.is_file():
        raw = read_json(index)
        weight_map = raw.get("weight_map") or {}
        sound = isinstance(weight_map, dict) and all(isinstance(v, str) for v in weight_map.values())
        require(sound and bool(weight_map), f"{INDEX}: weight_map", type(weight_map).__name__, "must name the files")
        for key, name in weight_map.items():
            require(Path(name).name == name, f"{INDEX}: {key}", name, "is a path outside the folder")
            require((folder / name).is_file(), f"{INDEX}: {key}", name, "is no file of the folder")
        left = sorted({p.name for p in tensors} - set(weight_map.values()))
        require(not left, "files", left, f"are not in {INDEX}: a reader that takes every file would load them")
    elif (folder / SINGLE).is_file():
        left = [p.name for p in tensors if p.name != SINGLE]
        require(not left, "files", left, f"lie beside {SINGLE} without {INDEX}")
    try:
        found = TensorFolder(folder)
    except ValueError as error:
        raise ConfigError("draft folder", str(folder), str(error)) from error
    _check_places(folder, set(found), weight_map)
    return found


def _check_places(folder: Path, found: set[str], weight_map: Mapping[str, str]) -> None:
    if not weight_map:
        return
    for key in sorted(set(weight_map) - found):
        raise ConfigError("tensor", key, f"is in {INDEX} but in none of the files")
    for key in sorted(found - set(weight_map)):
        raise ConfigError("tensor", key, f"is in a file but not in {INDEX}")
    for name in sorted(set(weight_map.values())):
        for key in names_in(folder / name):
            require(weight_map[key] == name, "tensor", key, f"is in {name}, {INDEX} says {weight_map[key]}")


def names_in(path: Path) -> list[str]:
    """Names in one safetensors file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return [name for name in json.loads(file.read(size)) if name != "__metadata__"]


def check_inside(path: Path, folder: Path) -> None:
    """Raise ConfigError for a file that is, by a symbolic link, outside its folder."""
    inside = path.resolve().parent == folder.resolve()
    require(inside, "file", path.name, f"leads out of {folder} to {path.resolve()}: copy it there (cp -rL)")


def write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def read_json(path: Path) -> dict:
    """The object in a JSON file; raises ConfigError naming a file that is damaged."""
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError("file", str(path), f"cannot be read: {error}") from error
    require(isinstance(raw, dict), "file", str(path), "must hold a JSON object")
    return raw
