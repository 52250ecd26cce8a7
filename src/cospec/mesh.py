"""Which device, which backend, which ranks: the one place that decides.

`Mesh` wraps a DeviceMesh with the axes pp, dp, cp (pp outermost, so that the ranks of
one pipeline stage are neighbours and cp, the chattiest axis, is innermost). A single
process has no DeviceMesh and no process group; every property then has its trivial value.

Ranks that only serve (`mesh.serve`) are in neither: the ranks that train are a world of
their own, the same as without them, and reach them by the mesh's `Link`.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
import uuid
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store

from cospec.config import MeshConfig, check_expert_ranks, require
from cospec.link import Link

AXES = ("pp", "dp", "cp")
EXPERT_AXES = ("efsdp", "ep")


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run. `device_mesh` is None for a single process."""

    device: torch.device
    device_mesh: DeviceMesh | None = None
    timeout_s: float = 300.0
    """Seconds that an operation of any of its process groups waits for a peer."""
    link: Link | None = None
    """Between the ranks that train and those that only serve; None where there are none of these."""
    ep_size: int = 1
    """Ranks of dp x cp that share the experts of a mixture."""

    def size(self, axis: str) -> int:
        return 1 if self.device_mesh is None else self.device_mesh[axis].size()

    def rank(self, axis: str) -> int:
        return 0 if self.device_mesh is None else self.device_mesh[axis].get_local_rank()

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Process group of this rank along `axis`; None where the axis has one rank."""
        if self.device_mesh is None or self.size(axis) == 1:
            return None
        return self.device_mesh[axis].get_group()

    @property
    def pp_size(self) -> int:
        return self.size("pp")

    @property
    def dp_size(self) -> int:
        return self.size("dp")

    @property
    def cp_size(self) -> int:
        return self.size("cp")

    @property
    def dp_rank(self) -> int:
        return self.rank("dp")

    @property
    def cp_rank(self) -> int:
        return self.rank("cp")

    @property
    def pp_rank(self) -> int:
        return self.rank("pp")

    @property
    def cp_group(self) -> dist.ProcessGroup | None:
        return self.group("cp")

    @property
    def world_size(self) -> int:
        """Ranks that train."""
        return 1 if self.device_mesh is None else self.device_mesh.size()

    @property
    def world_rank(self) -> int:
        """This rank among those that train; one that only serves is numbered on after them."""
        if self.link is not None:
            return self.link.rank
        return 0 if self.device_mesh is None else dist.get_rank()

    @property
    def serves_only(self) -> bool:
        return self.link is not None and self.link.serves

    @cached_property
    def fsdp_mesh(self) -> DeviceMesh | None:
        """Flattened dp x cp: the ranks that share one copy of the parameters. None for one rank."""
        return None if self.dp_size * self.cp_size == 1 else self.shard_mesh

    @cached_property
    def shard_mesh(self) -> DeviceMesh | None:
        """The same, also when it is one rank of several; None for a single process."""
        if self.device_mesh is None:
            return None
        return self.device_mesh["dp", "cp"]._flatten("fsdp", backend_override=_backend(self.device, self.timeout_s))

    @cached_property
    def expert_mesh(self) -> DeviceMesh | None:
        """The ranks of `fsdp_mesh` with axes efsdp x ep: neighbours share the experts, and each part of them is
        sharded over efsdp. None without expert parallelism."""
        if self.shard_mesh is None or self.ep_size == 1:
            return None
        sizes = (self.shard_mesh.size() // self.ep_size, self.ep_size)
        backends: dict[str, Any] = {axis: _backend(self.device, self.timeout_s) for axis in EXPERT_AXES}
        return self.shard_mesh._unflatten(0, sizes, EXPERT_AXES, backend_override=backends)

    @property
    def fsdp_group(self) -> dist.ProcessGroup | None:
        return None if self.fsdp_mesh is None else self.fsdp_mesh.get_group()

    def sum_all(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of float64 values over all ranks, for figures that only one pipeline stage has (zeros elsewhere)."""
        total = self.sum(values)
        if self.group("pp") is not None:
            total = total.clone()
            dist.all_reduce(total, group=self.group("pp"))
        return total

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of float64 values over dp x cp; returns a new tensor, on every rank the same."""
        total = values.detach().to(torch.float64)
        if self.fsdp_group is not None:
            total = total.clone()
            dist.all_reduce(total, group=self.fsdp_group)
        return total


def choose_device(name: str = "auto") -> torch.device:
    """The device of this process: CUDA (by LOCAL_RANK) when there is one, else CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        require(torch.cuda.is_available(), "train.device", name, "no CUDA device is visible; use cpu or auto")
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Compute dtype: bfloat16 on CUDA, float32 on CPU unless named."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, name)


