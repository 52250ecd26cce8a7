"""Next-token shifts inside documents, across context-parallel shards.

A rank receives, in one exchange, the few rows that follow its chunks (the halo). Who needs
what follows from the layout alone, so both sides compute it without talking.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from cospec.layout import PackedLayout
from cospec.ops.agree import check_together
from cospec.ops.dispatch import takes_dtensors
from cospec.ops.wire import carried


def with_halo(x: Tensor, layout: PackedLayout, extent: int, *, cp_group: dist.ProcessGroup | None = None) -> Tensor:
    """The local rows of `x`, then the rows of other ranks that lie up to `extent` after them.

    Shapes:   x [T_local, ...] of any dtype -> [T_local + halo, ...]; x itself when cp_size is 1.
    Sharding: every rank of the group calls together; one exchange. Differentiable: the gradient
              of a received row returns to its owner.

    Raises ValueError when `x` or the group does not fit the layout, on every rank of the group
    (see ops.agree), or `extent` is negative.
    """
    _check(layout, extent)

    def check() -> None:
        group_size = 1 if cp_group is None else dist.get_world_size(cp_group)
        if group_size != layout.cp_size:
            raise ValueError(f"cp_group has {group_size} ranks, the layout has cp_size={layout.cp_size}")
        if x.shape[0] != layout.num_local_rows:
            raise ValueError(f"x has {x.shape[0]} rows, the layout has {layout.num_local_rows} on each rank")

    same = f"x [T, {', '.join(str(n) for n in x.shape[1:])}] {x.dtype}"
    check_together(("with_halo", extent), layout, cp_group, check, same)
    if layout.cp_size == 1 or extent == 0:
        return x
    if x.dtype == torch.bool:  # backends do not send bool
        return with_halo(x.to(torch.uint8), layout, extent, cp_group=cp_group).to(torch.bool)
    return _Halo.apply(x, _exchange(layout, dist.get_rank(cp_group), extent), cp_group)


def halo_index(layout: PackedLayout, rank: int, by: int, extent: int) -> Tensor:
    """int64 [T_local]: the row of `with_halo(x, layout, extent)` that holds the token `by` later.

    -1 where the document ends before it, and on padding and filler rows. `by` may be 0..extent.
    """
    _check(layout, extent)
    if not 0 <= by <= extent:
        raise ValueError(f"by={by} must be 0..extent, extent={extent}")
    return _halo_index(layout, rank, by, extent)


@takes_dtensors
def shift(
    x: Tensor, layout: PackedLayout, by: int, *, cp_group: dist.ProcessGroup | None = None, fill: float | int = 0
) -> Tensor:
    """Row t becomes the row of the token `by` later in its document, `fill` where there is none.

    Shapes: x [T_local, ...] -> [T_local, ...]. Differentiable. See `with_halo` for errors.
    """
    rank = 0 if cp_group is None else dist.get_rank(cp_group)
    rows = with_halo(x, layout, by, cp_group=cp_group)
    index = halo_index(layout, rank, by, by).to(x.device)
    missing = (index < 0).view(-1, *[1] * (x.ndim - 1))
    return rows.index_select(0, index.clamp(min=0)).masked_fill(missing, fill)


@dataclass(frozen=True)
class _Exchange:
    """Local rows to send, grouped by receiving rank, and how many rows come and go per rank."""

    send_rows: Tensor
    send_counts: list[int]
    receive_counts: list[int]


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, exchange: _Exchange, group: dist.ProcessGroup) -> Tensor:
        ctx.exchange, ctx.group, ctx.num_rows = exchange, group, x.shape[0]
        outgoing = carried(x.index_select(0, exchange.send_rows.to(x.device)), group)
        halo = outgoing.new_empty(sum(exchange.receive_counts), *x.shape[1:])
        dist.all_to_all_single(halo, outgoing, exchange.receive_counts, exchange.send_counts, group=group)
        return torch.cat((x, halo.to(x.device)))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        exchange = ctx.exchange
        halo = carried(grad[ctx.num_rows :].contiguous(), ctx.group)
        returned = halo.new_empty(len(exchange.send_rows), *grad.shape[1:])
        dist.all_to_all_single(returned, halo, exchange.send_counts, exchange.receive_counts, group=ctx.group)
        local = grad[: ctx.num_rows].clone()
        local.index_add_(0, exchange.send_rows.to(grad.device), returned.to(grad.device))
        return local, None, None


def _check(layout: PackedLayout, extent: int) -> None:
    if extent < 0:
        raise ValueError(f"extent={extent} must be >= 0 (shifts look ahead)")


@lru_cache(maxsize=32)
def _targets(layout: PackedLayout, rank: int, by: int) -> Tensor:
    """int64 [T_local]: padded global row of the token `by` later, -1 where there is none."""
    rows, position, document = layout.local_index(rank), layout.positions(rank), layout.document(rank)
    length = torch.tensor(layout.lengths)[document.clamp(min=0)]
    return torch.where((document >= 0) & (position + by < length), rows + by, -1)


@lru_cache(maxsize=32)
def _owner_and_row(layout: PackedLayout) -> tuple[Tensor, Tensor]:
    """int64 [num_rows] each: the rank that owns a padded global row, and its local row there."""
    owner = torch.empty(layout.num_rows, dtype=torch.int64)
    row = torch.empty(layout.num_rows, dtype=torch.int64)
    for rank in range(layout.cp_size):
        index = layout.local_index(rank)
        owner[index] = rank
        row[index] = torch.arange(len(index))
    return owner, row


@lru_cache(maxsize=32)
def _halo_rows(layout: PackedLayout, rank: int, extent: int) -> Tensor:
    """int64 [halo]: padded global rows that `rank` receives, by owner and then by row."""
    wanted = torch.cat([_targets(layout, rank, by) for by in range(1, extent + 1)]).unique()
    owner, _ = _owner_and_row(layout)
    wanted = wanted[wanted >= 0]
    wanted = wanted[owner[wanted] != rank]
    return wanted[torch.argsort(owner[wanted], stable=True)]


@lru_cache(maxsize=32)
def _exchange(layout: PackedLayout, rank: int, extent: int) -> _Exchange:
    owner, row = _owner_and_row(layout)
    counts = torch.bincount(owner[_halo_rows(layout, rank, extent)], minlength=layout.cp_size)
    send = []
    for receiver in range(layout.cp_size):
        rows = _halo_rows(layout, receiver, extent)
        send.append(row[rows[owner[rows] == rank]])
    return _Exchange(torch.cat(send), [len(rows) for rows in send], counts.tolist())


@lru_cache(maxsize=32)
def _halo_index(layout: PackedLayout, rank: int, by: int, extent: int) -> Tensor:
    target = _targets(layout, rank, by)
    place = torch.full((layout.num_rows,), -1, dtype=torch.int64)
    local = layout.local_index(rank)
    place[local] = torch.arange(len(local))
    if layout.cp_size > 1 and extent > 0:
        halo = _halo_rows(layout, rank, extent)
        place[halo] = torch.arange(len(halo)) + len(local)
    return torch.where(target >= 0, place[target.clamp(min=0)], -1)
