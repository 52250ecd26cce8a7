"""Taps from the pipeline stages to the draft's rank, beside the schedule.

Each stage that is not on the draft's rank has a stream: a process group of two ranks, an
`Outbox` on the source, a `Landing` on the draft's rank. Both follow the order of the stage's
forwards, so messages need no tag. docs/pipeline.md draws it.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cospec.channel.base import ChannelError, ChannelStats, PutOrder, tap_name
from cospec.channel.local import LocalStream
from cospec.mesh import Mesh
from cospec.records import TapPlan, TapStream

STALL_S = 1e-3  # gloo cannot say whether a send is done but by waiting: a shorter wait found it done


@dataclass(frozen=True)
class _Message:
    microbatch: int
    layer: int
    work: dist.Work
    tap: Tensor  # kept until it is sent


class Outbox:
    """The send side of one stream: copies and sends at once, holds at most `stream.queue` microbatches."""

    def __init__(self, plan: TapPlan, stream: TapStream, link: Link, stats: ChannelStats):
        self.plan, self.stream, self.link, self.stats = plan, stream, link, stats
        self.order = PutOrder(plan, stream)
        self._queue: deque[list[_Message]] = deque()  # one list for each microbatch
        self._side = torch.cuda.Stream(link.device) if link.device.type == "cuda" else None

    def put(self, microbatch: int, layer: int, tap: Tensor) -> None:
        self.order.check(microbatch, layer, tap)
        if layer == self.stream.layers[0]:
            self._make_room()
            self._queue.append([])
            self.stats.in_flight = max(self.stats.in_flight, len(self._queue))
        with self._copying(tap):
            copy = tap.to(self.plan.dtype, copy=True)
            work = self.link.send(microbatch, layer, copy)
        self._queue[-1].append(_Message(microbatch, layer, work, copy))
        self.stats.sent_bytes += copy.nbytes

    def _make_room(self) -> None:
        while self._queue and all(message.work.is_completed() for message in self._queue[0]):
            self._queue.popleft()
        while len(self._queue) >= self.stream.queue:
            started = time.perf_counter()
            self._wait_for_oldest()
            waited = time.perf_counter() - started
            if waited > STALL_S:
                self.stats.stalls += 1
                self.stats.stall_s += waited

    def flush(self) -> None:
        while self._queue:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        for message in self._queue.popleft():
            self.link.wait(message.work, message.microbatch, message.layer, "was not taken by the draft's rank")

    @contextlib.contextmanager
    def _copying(self, tap: Tensor):
        """On CUDA the copy and the send run on a stream of their own, after what the policy has queued."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(tap.device))
        with torch.cuda.stream(self._side):
            yield
        tap.record_stream(self._side)


class Landing:
    """The receive side of one stream: a slot holds all taps of one microbatch, receives are posted ahead."""

    def __init__(self, plan: TapPlan, stream: TapStream, link: Link, stats: ChannelStats):
        self.stream, self.link, self.stats = stream, link, stats
        shape = (plan.slots, len(stream.layers), *plan.shape)
        self.slots = torch.empty(shape, dtype=plan.dtype, device=link.device)
        self._free = deque(range(plan.slots))
        self._coming: deque[int] = deque()
        self._posted: dict[int, tuple[int, list[dist.Work]]] = {}

    def begin(self, wanted: Sequence[bool]) -> None:
        self._coming.extend(m for m in self.stream.order if wanted[m])
        self._post()

    def get(self, microbatch: int) -> dict[int, Tensor]:
        if microbatch not in self._posted:
            layer = self.stream.layers[0]
            raise ChannelError(self.stream.stage, microbatch, layer, "has no landing slot: all hold later microbatches")
        slot, works = self._posted[microbatch]
        started = time.perf_counter()
        for layer, work in zip(self.stream.layers, works, strict=True):
            self.link.wait(work, microbatch, layer, "did not arrive")
        self.stats.wait_s += time.perf_counter() - started
        self.stats.received_bytes += self.slots[slot].nbytes
        return {layer: self.slots[slot, i] for i, layer in enumerate(self.stream.layers)}

    def release(self, microbatch: int) -> None:
        self._free.append(self._posted.pop(microbatch)[0])
        self._post()

    def _post(self) -> None:
        while self._free and self._coming:
            slot, microbatch = self._free.popleft(), self._coming.popleft()
            works = [
                self.link.receive(microbatch, layer, self.slots[slot, i]) for i, layer in enumerate(self.stream.layers)
            ]
            self._posted[microbatch] = slot, works
        self.stats.in_flight = max(self.stats.in_flight, len(self._posted))


