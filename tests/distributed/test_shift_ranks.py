"""Shifts across cp shards: forward, gradients, chunks shorter than the halo."""

import pytest
import torch
import torch.distributed as dist

from cospec.layout import PackedLayout
from cospec.ops.shift import halo_index, shift, with_halo

LAYOUTS = [((9, 1, 16, 3), None), ((1, 2), 48), ((40, 5, 7, 1, 1, 1), 96), ((4,), None)]
EXTENT = 5


def shifted(x, lengths, by, fill=0):
    """Unpadded rows, document by document."""
    parts = []
    for part in x.split(list(lengths)):
        moved = part * 0 + fill  # keeps the graph where nothing is left
        if by < len(part):
            moved[: len(part) - by] = part[by:]
        parts.append(moved)
    return torch.cat(parts)


def all_shifts(rank):
    results = []
    for lengths, pad_to in LAYOUTS:
        layout = PackedLayout(lengths, dist.get_world_size(), pad_to)
        x = torch.arange(layout.num_tokens, dtype=torch.float64).unsqueeze(1) + torch.tensor([1.0, 0.5])
        ids = torch.arange(1, layout.num_tokens + 1)
        local, local_ids = layout.shard(x, rank, fill=float("nan")).requires_grad_(), layout.shard(ids, rank, fill=-7)
        group = dist.group.WORLD
        rows, mask = (
            with_halo(local, layout, EXTENT, cp_group=group),
            with_halo(local_ids > 3, layout, 2, cp_group=group),
        )
        assert mask.dtype == torch.bool
        assert torch.equal(rows[: layout.num_local_rows][layout.valid(rank)], local[layout.valid(rank)])
        found = []
        for by in range(EXTENT + 1):
            index = halo_index(layout, rank, by, EXTENT)
            assert index.max() < len(rows)
            gathered = rows[index.clamp(min=0)].masked_fill((index < 0)[:, None], 0)
            once = shift(local, layout, by, cp_group=group)
            moved_ids = shift(local_ids, layout, by, cp_group=group, fill=-1)
            weight = layout.shard(x.flip(0), rank)
            (grad,) = torch.autograd.grad((once * weight).sum(), local)
            found.append([gathered.detach(), once.detach(), moved_ids, grad])
        results.append(found)
    return results


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_shifts_equal_those_of_whole_documents(ranks, world_size):
    """Known failures 1, 2, 4: no shift crosses a document, all of them cross shards; also backward."""
    results = ranks.run(world_size, all_shifts)
    for i, (lengths, pad_to) in enumerate(LAYOUTS):
        layout = PackedLayout(lengths, world_size, pad_to)
        x = torch.arange(layout.num_tokens, dtype=torch.float64).unsqueeze(1) + torch.tensor([1.0, 0.5])
        ids = torch.arange(1, layout.num_tokens + 1)
        for by in range(EXTENT + 1):
            leaf = x.clone().requires_grad_()
            expected = shifted(leaf, lengths, by)
            (grad,) = torch.autograd.grad((expected * x.flip(0)).sum(), leaf)
            want = [expected, expected, shifted(ids, lengths, by, fill=-1), grad]
            for j, y in enumerate(want):
                got = layout.unshard([r[i][by][j] for r in results])
                assert torch.equal(got, y), (lengths, by, j)


def halo_sizes(rank):
    layout = PackedLayout((64, 64), dist.get_world_size())
    return [len(with_halo(torch.zeros(layout.num_local_rows), layout, n, cp_group=dist.group.WORLD)) for n in (0, 1, 3)]


def test_a_halo_is_small(ranks):
    """At most `extent` rows for each chunk, and none that the rank owns already."""
    local = 64
    first, last = ranks.run(2, halo_sizes)
    # rank 0 owns chunks 0 and 3 (nothing follows 3), rank 1 owns 1 and 2 (2 follows 1, and is its own)
    assert first == [local, local + 2 * 1, local + 2 * 3]
    assert last == [local, local + 2 * 1, local + 2 * 3]
