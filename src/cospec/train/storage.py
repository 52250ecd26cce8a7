"""DCP storage in safetensors files, indexed by JSON.

DCP plans who writes and who reads which piece of which tensor, for any mesh on either
side; its own file format keeps the index in a pickle, which a loader must never open.
Here each rank writes its pieces to one safetensors file, and the index is plain data.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from cospec.durable import fsync


def file_hash(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _done(value: Any) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


class SafetensorsWriter(StorageWriter):
    """Writes `rank-00000.safetensors`, one file a rank, into an existing folder.

    After the save the coordinator finds in `index` what a reader needs:
    `{"files": {name: {"bytes", "sha256"}}, "tensors": {name: {"dtype", "shape",
    "chunks": [{"offsets", "sizes", "file", "key"}]}}}`.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.index: dict[str, Any] = {}

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        self.index = {}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [dataclasses.replace(p, storage_data=f"rank-{i:05d}.safetensors") for i, p in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors: dict[str, torch.Tensor] = {}
        storages: set[int] = set()
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                raise TypeError(f"{item.index.fqn} is not a tensor; only tensors are saved")
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor)
            tensor = tensor.detach().cpu().contiguous()
            if tensor.untyped_storage().data_ptr() in storages:  # safetensors refuses shared storage
                tensor = tensor.clone()
            storages.add(tensor.untyped_storage().data_ptr())
            tensors[_key(item.index)] = tensor
        if not tensors:
            return _done([])
        path = self.folder / plan.storage_data
        save_file(tensors, path)
        fsync(path)
        file = {"file": path.name, "bytes": path.stat().st_size, "sha256": file_hash(path)}
        return _done(
            [WriteResult(item.index, tensors[_key(item.index)].nbytes, storage_data=file) for item in plan.items]
        )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files: dict[str, Any] = {}
        tensors: dict[str, Any] = {}
        for result in (r for rank_results in results for r in rank_results):
            file = result.storage_data
            files[file["file"]] = {"bytes": file["bytes"], "sha256": file["sha256"]}
            name = result.index.fqn
            meta = metadata.state_dict_metadata[name]
            assert isinstance(meta, TensorStorageMetadata)
            dtype = str(meta.properties.dtype).removeprefix("torch.")
            entry = tensors.setdefault(name, {"dtype": dtype, "shape": list(meta.size), "chunks": []})
            chunk = next(c for c in meta.chunks if c.offsets == result.index.offset)
            entry["chunks"].append(
                {
                    "offsets": list(chunk.offsets),
                    "sizes": list(chunk.sizes),
                    "file": file["file"],
                    "key": _key(result.index),
                }
            )
        self.index = {"files": files, "tensors": tensors}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


class SafetensorsReader(StorageReader):
    """Reads what `SafetensorsWriter` wrote; `index` is the writer's, from a trusted parse of JSON."""

    def __init__(self, folder: Path, index: dict[str, Any]):
        self.folder = folder
        self.index = index

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            state_dict_metadata={
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=getattr(torch, entry["dtype"])),
                    size=torch.Size(entry["shape"]),
                    chunks=[
                        ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["sizes"])) for c in entry["chunks"]
                    ],
                )
                for name, entry in self.index["tensors"].items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        chunks = {
            (name, tuple(c["offsets"])): c for name, entry in self.index["tensors"].items() for c in entry["chunks"]
        }
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            assert item.storage_index.offset is not None
            chunk = chunks[item.storage_index.fqn, tuple(item.storage_index.offset)]
            by_file.setdefault(chunk["file"], []).append((item, chunk["key"]))
        for file, items in by_file.items():
            with safe_open(self.folder / file, framework="pt") as f:
                for item, key in items:
                    if len(item.lengths):
                        part = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
                        piece = f.get_slice(key)[part]
                    else:
                        piece = f.get_tensor(key)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(piece)
                    planner.commit_tensor(item, target)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


def _key(index: MetadataIndex) -> str:
    """Name of one piece inside its file: the tensor's name and the piece's offsets."""
    return f"{index.fqn}@{','.join(str(o) for o in index.offset or ())}"
