"""Logits in tiles: buffers of bounded size, matrix products into them, a running logsumexp.

Shapes: C rows of a chunk, W columns of a tile of the vocabulary V, D model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

LOGITS_BYTES = 25 << 20
"""Size of one logits buffer. The draft loss holds two, of policy and of draft, together with the
hidden states of their rows in twice this. The more rows fit, the less often a product reads
a whole head and writes its gradient."""

SCRATCH_BYTES = 2 << 20
"""Size of the scratch of elementwise steps, and of other temporaries."""

_PRODUCT_COLUMNS = 1536
"""Columns of a product on the CPU: beyond what its caches hold, few rows run at 3/4 of the speed."""


def tiles(total: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, total)) for i in range(0, total, max(1, size))]


def product_into(out_CW: Tensor, x_CD: Tensor, weight_WD: Tensor) -> None:
    """out = x @ weight.T without rounding to a narrower dtype than out's."""
    if weight_WD.dtype == out_CW.dtype:
        size = out_CW.shape[1] if out_CW.is_cuda else _PRODUCT_COLUMNS
        for part in tiles(out_CW.shape[1], size):
            torch.mm(x_CD, weight_WD[part].T, out=out_CW[:, part])
    elif out_CW.is_cuda and weight_WD.element_size() == 2:
        if out_CW.is_contiguous():
            torch.mm(x_CD, weight_WD.T, out_dtype=out_CW.dtype, out=out_CW)
        else:
            out_CW.copy_(torch.mm(x_CD, weight_WD.T, out_dtype=out_CW.dtype))
    else:  # no such product here: widen the weight a few rows at a time
        x_CD = x_CD.to(out_CW.dtype)
        for part in _parts(weight_WD, out_CW):
            torch.mm(x_CD, weight_WD[part].to(out_CW.dtype).T, out=out_CW[:, part])


def add_product(out: Tensor, grad: Tensor, b: Tensor) -> None:
    """out += grad @ b for a float32 or float64 grad; b may be narrower."""
    if b.dtype == out.dtype:
        out.addmm_(grad, b)
    elif out.is_cuda and b.element_size() == 2:
        for part in _parts(out, out):
            out[part] += torch.mm(grad[part].to(b.dtype), b, out_dtype=out.dtype)
    else:
        for part in _parts(b, out):
            out.addmm_(grad[:, part], b[part].to(out.dtype))


