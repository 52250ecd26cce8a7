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
    """Rows of a tensor in another order, some repeated as padding, some left out; and the way back.

    rows: a slice where they are consecutive (no copy is made then), else int64 row numbers.
    repeats: int64 places in `rows` that only fill up a batch, or None.
    """

    def __init__(self, rows: Tensor, repeats: Tensor, num_rows: int, device: torch.device):
        self.num_rows = num_rows
        first = int(rows[0])
        self.repeats = repeats.to(device) if len(repeats) else None
        if self.repeats is None and torch.equal(rows, torch.arange(first, first + len(rows))):
            self.rows: slice | Tensor = slice(first, first + len(rows))
            return
        self.rows = rows.to(device)
        place = torch.full((num_rows,), -1)
        real = torch.ones(len(rows), dtype=torch.bool)
        real[repeats] = False
        place[rows[real]] = torch.nonzero(real).squeeze(1)
        missing = torch.nonzero(place < 0).squeeze(1)
        self._place = place.clamp(min=0).to(device)
        self._missing = missing.to(device) if len(missing) else None

    def take(self, x: Tensor, *, clear_repeats: bool = False) -> Tensor:
        """The mapped rows of `x`; `clear_repeats` sets the repeats to 0."""
        if isinstance(self.rows, slice):
            return x[self.rows]
        x = x.index_select(0, self.rows)
        if clear_repeats and self.repeats is not None:
            x.index_fill_(0, self.repeats, 0)
        return x

    def put(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """The inverse of `take`: repeats are dropped, rows that were left out hold `fill`."""
        if not isinstance(self.rows, slice):
            x = x.index_select(0, self._place)
            return x if self._missing is None else x.index_fill_(0, self._missing, fill)
        if len(x) == self.num_rows:
            return x
        total = x.new_full((self.num_rows, *x.shape[1:]), fill)
        total[self.rows] = x
        return total


@dataclass(frozen=True)
class Tile:
    """Documents of similar length as one padded batch of `size`.

    The mapped query rows q_start... hold size x q_len rows, the mapped key rows likewise. A
    shorter document repeats its last row on the right, which a causal mask hides from its
    real queries. q_position, k_position: int64 [size, len] in the document.
    """

    size: int
    q_start: int
    q_len: int
    k_start: int
    k_len: int
    q_position: Tensor
    k_position: Tensor

    def queries(self, x: Tensor) -> Tensor:
        """[rows, heads, *] of the mapped query rows -> this tile's [size, heads, q_len, *]."""
        return _batch(x, self.q_start, self.size, self.q_len)

    def keys(self, x: Tensor) -> Tensor:
        """[rows, heads, *] of the mapped key rows -> this tile's [size, heads, k_len, *]."""
        return _batch(x, self.k_start, self.size, self.k_len)


@dataclass(frozen=True)
class Tiled:
    """A block as padded batches, one after another."""

    q_map: RowMap
    k_map: RowMap
    tiles: tuple[Tile, ...]


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
    sides = []
    for side, span in ((0, block.q_range), (1, block.k_range)):
        padded = [_padded([document[side] for document in bucket]) for bucket in buckets]
        rows, positions, repeats = (torch.cat([x[i].flatten() for x in padded]) for i in range(3))
        repeats = torch.nonzero(repeats).squeeze(1)
        sides.append((RowMap(rows, repeats, span.stop - span.start, device), padded))
    tiles, q_start, k_start = [], 0, 0
    (q_map, q_padded), (k_map, k_padded) = sides
    for (_, q_position, _), (_, k_position, _) in zip(q_padded, k_padded, strict=True):
        (size, q_len), k_len = q_position.shape, k_position.shape[1]
        tiles.append(Tile(size, q_start, q_len, k_start, k_len, q_position.to(device), k_position.to(device)))
        q_start, k_start = q_start + size * q_len, k_start + size * k_len
    return Tiled(q_map, k_map, tuple(tiles))


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
        maps.append(RowMap(rows, torch.empty(0, dtype=torch.int64), span.stop - span.start, device))
        offsets.append(torch.cumsum(torch.tensor([0, *sizes]), 0).to(device=device, dtype=torch.int32))
        longest.append(max(sizes))
    return Packed(*maps, *offsets, *longest)


def _batch(x: Tensor, start: int, size: int, length: int) -> Tensor:
    return x[start : start + size * length].unflatten(0, (size, length)).transpose(1, 2)


def _size(pieces: tuple[Piece, ...]) -> int:
    return sum(p.size for p in pieces)
