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
            for tile in tiled.tiles:
                sides = []
                for rows, owner, span in ((tile.q, rank, block.q_range), (tile.k, source, block.k_range)):
                    real = torch.ones(rows.size * rows.length, dtype=torch.bool)
                    if rows.repeats is not None:
                        real[rows.repeats] = False
                    numbers = index(rows.rows)
                    assert torch.equal(rows.position.flatten(), layout.positions(owner)[span][numbers])
                    sides.append((numbers.view(rows.size, -1), real.view(rows.size, -1)))
                (q_rows, q_real), (k_rows, k_real) = sides
                assert block.causal or k_real.all()  # nothing would hide a repeated key
                for i in range(tile.q.size):
                    mark(seen, layout, rank, source, q_rows[i][q_real[i]], k_rows[i][k_real[i]], block.causal)
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


@given(st.lists(st.integers(0, 19), unique=True, min_size=1))
def test_row_map_there_and_back(rows):
    """`put` undoes `take`; rows that were left out hold the fill."""
    row_map = RowMap(torch.tensor(rows), 20, CPU)
    x = torch.arange(1.0, 21)
    assert row_map.take(x).tolist() == x[rows].tolist()
    expected = torch.full((20,), -1.0)
    expected[rows] = x[rows]
    assert torch.equal(row_map.put(row_map.take(x), fill=-1), expected)


@given(layouts())
def test_tiles_there_and_back(layout):
    """What tiles put back is what they took; rows without a token hold the fill, repeats leave no trace."""
    for rank in range(layout.cp_size):
        block = block_between(layout, rank, rank)
        if not block.documents:
            continue
        tiled = block.tiled(CPU)
        x = torch.arange(1.0, layout.num_local_rows + 1).view(-1, 1, 1)
        sink = tiled.q_sink(-1)
        for tile in tiled.tiles:
            taken = tile.q.take(x)
            if tile.q.repeats is not None:
                cleared = tile.q.take(x, clear_repeats=True).transpose(1, 2).flatten(0, 1)
                assert (cleared[tile.q.repeats] == 0).all()
            sink.put(tile.q, taken)
        expected = x.masked_fill(~layout.valid(rank).view(-1, 1, 1), -1)
        assert torch.equal(sink.result(), expected)


def test_consecutive_rows_are_not_copied():
    """One document on one rank reads and writes its tensors in place."""
    (tile,) = block_between(PackedLayout([8]), 0, 0).tiled(CPU).tiles
    x = torch.zeros(8, 2, 4)
    assert tile.q.take(x).data_ptr() == x.data_ptr()
    sink = block_between(PackedLayout([8]), 0, 0).tiled(CPU).q_sink()
    sink.put(tile.q, tile.q.take(x))
    assert sink.result().data_ptr() == x.data_ptr()
    (tile,) = block_between(PackedLayout([6, 6, 6]), 0, 0).tiled(CPU).tiles
    assert isinstance(tile.k.rows, slice)


def test_padding_rows():
    assert padding_rows(PackedLayout([4, 2]), 0, CPU) is None
    assert padding_rows(PackedLayout([3, 2], 1, 8), 0, CPU).tolist() == [3, 6, 7]