def _parts(rows: Tensor, like: Tensor) -> list[slice]:
    """Blocks of rows that take at most SCRATCH_BYTES in the dtype of `like`."""
    return tiles(rows.shape[0], SCRATCH_BYTES // (rows.shape[1] * like.element_size()))


@dataclass
class Running:
    """Running logsumexp over blocks of columns; the argmax and the sum over a subset if asked for."""

    peak_C1: Tensor
    sum_C1: Tensor
    argmax_C1: Tensor | None
    subset_C1: Tensor | None

    @classmethod
    def start(cls, rows: int, like: Tensor, *, argmax: bool = False, subset: bool = False) -> Running:
        return cls(
            like.new_full((rows, 1), float("-inf")),
            like.new_zeros(rows, 1),
            torch.zeros(rows, 1, dtype=torch.int64, device=like.device) if argmax else None,
            like.new_zeros(rows, 1) if subset else None,
        )

    def add(self, logits_CW: Tensor, offset: int, scratch: Tensor, in_subset_V: Tensor | None = None) -> None:
        """Take in the columns `offset`, `offset + 1`, ... of the rows."""
        for columns, scratch_CW in blocks(logits_CW, scratch):
            block_CW, first = logits_CW[:, columns], offset + columns.start
            if self.argmax_C1 is None:
                top_C1 = block_CW.amax(1, keepdim=True)
            elif block_CW.is_cuda:
                top_C1, index_C1 = block_CW.max(1, keepdim=True)
                self.argmax_C1 = torch.where(top_C1 > self.peak_C1, index_C1 + first, self.argmax_C1)
            else:  # a maximum with its index takes ten times one without: look where there is a new one
                top_C1 = block_CW.amax(1, keepdim=True)
                better = (top_C1 > self.peak_C1).squeeze(1).nonzero().squeeze(1)
                self.argmax_C1[better] = block_CW[better].argmax(1, keepdim=True) + first
            peak_C1 = torch.maximum(top_C1, self.peak_C1)
            rescale_C1 = (self.peak_C1 - peak_C1).exp_()
            torch.sub(block_CW, peak_C1, out=scratch_CW).exp_()
            self.sum_C1 = self.sum_C1 * rescale_C1 + scratch_CW.sum(1, keepdim=True)
            if self.subset_C1 is not None and in_subset_V is not None:
                inside_W1 = in_subset_V[first : first + block_CW.shape[1]].unsqueeze(1)
                self.subset_C1 = self.subset_C1 * rescale_C1 + scratch_CW @ inside_W1
            self.peak_C1 = peak_C1

    @property
    def logsumexp_C1(self) -> Tensor:
        return self.peak_C1 + self.sum_C1.log()

    @property
    def mass_C1(self) -> Tensor:
        """Share of the probability that lies in the subset; 1 without one."""
        return torch.ones_like(self.sum_C1) if self.subset_C1 is None else self.subset_C1 / self.sum_C1


def buffer(flat: Tensor, rows: int, cols: int) -> Tensor:
    return flat[: rows * cols].view(rows, cols)


def blocks(x_CW: Tensor, scratch: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of columns that fit the scratch, each with its share of it."""
    rows = x_CW.shape[0]
    for columns in tiles(x_CW.shape[1], scratch.numel() // rows):
        yield columns, buffer(scratch, rows, columns.stop - columns.start)


@dataclass(frozen=True)
class Columns:
    """Where the logits of a draft vocabulary lie in the tiles of the policy's."""

    order_U: Tensor | None
    """Draft ids in the order of their policy ids; None where that is 0, 1, 2, ..."""
    policy_ids_U: Tensor
    """Ascending."""
    bounds: dict[int, tuple[int, int]]
    """By the start of a tile: begin and end of its share of the two above."""

    @classmethod
    def of(cls, vocab_map_U: Tensor, tiles: list[slice]) -> Columns:
        policy_ids_U, order_U = vocab_map_U.sort()
        edges = torch.tensor([t.start for t in tiles] + [tiles[-1].stop], device=vocab_map_U.device)
        found = torch.searchsorted(policy_ids_U, edges).tolist()
        bounds = {tile.start: (found[i], found[i + 1]) for i, tile in enumerate(tiles)}
        ascending = bool((vocab_map_U == policy_ids_U).all())
        return cls(None if ascending else order_U, policy_ids_U, bounds)

    def copy(self, out_CU: Tensor, logits_CW: Tensor, offset: int, scratch: Tensor) -> None:
        """The draft's columns among those of the tile that begins at `offset`, into their place."""
        begin, end = self.bounds[offset]
        for part in tiles(end - begin, scratch.numel() // logits_CW.shape[0]):
            places = slice(begin + part.start, begin + part.stop)
            part_CW = buffer(scratch, logits_CW.shape[0], part.stop - part.start)
            torch.index_select(logits_CW, 1, self.policy_ids_U[places] - offset, out=part_CW)
            if self.order_U is None:
                out_CU[:, places] = part_CW
            else:
                out_CU.index_copy_(1, self.order_U[places], part_CW)


def sweep(
    running: Running,
    x_CD: Tensor,
    head_VD: Tensor,
    size: int,
    logits: Tensor,
    scratch: Tensor,
    *,
    in_subset_V: Tensor | None = None,
    keep: tuple[Tensor, Columns | None] | None = None,
) -> None:
    """All logits of the rows into `running`, `size` columns at a time.

    keep: (out_CU, columns): logits that are copied to `out_CU` on the way; None as columns means all.
    """
    for tile in tiles(head_VD.shape[0], size):
        logits_CW = buffer(logits, x_CD.shape[0], tile.stop - tile.start)
        product_into(logits_CW, x_CD, head_VD[tile])
        running.add(logits_CW, tile.start, scratch, in_subset_V)
        if keep is not None:
            out_CU, columns = keep
            if columns is None:
                out_CU[:, tile] = logits_CW
            else:
                columns.copy(out_CU, logits_CW, tile.start, scratch)
