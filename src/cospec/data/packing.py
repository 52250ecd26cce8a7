"""Documents into packed rows: one row is one microbatch.

All ranks plan the same rows from the same documents, and every data-parallel rank gets
equally many, so that all run the same collectives; a rank short of rows gets a padding
row that supervises nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cospec.layout import PackedLayout
from cospec.records import Batch, Document


def pack(
    documents: Sequence[Document],
    row_tokens: int,
    *,
    cp_size: int = 1,
    dp_size: int = 1,
    dp_rank: int = 0,
    cp_rank: int = 0,
    equal_rows: bool = False,
    min_rows: int = 1,
) -> list[Batch]:
    """The rows of one rank, each as its context-parallel shard.

    Row r belongs to data-parallel rank `r % dp_size`. Within a row documents keep their
    order; which row a document goes to depends on the lengths alone (see `plan_rows`).

    Args:
        documents: all documents of the step, the same list on every rank.
        row_tokens: capacity of a row in padded tokens, rounded down to a multiple of
            `2 * cp_size`; a document takes a multiple of `2 * cp_size`.
        equal_rows: fill every row up to the capacity (a pipeline needs equal
            microbatches). Otherwise rows end with their last document.
        min_rows: rows for each data-parallel rank, at least.

    Raises:
        ValueError: a document longer than a row, or sizes and ranks out of range.
    """
    for name, rank, size in (("dp_rank", dp_rank, dp_size), ("cp_rank", cp_rank, cp_size)):
        if not 0 <= rank < size:
            raise ValueError(f"{name}={rank} must be in 0..{size - 1}")
    lengths = [document.input_ids.numel() for document in documents]
    rows = plan(lengths, row_tokens, cp_size=cp_size, dp_size=dp_size, min_rows=min_rows)
    capacity = row_tokens // (2 * cp_size) * (2 * cp_size)
    pad_to = capacity if equal_rows else None
    return [make_batch([documents[i] for i in row], cp_size, cp_rank, pad_to) for row in rows[dp_rank::dp_size]]


def plan(
    lengths: Sequence[int], row_tokens: int, *, cp_size: int = 1, dp_size: int = 1, min_rows: int = 1
) -> list[list[int]]:
    """The rows that `pack` makes of documents of these lengths, as indices; row r is for dp rank `r % dp_size`.

    Raises ValueError: a document longer than a row, or sizes out of range.
    """
    for name, value in (("cp_size", cp_size), ("dp_size", dp_size), ("min_rows", min_rows)):
        if value < 1:
            raise ValueError(f"{name}={value} must be >= 1")
    step = 2 * cp_size
    capacity = row_tokens // step * step
    if capacity < 1:
        raise ValueError(f"row_tokens={row_tokens} must be >= 2 * cp_size = {step}")
    sizes = [-(-length // step) * step for length in lengths]
    for i, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
        if size > capacity:
            raise ValueError(
                f"document {i} has {length} tokens ({size} padded), more than a row: row_tokens={row_tokens}"
            )
    return plan_rows(sizes, capacity, multiple=dp_size, min_rows=min_rows * dp_size)


def plan_rows(sizes: Sequence[int], capacity: int, *, multiple: int = 1, min_rows: int = 1) -> list[list[int]]:
    """Documents of each row; the number of rows is a multiple of `multiple`, >= `min_rows`.

    First-fit decreasing says how many rows are needed. They are then filled anew, the
    longest document first and always into the emptiest row: ranks wait for each other
    after every microbatch, so even rows are faster than full ones. Should that not fit,
    the first plan stands. Rows are sorted by their first document, empty ones last.
    """
    longest_first = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    rows = _first_fit(sizes, longest_first, capacity)
    count = max(len(rows), min_rows)
    count = -(-count // multiple) * multiple
    rows = _even(sizes, longest_first, capacity, count) or rows + [[] for _ in range(count - len(rows))]
    return sorted((sorted(row) for row in rows), key=lambda row: row[0] if row else len(sizes))


def _first_fit(sizes: Sequence[int], order: Sequence[int], capacity: int) -> list[list[int]]:
    rows: list[list[int]] = []
    free: list[int] = []
    for i in order:
        r = next((r for r, room in enumerate(free) if sizes[i] <= room), len(rows))
        if r == len(rows):
            rows.append([])
            free.append(capacity)
        rows[r].append(i)
        free[r] -= sizes[i]
    return rows


def _even(sizes: Sequence[int], order: Sequence[int], capacity: int, count: int) -> list[list[int]] | None:
    rows: list[list[int]] = [[] for _ in range(count)]
    used = [0] * count
    for i in order:
        r = min(range(count), key=used.__getitem__)
        if used[r] + sizes[i] > capacity:
            return None
        rows[r].append(i)
        used[r] += sizes[i]
    return rows


def make_batch(documents: Sequence[Document], cp_size: int = 1, cp_rank: int = 0, pad_to: int | None = None) -> Batch:
    """One packed row as `cp_rank` holds it; no documents make a row that supervises nothing.

    The first token of a document has nobody to predict it: its mask is cleared.
    """
    if not documents:
        nothing = torch.zeros(1, dtype=torch.int64)
        documents = [Document(nothing, nothing.bool())]
    layout = PackedLayout.from_lengths([d.input_ids.numel() for d in documents], cp_size, pad_to)

    def shard(parts: list[Tensor]) -> Tensor:
        return layout.shard(torch.cat(parts), cp_rank)

    masks = [d.loss_mask.bool().clone() for d in documents]
    for mask in masks:
        mask[0] = False
    return Batch(
        layout=layout,
        cp_rank=cp_rank,
        input_ids=shard([d.input_ids.long() for d in documents]),
        positions=layout.positions(cp_rank),
        loss_mask=shard(masks),
        advantages=shard([torch.full(d.input_ids.shape, float(d.advantage)) for d in documents]),
        rollout_logp=shard([_rollout_logp(d) for d in documents]),
    )


def _rollout_logp(document: Document) -> Tensor:
    logp = document.rollout_logp
    if logp is None:
        return torch.zeros(document.input_ids.shape)
    if logp.shape != document.input_ids.shape:
        raise ValueError(
            f"Document.rollout_logp has shape {tuple(logp.shape)}, input_ids has {tuple(document.input_ids.shape)}"
        )
    return logp.float()
