"""The weights of a run on a mesh, whole, one tensor at a time: what a refit sends."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from cospec.link import Link
from cospec.mesh import Mesh

Headers = list[list[tuple[str, torch.Size, torch.dtype]]]
"""Name, shape and dtype of the tensors of each pipeline stage."""


_PIECEWISE_BYTES = 32 << 20
"""Sharded tensors above this are gathered shard by shard."""


class WeightStream:
    """Whole tensors of modules that are spread over a mesh, by state-dict name.

    A tensor is gathered over the shards of its stage, broadcast along pp where a rank wants
    it, and gone when the next one comes: beyond its shards no rank holds more than one whole
    tensor. Collective: every rank makes the stream and goes through `items` to the end.

    Args:
        modules: those on this rank, or some of their tensors by name; on each pp rank other
            ones, with names of their own.
        wanted_by: world ranks that read the tensors; None means every rank.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module] | Mapping[str, Tensor],
        mesh: Mesh,
        wanted_by: Collection[int] | None = None,
    ):
        self.mesh = mesh
        self._own: dict[str, Tensor] = {}
        if isinstance(modules, Mapping):
            self._own |= modules
        else:
            for module in modules:
                self._own |= module.state_dict()
        header = [(name, value.shape, value.dtype) for name, value in self._own.items()]
        self._headers: Headers = [header]
        group = mesh.group("pp")
        column = {mesh.world_rank}
        if group is not None:
            found: list = [None] * mesh.pp_size
            dist.all_gather_object(found, header, group=group)
            self._headers = found
            column = set(dist.get_process_group_ranks(group))
        self._wanted = wanted_by is None or mesh.world_rank in wanted_by
        self._wanted_in_column = wanted_by is None or not column.isdisjoint(wanted_by)
        self.shapes = _shapes(self._headers)

    @property
    def headers(self) -> Headers:
        """Of all stages in this rank's pipeline column, in the order of `items`."""
        return self._headers

    @torch.no_grad()
    def items(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor on the mesh's device), for this rank if it wants them; read it before the next."""
        group = self.mesh.group("pp")
        for pp_rank, header in enumerate(self._headers):
            mine = pp_rank == self.mesh.pp_rank
            for name, shape, dtype in header:
                whole: Tensor | None = None
                if mine:
                    whole = self._whole(name)
                if group is not None and self._wanted_in_column:
                    if whole is None:
                        whole = torch.empty(shape, dtype=dtype, device=self.mesh.device)
                    whole = whole.to(self.mesh.device).contiguous()
                    dist.broadcast(whole, src=dist.get_global_rank(group, pp_rank), group=group)
                if self._wanted and whole is not None:
                    yield name, whole
                del whole

    @torch.no_grad()
    def send(self, link: Link) -> None:
        """To the ranks that serve only, who make an `IncomingStream` of `headers` of rank 0. Collective.

        The first rank of a stage sends; the others of the stage help to gather, all that they hold is one tensor.
        """
        stage = self.mesh.pp_rank
        for name in self._own:
            whole = self._whole(name)
            if self.mesh.world_rank == link.leaders[stage]:
                link.send(stage, whole.to(self.mesh.device).contiguous())

    def _whole(self, name: str) -> Tensor:
        own = self._own[name].detach()
        if not isinstance(own, DTensor):
            return own
        if own.numel() * own.element_size() > _PIECEWISE_BYTES and own.placements == (Shard(0),):
            return _gather_rows(own)
        return own.full_tensor()

    def collect(self) -> dict[str, Tensor]:
        """All of them at once, as copies on the CPU."""
        return {name: whole.to("cpu", copy=True) for name, whole in self.items()}

    def drain(self) -> None:
        """Take part without reading."""
        for _, whole in self.items():
            del whole  # else it would still be here while the next one comes


def _gather_rows(own: DTensor) -> Tensor:
    """`own.full_tensor()` without the second copy that an all-gather may need: each shard is sent to its place."""
    group, mine = own.device_mesh.get_group(), own.to_local()
    whole = torch.empty(own.shape, dtype=own.dtype, device=mine.device)
    for rank, rows in enumerate(whole.split(-(-len(whole) // group.size()))):
        if rank == group.rank():
            rows.copy_(mine)
        dist.broadcast(rows, group_src=rank, group=group)
    return whole


class IncomingStream(WeightStream):
    """The same on a rank that serves only: what the first ranks of the stages `send`. Can be read once.

    after: the stream that is sent before this one, and must have been read to its end.
    """

    def __init__(self, headers: Headers, link: Link, device: torch.device, *, after: IncomingStream | None = None):
        self._headers, self.shapes = headers, _shapes(headers)
        self._left = self._receive(link, device, after)
        self.finished = False

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Those that have not been read yet."""
        return self._left

    def _receive(self, link: Link, device: torch.device, after: IncomingStream | None) -> Iterator[tuple[str, Tensor]]:
        if after is not None and not after.finished:
            raise RuntimeError("weights are read in another order than they are sent: the policy's come first")
        for stage, header in enumerate(self._headers):
            for name, shape, dtype in header:
                whole = torch.empty(shape, dtype=dtype, device=device)
                link.receive(stage, whole)
                yield name, whole
                del whole
        self.finished = True


def _shapes(headers: Headers) -> dict[str, torch.Size]:
    return {name: shape for part in headers for name, shape, _ in part}