def build_mesh(config: MeshConfig, *, device: str = "auto", timeout_s: float = 300.0, can_serve: bool = False) -> Mesh:
    """Join the processes torchrun started into a mesh.

    can_serve: the caller has work for ranks that only serve, and looks at `Mesh.serves_only`.

    Raises ConfigError when an axis is below 1, pp * dp * cp + serve is not the number of ranks, or ep does not
    divide dp * cp.
    """
    for axis in AXES:
        size = getattr(config, axis)
        require(size >= 1, f"mesh.{axis}", size, "must be >= 1")
    check_expert_ranks(config)
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    require(config.serve >= 0, "mesh.serve", config.serve, "must be >= 0")
    require(can_serve or not config.serve, "mesh.serve", config.serve, "must be 0: there is nothing to generate here")
    product = config.pp * config.dp * config.cp
    shape, needed = f"pp {config.pp} x dp {config.dp} x cp {config.cp}", f"the product is {product}"
    if config.serve:
        shape, needed = f"{shape} + serve {config.serve}", f"{needed} and {config.serve} serve"
    total = product + config.serve
    rule = f"{needed} but {world_size} process(es) run; start with torchrun --nproc_per_node {total}"
    require(total == world_size, "mesh", shape, rule)
    chosen = choose_device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if world_size == 1:
        return Mesh(chosen)
    link = None
    if config.serve:
        link = _join_with_servers(config, chosen, timeout_s)
        if link.serves or product == 1:
            return Mesh(chosen, None, timeout_s, link)
    elif not dist.is_initialized():
        _start_group(*_meet(timeout_s), chosen, timeout_s)
    backends: dict[int | str, Any] = {axis: _backend(chosen, timeout_s) for axis in AXES}
    sizes = tuple(getattr(config, axis) for axis in AXES)
    device_mesh = init_device_mesh(chosen.type, sizes, mesh_dim_names=AXES, backend_override=backends)
    return Mesh(chosen, device_mesh, timeout_s, link, config.ep)


def _meet(timeout_s: float) -> tuple[dist.Store, int, int]:
    """The job's store, this rank and the number of ranks. torchrun's store outlives a restart, and with it the
    addresses of dead processes, which gloo would try to reach: the ranks meet in it under a name of this attempt.
    """
    store, rank, size = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=timeout_s)))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = dist.PrefixStore(f"cospec/{agree_on_name(store, rank, size, timeout_s)}", store)
    return store, rank, size


def _start_group(store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
    """Make the default group."""
    backend, timeout = "nccl" if device.type == "cuda" else "gloo", datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def _join_with_servers(config: MeshConfig, device: torch.device, timeout_s: float) -> Link:
    """Default group of the ranks that train, where they are several, and the link of all."""
    if dist.is_initialized():
        raise RuntimeError("mesh.serve: a default process group exists already; it must hold the training ranks only")
    store, rank, size = _meet(timeout_s)
    trainers = size - config.serve
    _JOB[:] = [Job(store, rank, size)]
    if trainers > 1 and rank < trainers:
        _start_group(dist.PrefixStore("cospec/training", store), rank, trainers, device, timeout_s)
    return Link(
        store,
        rank,
        trainers=trainers,
        servers=config.serve,
        stages=config.pp,
        device=device,
        timeout_s=timeout_s,
    )


@dataclass(frozen=True)
class Job:
    """All ranks that torchrun started."""

    store: dist.Store
    rank: int
    size: int


_JOB: list[Job] = []


def current_job() -> Job | None:
    """The job of this process, None while it is alone."""
    if _JOB:
        return _JOB[0]
    return Job(_get_default_store(), dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None


def agree_on_name(store: dist.Store, rank: int, size: int, timeout_s: float) -> str:
    """A name that rank 0 makes up and all ranks that are alive now learn, whatever dead ones left in the store.

    A rank says hello with a number of its own; rank 0 answers the newest hello of every rank
    until each has taken the answer. Raises TimeoutError naming ranks that did not come.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s
    if rank:
        store.set(f"cospec/hello/{rank}", own)
    missing = set(range(1, size)) if rank == 0 else {0}
    answered: dict[int, str] = {}
    while missing:
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {rank}: rank(s) {sorted(missing)} did not join within {timeout_s:g} seconds")
        if rank and store.check([f"cospec/answer/{own}"]):
            name = store.get(f"cospec/answer/{own}").decode()
            store.set(f"cospec/ready/{name}/{rank}", "")
            return name
        for other in sorted(missing) if rank == 0 else ():
            if store.check([f"cospec/ready/{own}/{other}"]):
                missing.discard(other)
            elif store.check([f"cospec/hello/{other}"]):
                hello = store.get(f"cospec/hello/{other}").decode()
                if answered.get(other) != hello:
                    store.set(f"cospec/answer/{hello}", own)
                    answered[other] = hello
        time.sleep(0.01)
    return own


def _backend(device: torch.device, timeout_s: float) -> tuple[str, Any]:
    """Backend and options of the mesh's groups: unlike the default group, they would wait for half an hour."""
    name = "nccl" if device.type == "cuda" else "gloo"
    group: Any = dist.ProcessGroupNCCL if name == "nccl" else dist.ProcessGroupGloo
    options = group.Options() if name == "nccl" else group._Options()
    options._timeout = datetime.timedelta(seconds=timeout_s)
    return name, options


FAULT = "cospec/fault"


def report_fault(text: str) -> None:
    """Tell the other ranks why this one ends; the first report stands. Never raises."""
    with contextlib.suppress(Exception):
        _get_default_store().compare_set(FAULT, "", text)


def reported_fault(wait_s: float = 0.0) -> str | None:
    """What another rank reported, waiting for it a while; None when there is nothing, or nobody to ask."""
    deadline = time.monotonic() + wait_s
    with contextlib.suppress(Exception):
        store = _get_default_store()
        while True:
            if store.check([FAULT]):
                return store.get(FAULT).decode()
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
    return None


def close_mesh(mesh: Mesh) -> None:
    """Leave together: with gloo, a rank that leaves while a peer still talks to it aborts that peer."""
    if mesh.link is not None:
        mesh.link.close()
        _JOB.clear()
    if mesh.device_mesh is not None and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
