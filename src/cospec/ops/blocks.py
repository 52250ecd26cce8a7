"""Which query rows see which key rows: attention between two ranks' shards, cut into tiles.

Blocks name real tokens only. Padding and filler rows are never read, so garbage in them
(NaN too) reaches nobody, and no copy is spent on zeroing them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import torch
from torch import Tensor

from cospec.layout import PackedLayout

LONG_DOCUMENT = 512
"""Rows above which a document is a tile of its own: padding it would cost more than a call."""


@dataclass(frozen=True)
class Piece:
    """`size` consecutive rows from `start`, which hold positions `position`... of one document."""

    start: int
    size: int
    position: int

    def rows_and_positions(self) -> tuple[Tensor, Tensor]:
        steps = torch.arange(self.size)
        return steps + self.start, steps + self.position


Document = tuple[tuple[Piece, ...], tuple[Piece, ...]]
"""The query pieces and the key pieces of one document."""


class RowMap:
    """Some rows of a tensor, in another order; and the way back.

    rows: a slice where they are consecutive (no copy is made then), else int64 row numbers.
    """

    def __init__(self, rows: Tensor, num_rows: int, device: torch.device):
        self.num_rows = num_rows
        self.rows = _rows_or_slice(rows, device)
        missing = _missing(rows, num_rows)
        self._missing = missing.to(device) if len(missing) else None

    def take(self, x: Tensor) -> Tensor:
        """The mapped rows of `x`."""
        return x[self.rows] if isinstance(self.rows, slice) else x.index_select(0, self.rows)

    def put(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """The inverse of `take`: rows that were left out hold `fill`."""
        if isinstance(self.rows, slice) and len(x) == self.num_rows:
            return x
        total = x.new_empty(self.num_rows, *x.shape[1:])
        if self._missing is not None:
            total.index_fill_(0, self._missing, fill)
        if isinstance(self.rows, slice):
            total[self.rows] = x
        else:
            total.index_copy_(0, self.rows, x)
        return total


class TileRows:
    """The query rows, or the key rows, of one tile: `size` documents of `length` rows each.

    A shorter document repeats its last row on the right, which a causal mask hides from its
    real queries.
    rows: a slice where they are consecutive (nothing is copied then), else int64 [size * length].
    repeats: int64 places in `rows` that only fill up, or None. position: int64 [size, length].
    """

    def __init__(self, rows: Tensor, position: Tensor, repeated: Tensor, device: torch.device):
        self.size, self.length = rows.shape
        self.rows: slice | Tensor = _rows_or_slice(rows.flatten(), device)
        self.position = position.to(device)
        places = torch.nonzero(repeated.flatten()).squeeze(1)
        self.repeats = places.to(device) if len(places) else None
        self._real = torch.nonzero(~repeated.flatten()).squeeze(1).to(device)
        self._real_rows = rows.flatten().to(device)[self._real]

    def take(self, x: Tensor, *, clear_repeats: bool = False) -> Tensor:
        """[rows, heads, *] -> [size, heads, length, *]; `clear_repeats` sets the repeats to 0."""
        if isinstance(self.rows, slice):
            x = x[self.rows]
        else:
            x = x.index_select(0, self.rows)
            if clear_repeats and self.repeats is not None:
                x.index_fill_(0, self.repeats, 0)
        return x.unflatten(0, (self.size, self.length)).transpose(1, 2)

    def put(self, total: Tensor, x: Tensor) -> None:
        """Write `x`, [size, heads, length, *], to its rows of `total`; repeats are dropped."""
        x = x.transpose(1, 2)
        if isinstance(self.rows, slice):
            total[self.rows].unflatten(0, (self.size, self.length)).copy_(x)
            return
        x = x.flatten(0, 1)
        total.index_copy_(0, self._real_rows, x if self.repeats is None else x.index_select(0, self._real))


@dataclass(frozen=True)
class Tile:
    """Documents of similar length as one padded batch."""

    q: TileRows
    k: TileRows


class Sink:
    """Collects a result of all tiles, one after another; a lone tile over all rows is not copied."""

    def __init__(self, num_rows: int, missing: Tensor | None, fill: float = 0.0):
        self.num_rows, self.missing, self.fill = num_rows, missing, fill
        self.total: Tensor | None = None

    def put(self, rows: TileRows, x: Tensor) -> None:
        if isinstance(rows.rows, slice) and rows.size * rows.length == self.num_rows:
            self.total = x.transpose(1, 2).flatten(0, 1)
            return
        if self.total is None:
            self.total = x.new_empty(self.num_rows, x.shape[1], *x.shape[3:])
            if self.missing is not None:
                self.total.index_fill_(0, self.missing, self.fill)
        rows.put(self.total, x)

    def result(self) -> Tensor:
        assert self.total is not None, "a block has a tile"
        return self.total


@dataclass(frozen=True)
class Tiled:
    """A block as padded batches; each is taken from the tensors, computed and written back on its own."""

    tiles: tuple[Tile, ...]
    q_rows: int
    k_rows: int
    q_missing: Tensor | None
    k_missing: Tensor | None
    """int64 rows that no tile names."""

    def q_sink(self, fill: float = 0.0) -> Sink:
        return Sink(self.q_rows, self.q_missing, fill)

    def k_sink(self) -> Sink:
        return Sink(self.k_rows, self.k_missing)


@dataclass(frozen=True)
class Packed:
    """A block as its real rows, document after document, as varlen kernels take them.

    cu_q, cu_k: int32 [documents + 1], where each document starts and the last one ends.
    """

    q_map: RowMap
    k_map: RowMap
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


class Block:
    """One attention between the rows `q_range` of a shard and the rows `k_range` of another.

    documents: all with at least one query; their rows are counted from the start of the ranges.
    causal: row i of a document's queries sees its keys 0..i (queries and keys are the same
    tokens then), otherwise all of its keys.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        *,
        causal: bool,
        q_range: slice,
        k_range: slice,
    ):
        self.documents = tuple(documents)
        self.causal = causal
        self.q_range = q_range
        self.k_range = k_range
        # Rows and offsets on each device; only blocks with documents are asked for them.
        self._tiled: dict[torch.device, Tiled] = {}
        self._packed: dict[torch.device, Packed] = {}

    def tiled(self, device: torch.device) -> Tiled:
        if device not in self._tiled:
            self._tiled[device] = _tile(self, device)
        return self._tiled[device]

    def packed(self, device: torch.device) -> Packed:
        if device not in self._packed:
            self._packed[device] = _pack(self, device)
        return self._packed[device]


