"""Shift indices from the layout alone; exchanges between ranks are simulated by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cospec.layout import PackedLayout
from cospec.ops import shift as shift_module
from cospec.ops.shift import halo_index, shift, with_halo


@st.composite
def cases(draw):
    lengths = draw(st.lists(st.integers(1, 17), min_size=1, max_size=5))
    cp_size = draw(st.sampled_from([1, 2, 3, 4]))
    rows = PackedLayout(lengths, cp_size).num_rows
    pad_to = rows + 2 * cp_size * draw(st.integers(0, 2))
    return PackedLayout(lengths, cp_size, pad_to), draw(st.integers(0, 6))


def halos_by_hand(x_shards, layout, extent):
    """What `with_halo` returns on each rank, with the exchange done here."""
    if layout.cp_size == 1 or extent == 0:
        return x_shards
    results = []
    exchanges = [shift_module._exchange(layout, r, extent) for r in range(layout.cp_size)]
    for rank, x in enumerate(x_shards):
        parts = []
        for owner, exchange in enumerate(exchanges):
            outgoing = x_shards[owner].index_select(0, exchange.send_rows).split(exchange.send_counts)
            assert len(outgoing[rank]) == exchanges[rank].receive_counts[owner]
            parts.append(outgoing[rank])
        results.append(torch.cat([x, *parts]))
    return results


@given(cases())
def test_index_finds_the_later_token(case):
    """Known failures 2, 3, 4: exactly `by` tokens on, never into another document or padding."""
    layout, extent = case
    ids = torch.arange(layout.num_tokens)
    halos = halos_by_hand([layout.shard(ids, r, fill=-9) for r in range(layout.cp_size)], layout, extent)
    for by in range(extent + 1):
        for rank in range(layout.cp_size):
            index = halo_index(layout, rank, by, extent)
            found = torch.where(index >= 0, halos[rank][index.clamp(min=0)], -1)
            position, document = layout.positions(rank), layout.document(rank)
            length = torch.tensor(layout.lengths)[document.clamp(min=0)]
            inside = layout.valid(rank) & (position + by < length)
            assert torch.equal(found, torch.where(inside, layout.source_index(rank) + by, -1))


@given(cases())
def test_a_halo_holds_no_more_than_is_needed(case):
    layout, extent = case
    if layout.cp_size == 1 or extent == 0:
        return
    for rank in range(layout.cp_size):
        rows = shift_module._halo_rows(layout, rank, extent)
        assert len(rows.unique()) == len(rows) <= 2 * extent * len(layout.lengths)
        assert not torch.isin(rows, layout.local_index(rank)).any()


def test_one_rank_copies_nothing():
    layout = PackedLayout([3, 2])
    x = torch.randn(6, 2)
    assert with_halo(x, layout, 4) is x
    assert halo_index(layout, 0, 1, 4).tolist() == [1, 2, -1, -1, 5, -1]


def test_shift_values_and_gradient():
    """Known failure 1: any per-token quantity, mask or id, moves by the same rule."""
    layout = PackedLayout([3, 2], 1, pad_to=8)
    x = torch.tensor([1.0, 2, 3, torch.nan, 4, 5, torch.nan, torch.nan], requires_grad=True)
    y = shift(x, layout, 1, fill=-1)
    assert y.tolist() == [2, 3, -1, -1, 5, -1, -1, -1]
    y.sum().backward()
    assert x.grad.tolist() == [0, 1, 1, 0, 0, 1, 0, 0]
    assert shift(torch.tensor([True] * 8), layout, 2).tolist() == [True] + [False] * 7


def test_bad_arguments():
    layout = PackedLayout([3, 2])
    with pytest.raises(ValueError, match="x has 5 rows, the layout has 6"):
        with_halo(torch.zeros(5), layout, 1)
    with pytest.raises(ValueError, match="extent=-1"):
        with_halo(torch.zeros(6), layout, -1)
    with pytest.raises(ValueError, match="by=3 must be 0..extent, extent=2"):
        halo_index(layout, 0, 3, 2)
    with pytest.raises(ValueError, match="cp_group has 1 ranks, the layout has cp_size=2"):
        with_halo(torch.zeros(4), PackedLayout([3, 2], 2), 1)
