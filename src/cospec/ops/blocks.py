"""Which query rows see which key rows: attention between two ranks' shards, cut into tiles.

Blocks name real tokens only. Padding and filler rows are never read, so garbage in them
(NaN too) reaches nobody, and no copy is spent on zeroing them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

    @property
    def rows(self) -> range:
        return range(self.start, self.start + self.size)


@dataclass(frozen=True)
class Tile:
    """Documents of similar length as one padded batch.

    q_rows, k_rows: a slice (one document, no copy) or int64 [size * q_len] / [size * k_len]
    row numbers; a shorter document repeats its last row on the right, which a causal mask
    hides from its real queries. q_take, k_take: int64, the places of the real rows in that
    batch, None when all are real; q_put, k_put: the rows that they stand for. q_pad: the
    places of the repeats, None without. q_position, k_position: int64 [size, len].
    """

    size: int
    q_len: int
    k_len: int
    q_rows: slice | Tensor
    k_rows: slice | Tensor
    q_take: Tensor | None
    k_take: Tensor | None
    q_put: slice | Tensor
    k_put: slice | Tensor
    q_pad: Tensor | None
    q_position: Tensor
    k_position: Tensor


@dataclass(frozen=True)
class Packed:
    """The real rows of all documents one after another, as varlen kernels take them.

    q_rows, k_rows: slice or int64 row numbers; cu_q, cu_k: int32 [documents + 1].
    """

    q_rows: slice | Tensor
    k_rows: slice | Tensor
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


class Block:
    """One attention between the rows `q_range` of a shard and the rows `k_range` of another.

    documents: (query pieces, key pieces) of each document, rows counted from the start of the
    ranges. causal: row i of a document's queries sees its keys 0..i (queries and keys are the
    same tokens then), otherwise all of its keys.
    """

    def __init__(
        self,
        documents: Sequence[tuple[tuple[Piece, ...], tuple[Piece, ...]]],
        *,
        causal: bool,
        q_range: slice,
        k_range: slice,
    ):
        self.documents = tuple(documents)
        self.causal = causal
        self.q_range = q_range
        self.k_range = k_range
        self.covers_q = _covered(documents, 0) == q_range.stop - q_range.start
        self.covers_k = _covered(documents, 1) == k_range.stop - k_range.start
        self._tiles: dict[torch.device, list[Tile]] = {}
        self._packed: dict[torch.device, Packed] = {}

    def tiles(self, device: torch.device) -> list[Tile]:
        if device not in self._tiles:
            self._tiles[device] = [_tile(bucket, device) for bucket in _buckets(self)]
        return self._tiles[device]

    def packed(self, device: torch.device) -> Packed:
        if device not in self._packed:
            q_pieces, k_pieces = [d[0] for d in self.documents], [d[1] for d in self.documents]
            q_sizes, k_sizes = [_size(p) for p in q_pieces], [_size(p) for p in k_pieces]
            self._packed[device] = Packed(
                q_rows=_rows(chain(*q_pieces), device),
                k_rows=_rows(chain(*k_pieces), device),
                cu_q=_offsets(q_sizes, device),
                cu_k=_offsets(k_sizes, device),
                max_q=max(q_sizes, default=0),
                max_k=max(k_sizes, default=0),
            )
        return self._packed[device]


@lru_cache(maxsize=128)
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


def _buckets(block: Block) -> Iterator[list[tuple[tuple[Piece, ...], tuple[Piece, ...]]]]:
    """Documents to compute together: padding may cost an eighth (or 8 rows), keys only where causal hides it."""
    order = sorted(block.documents, key=lambda d: (_size(d[1]), _size(d[0])), reverse=True)
    bucket: list[tuple[tuple[Piece, ...], tuple[Piece, ...]]] = []
    for document in order:
        if bucket:
            longest, size = _size(bucket[0][1]), _size(document[1])
            least = longest - max(8, longest // 8) if block.causal else longest
            if longest > LONG_DOCUMENT or size < least:
                yield bucket
                bucket = []
        bucket.append(document)
    if bucket:
        yield bucket


def _tile(bucket: list[tuple[tuple[Piece, ...], tuple[Piece, ...]]], device: torch.device) -> Tile:
    q_rows, q_take, q_put, q_pad, q_position, q_len = _padded([d[0] for d in bucket], device)
    k_rows, k_take, k_put, _, k_position, k_len = _padded([d[1] for d in bucket], device)
    return Tile(len(bucket), q_len, k_len, q_rows, k_rows, q_take, k_take, q_put, k_put, q_pad, q_position, k_position)


def _padded(documents: list[tuple[Piece, ...]], device: torch.device):
    sizes = [_size(pieces) for pieces in documents]
    longest = max(sizes)
    put = _rows(chain(*documents), device)
    size_B1 = torch.tensor(sizes, device=device).unsqueeze(1)
    place_BL = torch.arange(longest, device=device).expand(len(sizes), longest)
    real = place_BL < size_B1
    position = torch.cat([torch.arange(p.position, p.position + p.size) for p in chain(*documents)]).to(device)
    real_rows = torch.arange(put.start, put.stop, device=device) if isinstance(put, slice) else put
    first_B1 = torch.cumsum(size_B1, 0) - size_B1
    source = first_B1 + torch.minimum(place_BL, size_B1 - 1)
    if min(sizes) == longest:
        return put, None, put, None, position[source], longest
    real = real.flatten()
    take, pad = torch.nonzero(real).squeeze(1), torch.nonzero(~real).squeeze(1)
    return real_rows[source.flatten()], take, put, pad, position[source], longest


def _rows(pieces: Iterator[Piece], device: torch.device) -> slice | Tensor:
    """The rows of the pieces in order: a slice when they are consecutive."""
    pieces = list(pieces)
    if not pieces:
        return slice(0, 0)
    if all(a.start + a.size == b.start for a, b in zip(pieces, pieces[1:], strict=False)):
        return slice(pieces[0].start, pieces[-1].start + pieces[-1].size)
    return torch.cat([torch.arange(p.start, p.start + p.size) for p in pieces]).to(device)


def _offsets(sizes: list[int], device: torch.device) -> Tensor:
    return torch.cumsum(torch.tensor([0, *sizes]), 0).to(device=device, dtype=torch.int32)


def _size(pieces: Sequence[Piece]) -> int:
    return sum(p.size for p in pieces)


def _covered(documents: Sequence[tuple[tuple[Piece, ...], tuple[Piece, ...]]], side: int) -> int:
    return sum(_size(d[side]) for d in documents)
