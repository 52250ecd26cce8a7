"""The draft vocabulary: the policy tokens that a draft can propose, and the maps between ids.

`d2t` int64 [U] holds policy id minus draft id, `t2d` bool [V] is True where the policy
id is in the draft vocabulary; draft ids follow policy ids in order.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from cospec.config import require


def count_tokens(documents: Iterable[Tensor], vocab_size: int) -> Tensor:
    """int64 [V]: how often each policy token occurs in the int64 [T] id tensors.

    Raises ConfigError when an id is outside the policy's vocabulary.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for ids in documents:
        if ids.numel():
            low, high = int(ids.min()), int(ids.max())
            require(low >= 0 and high < vocab_size, "token id", (low, high), f"must be 0..{vocab_size - 1}")
            counts += torch.bincount(ids.flatten().cpu(), minlength=vocab_size)
    return counts


def choose_vocab(counts_V: Tensor, size: int, always: Iterable[int] = ()) -> Tensor:
    """int64 [U], ascending: the `size` most frequent policy ids, `always` among them.

    Equal counts are broken by the smaller id. `always` names tokens a draft must be able
    to propose whatever the data says, such as end-of-sequence ids.
    Raises ConfigError when the size is outside 1..V, or `always` does not fit.
    """
    vocab_size = counts_V.numel()
    require(
        1 <= size <= vocab_size,
        "draft.draft_vocab_size",
        size,
        f"must be 1..{vocab_size}, the size of the policy's vocabulary",
    )
    special = sorted(set(always))
    require(
        all(0 <= i < vocab_size for i in special), "always", special, f"ids must be 0..{vocab_size - 1} (the policy's)"
    )
    require(len(special) <= size, "draft.draft_vocab_size", size, f"is too small for the {len(special)} ids in always")
    first = torch.zeros(vocab_size, dtype=torch.bool)
    first[special] = True
    by_count = torch.argsort(counts_V.cpu(), descending=True, stable=True)
    order = torch.cat([by_count[first[by_count]], by_count[~first[by_count]]])
    return order[:size].sort().values


def vocab_maps(ids_U: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """d2t int64 [U] and t2d bool [V] of the ascending policy ids of a draft vocabulary.

    Raises ConfigError when the ids are not ascending, distinct and inside the policy's vocabulary.
    """
    ids_U = ids_U.to(torch.int64).cpu()
    d2t = ids_U - torch.arange(ids_U.numel())
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    if ids_U.numel() and int(ids_U.min()) >= 0 and int(ids_U.max()) < vocab_size:
        t2d[ids_U] = True
    check_vocab(d2t, t2d, vocab_size, ids_U.numel())
    return d2t, t2d


def check_vocab(d2t: Tensor, t2d: Tensor, vocab_size: int, draft_vocab_size: int) -> None:
    """Raise ConfigError unless the maps fit both vocabularies and each other.

    A map made for another policy or size passes for a good one until acceptance is
    measured, so everything that can be compared is.
    """
    require(
        d2t.shape == (draft_vocab_size,), "d2t", tuple(d2t.shape), f"must be [draft_vocab_size] = [{draft_vocab_size}]"
    )
    require(t2d.shape == (vocab_size,), "t2d", tuple(t2d.shape), f"must be [vocab_size] = [{vocab_size}]")
    require(d2t.dtype == torch.int64, "d2t", d2t.dtype, "must be int64")
    require(t2d.dtype == torch.bool, "t2d", t2d.dtype, "must be bool")
    ids = d2t.cpu() + torch.arange(draft_vocab_size)
    low, high = int(ids.min()), int(ids.max())
    require(low >= 0 and high < vocab_size, "d2t", (low, high), f"policy ids must be 0..{vocab_size - 1}")
    require(ids.unique().numel() == draft_vocab_size, "d2t", draft_vocab_size, "two draft ids mean one policy id")
    marked = t2d.cpu()
    require(
        bool(marked[ids].all()) and int(marked.sum()) == draft_vocab_size,
        "t2d",
        int(marked.sum()),
        f"must be True at exactly the {draft_vocab_size} policy ids of d2t",
    )
