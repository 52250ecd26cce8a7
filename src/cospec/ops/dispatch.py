"""DTensors sharded over cp take the same path as plain shards, and come back as DTensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_iter, tree_map

AXIS = "cp"

Function = TypeVar("Function", bound=Callable[..., Any])


def takes_dtensors(function: Function) -> Function:
    """Let `function`, which works on the local rows of a cp shard, take and return DTensors too.

    Each must be `Shard(0)` on a one-dimensional DeviceMesh whose axis is named "cp": its local
    tensor is the rank's shard in the layout's order, so that globally the shards stand one after
    another in rank order. `cp_group` is the mesh's own group. Tensors in the result are DTensors
    of the same mesh and placement, and so are the gradients. Plain tensors pass through untouched.

    Raises:
        ValueError: another mesh or placement, DTensors of several meshes, DTensors mixed with
            plain tensors, or a cp_group (a trunk's too) that is not the mesh's.
    """
    takes_group = "cp_group" in inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args, **kwargs):
        if not any(isinstance(x, DTensor) for x in _tensors(args, kwargs)):
            return function(*args, **kwargs)
        mesh = _common_mesh(function.__name__, list(_tensors(args, kwargs)))
        group = mesh.get_group() if mesh.size() > 1 else None
        given = [x.group for x in args if hasattr(x, "group")]  # a trunk's
        if takes_group and kwargs.get("cp_group") is not None:
            given.append(kwargs["cp_group"])
        for other in given:
            if _ranks(other) != _ranks(group):
                raise ValueError(
                    f"{function.__name__}: the DTensors' mesh has ranks {_ranks(group)}, cp_group has {_ranks(other)}"
                )
        args, kwargs = tree_map(lambda x: x.to_local() if isinstance(x, DTensor) else x, (args, kwargs))
        if takes_group:
            kwargs["cp_group"] = group
        result = function(*args, **kwargs)
        return tree_map(lambda x: _wrap(x, mesh) if isinstance(x, Tensor) else x, result)

    return call  # type: ignore[return-value]


def _wrap(x: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(x, mesh, [Shard(0)], run_check=False)


def _tensors(args, kwargs) -> Iterator[Tensor]:
    return (x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor))


def _common_mesh(name: str, tensors: list[Tensor]) -> DeviceMesh:
    meshes = []
    for x in tensors:
        if not isinstance(x, DTensor):
            raise ValueError(f"{name}: got a plain tensor {tuple(x.shape)} beside DTensors: pass one kind only")
        axes = x.device_mesh.mesh_dim_names
        if axes != (AXIS,) or tuple(x.placements) != (Shard(0),):
            raise ValueError(
                f"{name}: a DTensor must be Shard(0) on a mesh with the one axis '{AXIS}' "
                f"(mesh['{AXIS}']), got {x.placements} on the axes {axes}"
            )
        meshes.append(x.device_mesh)
    for mesh in meshes[1:]:
        if mesh != meshes[0]:
            raise ValueError(f"{name}: the DTensors lie on different meshes, {meshes[0]} and {mesh}")
    return meshes[0]


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
