"""How documents lie in a packed row, and which rows each context-parallel rank owns.

Every other module asks the layout instead of doing index arithmetic of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import torch
from torch import Tensor


class PackedLayout:
    """Documents packed one after another into a row that `cp_size` ranks share.

    Each document is padded to a multiple of `2 * cp_size` rows and cut into
    `2 * cp_size` chunks; rank r owns chunks r and `2 * cp_size - 1 - r` of every
    document (zigzag), which gives every rank the same share of causal attention.

    Local rows are half-major for `cp_size > 1`: the early chunks of all documents,
    then their late chunks, so that each half of a document's shard, and each half of
    a whole shard, is one contiguous slice. With `cp_size == 1` they are in plain
    packed order.

    Args:
        lengths: tokens of each document, all >= 1.
        cp_size: ranks that share the row.
        pad_to: capacity of the row in padded rows, a multiple of `2 * cp_size`;
            the rows after the last document are filler and belong to nobody.

    Raises:
        ValueError: no document, a length < 1, `cp_size` < 1, or a `pad_to` that is
            too small or no multiple of `2 * cp_size`.
    """

    def __init__(self, lengths: Sequence[int], cp_size: int = 1, pad_to: int | None = None):
        self.lengths = tuple(int(n) for n in lengths)
        self.cp_size = int(cp_size)
        if self.cp_size < 1:
            raise ValueError(f"cp_size must be >= 1, got {cp_size}")
        if not self.lengths:
            raise ValueError("lengths must name at least one document, got []")
        for i, n in enumerate(self.lengths):
            if n < 1:
                raise ValueError(f"lengths[{i}] must be >= 1, got {n}")
        self.num_chunks = 2 * self.cp_size
        padded = [-(-n // self.num_chunks) * self.num_chunks for n in self.lengths]
        ends = [0]
        for n in padded:
            ends.append(ends[-1] + n)
        self.doc_ends = tuple(ends)
        self.num_rows = ends[-1] if pad_to is None else int(pad_to)
        if self.num_rows < ends[-1]:
            raise ValueError(f"pad_to={pad_to} is too small: the documents take {ends[-1]} padded rows")
        if self.num_rows % self.num_chunks:
            raise ValueError(f"pad_to={pad_to} must be a multiple of 2 * cp_size = {self.num_chunks}")
        self.agreed: set = set()
        """What the ranks that share the row have compared already, see ops.agree."""

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], cp_size: int = 1, pad_to: int | None = None) -> PackedLayout:
        return cls(lengths, cp_size, pad_to)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackedLayout) and (self.lengths, self.cp_size, self.num_rows) == (
            other.lengths,
            other.cp_size,
            other.num_rows,
        )

    def __hash__(self) -> int:
        return hash((self.lengths, self.cp_size, self.num_rows))

    def __repr__(self) -> str:
        return f"PackedLayout({len(self.lengths)} documents, {self.num_rows} rows, cp_size={self.cp_size})"

    @property
    def num_local_rows(self) -> int:
        """Rows that each rank owns, padding and filler included."""
        return self.num_rows // self.cp_size

    @property
    def num_tokens(self) -> int:
        """Real tokens of all documents."""
        return sum(self.lengths)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """int32 [docs + 1]: where each document starts and the last one ends, in padded rows."""
        return torch.tensor(self.doc_ends, dtype=torch.int32)

    @cached_property
    def local_cu_seqlens(self) -> Tensor:
        """int32 [docs + 1]: the same, counted in one rank's rows (offsets when `cp_size == 1`)."""
        return self.cu_seqlens // self.cp_size

    @cached_property
    def half_cu_seqlens(self) -> Tensor:
        """int32 [docs + 1]: document offsets inside either half of a shard (`cp_size > 1`)."""
        return self.cu_seqlens // self.num_chunks

    def local_index(self, rank: int) -> Tensor:
        """int64 [T_local]: the padded global row of each local row of `rank`."""
        self._check_rank(rank)
        return _local_index(self, rank)

    def valid(self, rank: int) -> Tensor:
        """bool [T_local]: False on padding and filler."""
        return self.source_index(rank) >= 0

    def positions(self, rank: int) -> Tensor:
        """int64 [T_local]: position inside the document; 0 on filler."""
        rows = self.local_index(rank)
        return self._position_of_row[rows]

    def document(self, rank: int) -> Tensor:
        """int64 [T_local]: index of the document of each row (its padding too), -1 on filler."""
        return self._document_of_row[self.local_index(rank)]

    def source_index(self, rank: int) -> Tensor:
        """int64 [T_local]: unpadded packed row of each local row, -1 on padding and filler."""
        return self._source_of_row[self.local_index(rank)]

    def shard(self, x: Tensor, rank: int, dim: int = 0, fill: float | int | bool = 0) -> Tensor:
        """Rows of `rank` out of unpadded packed rows; padding and filler hold `fill`.

        Raises ValueError when `x` does not have `num_tokens` rows in `dim`.
        """
        if x.shape[dim] != self.num_tokens:
            raise ValueError(f"x has {x.shape[dim]} rows in dim {dim}, the layout has {self.num_tokens} tokens")
        source = self.source_index(rank).to(x.device)
        out = x.index_select(dim, source.clamp(min=0))
        shape = [1] * x.ndim
        shape[dim] = -1
        return out.masked_fill((source < 0).view(shape), fill)

    def unshard(self, shards: Sequence[Tensor], dim: int = 0) -> Tensor:
        """The unpadded packed rows out of the shards of all ranks, in rank order."""
        if len(shards) != self.cp_size:
            raise ValueError(f"got {len(shards)} shards for cp_size={self.cp_size}")
        source = torch.cat([self.source_index(r) for r in range(self.cp_size)])
        keep = torch.nonzero(source >= 0).squeeze(1)
        order = torch.empty(self.num_tokens, dtype=torch.int64)
        order[source[keep]] = keep
        joined = torch.cat(list(shards), dim=dim)
        return joined.index_select(dim, order.to(joined.device))

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.cp_size:
            raise ValueError(f"rank={rank} is outside cp_size={self.cp_size}")

    @cached_property
    def _document_of_row(self) -> Tensor:
        sizes = [b - a for a, b in zip(self.doc_ends, self.doc_ends[1:], strict=False)]
        filler = self.num_rows - self.doc_ends[-1]
        ids = torch.arange(len(sizes) + 1)
        ids[-1] = -1
        return ids.repeat_interleave(torch.tensor([*sizes, filler]))

    @cached_property
    def _position_of_row(self) -> Tensor:
        document = self._document_of_row
        start = torch.tensor(self.doc_ends)[document.clamp(min=0)]
        return torch.where(document >= 0, torch.arange(self.num_rows) - start, 0)

    @cached_property
    def _source_of_row(self) -> Tensor:
        document = self._document_of_row.clamp(min=0)
        lengths = torch.tensor(self.lengths)
        starts = torch.cumsum(lengths, 0) - lengths
        position = self._position_of_row
        real = (self._document_of_row >= 0) & (position < lengths[document])
        return torch.where(real, starts[document] + position, -1)


@lru_cache(maxsize=32)
def _local_index(layout: PackedLayout, rank: int) -> Tensor:
    if layout.cp_size == 1:
        return torch.arange(layout.num_rows)
    bounds = [*layout.doc_ends, layout.num_rows]  # the filler is cut like a document
    halves = []
    for chunk in (rank, layout.num_chunks - 1 - rank):
        for start, end in zip(bounds, bounds[1:], strict=False):
            size = (end - start) // layout.num_chunks
            halves.append(torch.arange(start + chunk * size, start + (chunk + 1) * size))
    return torch.cat(halves)