class Link:
    """The process group of one stream on one rank; its failures are ChannelErrors.

    On CUDA waiting orders the streams and returns at once; a message that never comes is the
    matter of the group's watchdog, whose report names the group by its description.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, stream: TapStream, device: torch.device, timeout_s: float):
        self.group, self.peer, self.stream, self.device, self.timeout_s = group, peer, stream, device, timeout_s

    def send(self, microbatch: int, layer: int, tap: Tensor) -> dist.Work:
        return self._try(microbatch, layer, "cannot be sent", lambda: dist.isend(tap, dst=self.peer, group=self.group))

    def receive(self, microbatch: int, layer: int, slot: Tensor) -> dist.Work:
        what = "cannot be received"
        return self._try(microbatch, layer, what, lambda: dist.irecv(slot, src=self.peer, group=self.group))

    def wait(self, work: dist.Work, microbatch: int, layer: int, what: str) -> None:
        if self.device.type == "cuda":
            work.wait()
            return
        limit = datetime.timedelta(seconds=self.timeout_s)
        self._try(
            microbatch, layer, f"{what} within {self.timeout_s:g} s, or its rank is gone", lambda: work.wait(limit)
        )

    def _try(self, microbatch: int, layer: int, what: str, action: Callable):
        try:
            return action()
        except RuntimeError as error:
            raise ChannelError(self.stream.stage, microbatch, layer, f"{what}: {error}") from error


class PipelineChannel:
    """The taps of a pipelined policy; see `base.TapChannel`. All ranks of the mesh make it together."""

    def __init__(self, plan: TapPlan, mesh: Mesh, *, timeout_s: float = 60.0):
        self.plan, self.stats = plan, ChannelStats()
        self.timeout_s = timeout_s
        self.local: dict[int, LocalStream] = {}
        self.outboxes: dict[int, Outbox] = {}
        self.landings: dict[int, Landing] = {}
        here = mesh.pp_rank
        for stream in plan.streams:
            if stream.source != plan.home:
                group, peers = _open_group(mesh, plan, stream, timeout_s)
                if here in (stream.source, plan.home):
                    peer = peers[plan.home if here == stream.source else stream.source]
                    link = Link(group, peer, stream, mesh.device, timeout_s)
                    if here == stream.source:
                        self.outboxes[stream.stage] = Outbox(plan, stream, link, self.stats)
                    else:
                        self.landings[stream.stage] = Landing(plan, stream, link, self.stats)
            elif here == plan.home:
                self.local[stream.stage] = LocalStream(plan, stream)

    @property
    def slot_bytes(self) -> int:
        """Memory of this rank's landing slots."""
        return sum(landing.slots.nbytes for landing in self.landings.values())

    def begin(self, wanted: Sequence[bool]) -> None:
        for landing in self.landings.values():
            landing.begin(wanted)

    def put(self, stage: int, microbatch: int, layer: int, tap: Tensor) -> None:
        self._sender(stage).put(microbatch, layer, tap)

    def sealed(self, stage: int, microbatch: int) -> None:
        if stage in self.outboxes or stage in self.local:
            self._sender(stage).order.check_all(microbatch)

    def get(self, microbatch: int) -> dict[int, Tensor]:
        taps: dict[int, Tensor] = {}
        for source in (*self.landings.values(), *self.local.values()):
            taps |= source.get(microbatch)
        return taps

    def release(self, microbatch: int) -> None:
        for source in (*self.landings.values(), *self.local.values()):
            source.release(microbatch)

    def flush(self) -> None:
        for outbox in self.outboxes.values():
            outbox.flush()

    def _sender(self, stage: int) -> Outbox | LocalStream:
        return self.outboxes[stage] if stage in self.outboxes else self.local[stage]


def _open_group(
    mesh: Mesh, plan: TapPlan, stream: TapStream, timeout_s: float
) -> tuple[dist.ProcessGroup, dict[int, int]]:
    """This rank's group of a stream and the global rank of each pp rank in its pipeline column.

    A column is one (dp, cp) coordinate. Every rank makes the groups of all columns, in the same order.
    """
    assert mesh.device_mesh is not None
    table = mesh.device_mesh.mesh  # [pp, dp, cp] of global ranks
    named = ", ".join(tap_name(layer) for layer in stream.layers)
    mine: Any = None
    peers: dict[int, int] = {}
    for dp in range(mesh.dp_size):
        for cp in range(mesh.cp_size):
            column = table[:, dp, cp].tolist()
            group = dist.new_group(
                [column[stream.source], column[plan.home]],
                timeout=datetime.timedelta(seconds=timeout_s),
                group_desc=f"taps of stage {stream.stage}: {named}",
            )
            if (dp, cp) == (mesh.dp_rank, mesh.cp_rank):
                mine, peers = group, dict(enumerate(column))
    return mine, peers
