"""The draft vocabulary: choice by counts, maps between ids, checks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cospec.config import ConfigError
from cospec.draft.vocab import check_vocab, choose_vocab, count_tokens, vocab_maps


def test_most_frequent_tokens_win_and_ties_go_to_the_smaller_id():
    counts = torch.tensor([3, 9, 3, 0, 9, 3, 1])
    assert choose_vocab(counts, 4).tolist() == [0, 1, 2, 4]
    assert choose_vocab(counts, 1).tolist() == [1]
    assert choose_vocab(counts, 7).tolist() == list(range(7))


def test_given_ids_are_always_in():
    counts = torch.tensor([3, 9, 3, 0, 9, 3, 1])
    assert choose_vocab(counts, 3, always=[3, 6, 3]).tolist() == [1, 3, 6]
    with pytest.raises(ConfigError, match="draft_vocab_size=1.*too small for the 2"):
        choose_vocab(counts, 1, always=[3, 6])
    with pytest.raises(ConfigError, match=r"always=\[7\]"):
        choose_vocab(counts, 3, always=[7])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.data())
def test_maps_invert_each_other(counts, data):
    size = data.draw(st.integers(1, len(counts)))
    always = data.draw(st.sets(st.integers(0, len(counts) - 1), max_size=size))
    ids = choose_vocab(torch.tensor(counts), size, always)
    d2t, t2d = vocab_maps(ids, len(counts))
    assert always <= set(ids.tolist())
    assert (torch.arange(size) + d2t).tolist() == ids.tolist() == t2d.nonzero().squeeze(1).tolist()
    left_out = [counts[i] for i in range(len(counts)) if not t2d[i]]
    free = [counts[i] for i in ids.tolist() if i not in always]
    assert not left_out or not free or max(left_out) <= min(free)


def test_counts():
    documents = [torch.tensor([0, 2, 2]), torch.tensor([], dtype=torch.int64), torch.tensor([4, 2])]
    assert count_tokens(documents, 5).tolist() == [1, 0, 3, 0, 1]
    with pytest.raises(ConfigError, match=r"\(2, 4\).*0\.\.3"):
        count_tokens(documents, 4)


@pytest.mark.parametrize("size", [0, 8])
def test_size_is_checked_against_the_policy(size):
    """Known failure 21: the message names both sizes."""
    with pytest.raises(ConfigError, match=f"draft_vocab_size={size}.*7"):
        choose_vocab(torch.ones(7), size)


def test_a_map_of_another_size_or_policy_is_refused():
    """Known failure 21."""
    d2t, t2d = vocab_maps(torch.tensor([1, 3, 4]), 6)
    check_vocab(d2t, t2d, 6, 3)
    bad = {
        "shape of d2t": (d2t, t2d, 6, 4),
        "shape of t2d": (d2t, t2d, 7, 3),
        "id past the end": (d2t + torch.tensor([0, 0, 9]), t2d, 6, 3),
        "negative id": (d2t - 2, t2d, 6, 3),
        "two draft ids, one policy id": (d2t + torch.tensor([0, 0, -1]), t2d, 6, 3),
        "t2d of another map": (d2t, t2d.roll(1), 6, 3),
        "one mark too many": (d2t, t2d | (torch.arange(6) == 0), 6, 3),
        "dtype of d2t": (d2t.int(), t2d, 6, 3),
        "dtype of t2d": (d2t, t2d.int(), 6, 3),
    }
    accepted = [what for what, arguments in bad.items() if not refused(*arguments)]
    assert accepted == []


def refused(*arguments) -> bool:
    try:
        check_vocab(*arguments)
    except ConfigError:
        return True
    return False


@pytest.mark.parametrize("ids", [[0, 0, 1], [2, 6], [-1, 2]])
def test_ids_of_a_vocabulary_are_checked(ids):
    with pytest.raises(ConfigError):
        vocab_maps(torch.tensor(ids), 6)
