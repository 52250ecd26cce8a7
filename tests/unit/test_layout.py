"""PackedLayout: every token has one place, shards are what the docstrings say."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cospec.layout import PackedLayout

LENGTHS = st.lists(st.integers(1, 21), min_size=1, max_size=6)
CP_SIZES = st.sampled_from([1, 2, 3, 4])


@st.composite
def layouts(draw):
    lengths, cp_size = draw(LENGTHS), draw(CP_SIZES)
    fixed = PackedLayout(lengths, cp_size)
    extra = draw(st.integers(0, 3)) * fixed.num_chunks
    return PackedLayout(lengths, cp_size, fixed.num_rows + extra if draw(st.booleans()) else None)


@given(layouts())
def test_every_row_has_one_owner(layout):
    rows = torch.cat([layout.local_index(r) for r in range(layout.cp_size)])
    assert torch.equal(rows.sort().values, torch.arange(layout.num_rows))
    for rank in range(layout.cp_size):
        assert len(layout.local_index(rank)) == layout.num_local_rows


@given(layouts())
def test_shard_and_unshard_are_inverse(layout):
    x = torch.arange(layout.num_tokens)
    shards = [layout.shard(x, r, fill=-1) for r in range(layout.cp_size)]
    assert torch.equal(layout.unshard(shards), x)
    for rank, shard in enumerate(shards):
        assert torch.equal(shard >= 0, layout.valid(rank))
        assert torch.equal(shard, layout.source_index(rank))
    y = torch.stack((x, -x))
    assert torch.equal(layout.unshard([layout.shard(y, r, dim=1) for r in range(layout.cp_size)], dim=1), y)


@given(layouts())
def test_positions_restart_in_each_document(layout):
    """Known failure 15: positions are the document's own, different on every rank."""
    lengths = torch.tensor(layout.lengths)
    shards = [layout.positions(r) for r in range(layout.cp_size)]
    assert torch.equal(layout.unshard(shards), torch.cat([torch.arange(n) for n in lengths]))
    documents = layout.unshard([layout.document(r) for r in range(layout.cp_size)])
    assert torch.equal(documents, torch.arange(len(lengths)).repeat_interleave(lengths))


@given(layouts())
def test_zigzag_chunks(layout):
    """Rank r owns chunks r and 2 cp - 1 - r of each document; its rows ascend inside each half."""
    for rank in range(layout.cp_size):
        rows, document = layout.local_index(rank), layout.document(rank)
        for d in range(len(layout.lengths)):
            start, end = layout.doc_ends[d], layout.doc_ends[d + 1]
            size = (end - start) // layout.num_chunks
            chunks = ((rows[document == d] - start) // size).tolist()
            if layout.cp_size == 1:
                assert chunks == sorted(chunks)
            else:
                assert chunks == [rank] * size + [layout.num_chunks - 1 - rank] * size


@given(layouts())
def test_halves_are_contiguous(layout):
    """Documents and filler, early chunks first: what lets attention blocks be slices."""
    if layout.cp_size == 1:
        return
    half = layout.num_local_rows // 2
    for rank in range(layout.cp_size):
        document = layout.document(rank)
        for d in range(len(layout.lengths)):
            a, b = layout.half_cu_seqlens[d].item(), layout.half_cu_seqlens[d + 1].item()
            assert (document[a:b] == d).all()
            assert (document[half + a : half + b] == d).all()
        assert (document[layout.half_cu_seqlens[-1] : half] == -1).all()


@given(layouts())
def test_offsets(layout):
    assert layout.cu_seqlens.dtype == torch.int32
    assert layout.cu_seqlens.tolist() == list(layout.doc_ends)
    assert (layout.cu_seqlens % layout.num_chunks == 0).all()
    assert (layout.local_cu_seqlens * layout.cp_size == layout.cu_seqlens).all()
    padding = [e - s - n for s, e, n in zip(layout.doc_ends, layout.doc_ends[1:], layout.lengths, strict=False)]
    assert all(0 <= p < layout.num_chunks for p in padding)


def test_equal_layouts_hash_alike():
    """Caches are keyed by layout."""
    assert PackedLayout([3, 4], 2) == PackedLayout.from_lengths((3, 4), 2)
    assert hash(PackedLayout([3, 4], 2)) == hash(PackedLayout((3, 4), 2))
    assert PackedLayout([3, 4], 2) != PackedLayout([3, 4], 4)
    assert PackedLayout([3, 4], 2) != PackedLayout([3, 4], 2, pad_to=16)


@pytest.mark.parametrize(
    "args, message",
    [
        (([],), r"at least one document"),
        (([3, 0],), r"lengths\[1\] must be >= 1, got 0"),
        (([3], 0), "cp_size must be >= 1, got 0"),
        (([5], 1, 4), "pad_to=4 is too small: the documents take 6"),
        (([3], 2, 6), "pad_to=6 must be a multiple of 2 . cp_size = 4"),
    ],
)
def test_bad_layouts(args, message):
    with pytest.raises(ValueError, match=message):
        PackedLayout(*args)


def test_bad_calls():
    layout = PackedLayout([3, 2], 2)
    with pytest.raises(ValueError, match="rank=2 is outside cp_size=2"):
        layout.positions(2)
    with pytest.raises(ValueError, match="x has 6 rows in dim 0, the layout has 5 tokens"):
        layout.shard(torch.zeros(6), 0)
    with pytest.raises(ValueError, match="got 1 shards for cp_size=2"):
        layout.unshard([torch.zeros(4)])