@lru_cache(maxsize=64)
def block_between(layout: PackedLayout, rank: int, source: int) -> Block:
    """The block of `rank`'s queries against `source`'s keys.

    Zigzag: rank r owns chunk r (early) and chunk 2 * cp - 1 - r (late) of each document.
    Own keys are causal over early + late; an earlier rank shows its early chunk to all
    queries; a later rank shows both its chunks to the late queries.
    """
    half, rows = layout.num_local_rows // 2, layout.num_local_rows
    if source == rank:
        own = [(p, p) for p in (_pieces(layout, rank, d) for d in range(len(layout.lengths)))]
        return Block([d for d in own if d[0]], causal=True, q_range=slice(0, rows), k_range=slice(0, rows))
    documents = []
    for document in range(len(layout.lengths)):
        queries, keys = _pieces(layout, rank, document), _pieces(layout, source, document)
        if source < rank:
            keys = keys[:1]
        else:  # the late queries, counted from the start of the late half
            queries = tuple(Piece(p.start - half, p.size, p.position) for p in queries[1:])
        if queries:
            documents.append((queries, keys))
    if source < rank:
        return Block(documents, causal=False, q_range=slice(0, rows), k_range=slice(0, half))
    return Block(documents, causal=False, q_range=slice(half, rows), k_range=slice(0, rows))


@lru_cache(maxsize=128)
def padding_rows(layout: PackedLayout, rank: int, device: torch.device) -> Tensor | None:
    """int64: local rows that hold no token, or None when all do."""
    rows = torch.nonzero(~layout.valid(rank)).squeeze(1)
    return rows.to(device) if rows.numel() else None


