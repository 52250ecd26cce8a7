"""Safetensors written tensor by tensor: of what is written, one tensor at a time is in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cospec.config import require

INDEX = "model.safetensors.index.json"
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


def file_order(specs: Sequence[Spec]) -> list[Spec]:
    """The order in which they are written: as given, but wide dtypes first, which keeps every tensor aligned."""
    return sorted(specs, key=lambda spec: -spec.dtype.itemsize)


class TensorWriter:
    """Writes tensors in their `file_order`, in as many files as `max_shard_bytes` asks for.

    The bytes depend on names, shapes, dtypes and values only. A file's header is known before
    its first tensor, so that nothing is collected.

    Args:
        specs: what will be written.
        max_shard_bytes: of tensor data in a file; a larger tensor has a file of its own.
    """

    def __init__(self, folder: Path, specs: Sequence[Spec], *, max_shard_bytes: int):
        require(max_shard_bytes >= 1, "max_shard_bytes", max_shard_bytes, "must be >= 1")
        self.folder = folder
        self.order = file_order(specs)
        self.shards = _split(self.order, max_shard_bytes)
        count = len(self.shards)
        self.names = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        self._next = 0
        self._first_of = {shard[0].name: i for i, shard in enumerate(self.shards)}
        self._file = None

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
            (self.folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

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
