"""Attention blocks of all ranks together are exactly the causal mask, in every form a kernel reads."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from cospec.layout import PackedLayout
from cospec.ops.blocks import RowMap, block_between, padding_rows

CPU = torch.device("cpu")


@st.composite
def layouts(draw):
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))
    cp_size = draw(st.sampled_from([1, 2, 3, 4]))
    rows = PackedLayout(lengths, cp_size).num_rows
    return PackedLayout(lengths, cp_size, rows + 2 * cp_size * draw(st.integers(0, 2)))


def mark(seen, layout, rank, source, q_rows, k_rows, causal):
    """Count the pairs of one document, rows local to the block."""
    block = block_between(layout, rank, source)
    queries = layout.source_index(rank)[block.q_range][q_rows]
    keys = layout.source_index(source)[block.k_range][k_rows]
    assert queries.min() >= 0
    assert keys.min() >= 0
    pairs = torch.ones(len(queries), len(keys))
    seen[queries.unsqueeze(1), keys] += pairs.tril() if causal else pairs


def causal_mask(layout):
    document = torch.arange(len(layout.lengths)).repeat_interleave(torch.tensor(layout.lengths))
    return (document.unsqueeze(1) == document).float().tril()


def index(rows):
    return torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows


@given(layouts())
def test_packed_blocks_cover_the_mask_once(layout):
    """Known failures 4, 6, 7: no pair across documents, none twice, none missing, no padding."""
    seen = torch.zeros(layout.num_tokens, layout.num_tokens)
    for rank in range(layout.cp_size):
        for source in range(layout.cp_size):
            block = block_between(layout, rank, source)
            if not block.documents:
                continue
            packed = block.packed(CPU)
            q_rows, k_rows = index(packed.q_map.rows), index(packed.k_map.rows)
            q_parts, k_parts = q_rows.split(packed.cu_q.diff().tolist()), k_rows.split(packed.cu_k.diff().tolist())
            assert max(len(p) for p in q_parts) == packed.max_q
            assert max(len(p) for p in k_parts) == packed.max_k
            for q_part, k_part in zip(q_parts, k_parts, strict=True):
                mark(seen, layout, rank, source, q_part, k_part, block.causal)
    assert torch.equal(seen, causal_mask(layout))


@given(layouts())
def test_tiles_cover_the_mask_once(layout):
    """The same for padded batches: their repeated rows change nothing that a real query sees."""
    seen = torch.zeros(layout.num_tokens, layout.num_tokens)
    for rank in range(layout.cp_size):
        for source in range(layout.cp_size):
            block = block_between(layout, rank, source)
            if not block.documents:
                continue
            tiled = block.tiled(CPU)
            q_rows, k_rows = index(tiled.q_map.rows), index(tiled.k_map.rows)
            real = torch.ones(len(q_rows), dtype=torch.bool)
            if tiled.q_map.repeats is not None:
                real[tiled.q_map.repeats] = False
            k_real = torch.ones(len(k_rows), dtype=torch.bool)
            if tiled.k_map.repeats is not None:
                k_real[tiled.k_map.repeats] = False
            assert block.causal or k_real.all()  # nothing would hide a repeated key
            for tile in tiled.tiles:
                for i in range(tile.size):
                    q_span = slice(tile.q_start + i * tile.q_len, tile.q_start + (i + 1) * tile.q_len)
                    k_span = slice(tile.k_start + i * tile.k_len, tile.k_start + (i + 1) * tile.k_len)
                    q_part, k_part = q_rows[q_span][real[q_span]], k_rows[k_span][k_real[k_span]]
                    mark(seen, layout, rank, source, q_part, k_part, block.causal)
                    position = layout.positions(rank)[block.q_range]
                    assert torch.equal(tile.q_position[i], position[q_rows[q_span]])
                    position = layout.positions(source)[block.k_range]
                    assert torch.equal(tile.k_position[i], position[k_rows[k_span]])
    assert torch.equal(seen, causal_mask(layout))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.sampled_from([2, 3, 4]))
def test_every_rank_has_the_same_work(chunks, cp_size):
    """Zigzag: the scores of full chunks are spread evenly over ranks."""
    layout = PackedLayout([2 * cp_size * n for n in chunks], cp_size)
    work = []
    for rank in range(cp_size):
        scores = 0
        for source in range(cp_size):
            block = block_between(layout, rank, source)
            for queries, keys in block.documents:
                q, k = sum(p.size for p in queries), sum(p.size for p in keys)
                scores += q * (q + 1) // 2 if block.causal else q * k
        work.append(scores)
    assert len(set(work)) == 1


@given(st.lists(st.integers(0, 19), unique=True, min_size=1), st.integers(0, 3))
def test_row_map_there_and_back(rows, repeats):
    """`put` undoes `take`; rows that were left out hold the fill, repeats leave no trace."""
    rows = torch.tensor([*rows, *[rows[-1]] * repeats])
    where = torch.arange(len(rows) - repeats, len(rows))
    row_map = RowMap(rows, where, 20, CPU)
    x = torch.arange(1.0, 21)
    taken = row_map.take(x, clear_repeats=True)
    assert taken[: len(rows) - repeats].tolist() == (rows[: len(rows) - repeats] + 1.0).tolist()
    assert (taken[len(rows) - repeats :] == 0).all()
    back = row_map.put(row_map.take(x), fill=-1)
    expected = torch.full((20,), -1.0)
    expected[rows] = x[rows]
    assert torch.equal(back, expected)


def test_consecutive_rows_are_not_copied():
    """One document on one rank reads and writes its tensors in place."""
    layout = PackedLayout([8])
    tiled = block_between(layout, 0, 0).tiled(CPU)
    x = torch.zeros(8, 2, 4)
    assert tiled.q_map.take(x).data_ptr() == x.data_ptr()
    assert tiled.q_map.put(x) is x
    equal = block_between(PackedLayout([6, 6, 6]), 0, 0).tiled(CPU)
    assert isinstance(equal.k_map.rows, slice)
    assert len(equal.tiles) == 1


def test_padding_rows():
    assert padding_rows(PackedLayout([4, 2]), 0, CPU) is None
    assert padding_rows(PackedLayout([3, 2], 1, 8), 0, CPU).tolist() == [3, 6, 7]