def _pieces(layout: PackedLayout, rank: int, document: int) -> tuple[Piece, ...]:
    """The real rows of a document on `rank`: none, early only, or early and late."""
    start, end = layout.doc_ends[document], layout.doc_ends[document + 1]
    length = layout.lengths[document]
    if layout.cp_size == 1:
        return (Piece(start, length, 0),)
    chunk = (end - start) // layout.num_chunks
    early = start // layout.num_chunks
    late = layout.num_local_rows // 2 + early
    pieces = []
    for first_row, number in ((early, rank), (late, layout.num_chunks - 1 - rank)):
        real = min(chunk, length - number * chunk)
        if real > 0:
            pieces.append(Piece(first_row, real, number * chunk))
    return tuple(pieces)


def _buckets(block: Block) -> list[list[Document]]:
    """Documents to compute together: padding may cost an eighth (or 8 rows), keys only where causal hides it."""
    order = sorted(block.documents, key=lambda d: (_size(d[1]), _size(d[0])), reverse=True)
    buckets: list[list[Document]] = []
    for document in order:
        if buckets:
            longest, size = _size(buckets[-1][0][1]), _size(document[1])
            least = longest - max(8, longest // 8) if block.causal else longest
            if longest <= LONG_DOCUMENT and size >= least:
                buckets[-1].append(document)
                continue
        buckets.append([document])
    for bucket in buckets:  # in packed order, where rows may turn out to be consecutive
        bucket.sort(key=lambda d: d[0][0].start)
    return sorted(buckets, key=lambda bucket: bucket[0][0][0].start)


def _tile(block: Block, device: torch.device) -> Tiled:
    buckets = _buckets(block)
    sides, missing, sizes = [], [], []
    for side, span in ((0, block.q_range), (1, block.k_range)):
        padded = [_padded([document[side] for document in bucket]) for bucket in buckets]
        sides.append([TileRows(*parts, device) for parts in padded])
        sizes.append(span.stop - span.start)
        left = _missing(torch.cat([rows.flatten() for rows, _, _ in padded]), sizes[-1])
        missing.append(left.to(device) if len(left) else None)
    return Tiled(tuple(Tile(q, k) for q, k in zip(*sides, strict=True)), *sizes, *missing)


def _padded(documents: list[tuple[Piece, ...]]) -> tuple[Tensor, Tensor, Tensor]:
    """[documents, longest]: row numbers, positions, and True where a last row is repeated."""
    sizes = torch.tensor([_size(pieces) for pieces in documents]).unsqueeze(1)
    rows, positions = (torch.cat(x) for x in zip(*(p.rows_and_positions() for p in chain(*documents)), strict=True))
    place = torch.arange(int(sizes.max())).expand(len(documents), -1)
    source = torch.cumsum(sizes, 0) - sizes + torch.minimum(place, sizes - 1)
    return rows[source], positions[source], place >= sizes


def _pack(block: Block, device: torch.device) -> Packed:
    maps, offsets, longest = [], [], []
    for side, span in ((0, block.q_range), (1, block.k_range)):
        pieces = [document[side] for document in block.documents]
        sizes = [_size(p) for p in pieces]
        rows = torch.cat([p.rows_and_positions()[0] for p in chain(*pieces)])
        maps.append(RowMap(rows, span.stop - span.start, device))
        offsets.append(torch.cumsum(torch.tensor([0, *sizes]), 0).to(device=device, dtype=torch.int32))
        longest.append(max(sizes))
    return Packed(*maps, *offsets, *longest)


def _rows_or_slice(rows: Tensor, device: torch.device) -> slice | Tensor:
    first = int(rows[0])
    if torch.equal(rows, torch.arange(first, first + len(rows))):
        return slice(first, first + len(rows))
    return rows.to(device)


def _missing(rows: Tensor, num_rows: int) -> Tensor:
    """int64: which of 0..num_rows-1 are not among `rows`."""
    left = torch.ones(num_rows, dtype=torch.bool)
    left[rows] = False
    return torch.nonzero(left).squeeze(1)


def _size(pieces: tuple[Piece, ...]) -> int:
    return sum(p.size for p in pieces)
