"""A draft vocabulary in a file: chosen by how often tokens are supervised, checked against the policy."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cospec.config import ConfigError, require
from cospec.draft.vocab import vocab_maps
from cospec.features.source import BadSample, BadSamples, FeatureSource
from cospec.features.store import write_tensors
from cospec.records import Document

FORMAT = "cospec-draft-vocab"


def supervised_tokens(documents: Iterable[Document]) -> Iterator[Tensor]:
    """The ids that a draft is taught to propose: the supervised tokens, without the first of a document."""
    for document in documents:
        yield document.input_ids[1:][document.loss_mask[1:].bool()]


def documents_of(source: FeatureSource, bad: BadSamples) -> Iterator[Document]:
    """The readable documents of a folder; the others go to `bad`, which raises when they are too many."""
    for i in range(len(source)):
        try:
            document = source.tokens(i)
        except BadSample as error:
            bad.add(i, str(error))
            bad.check()
        else:
            bad.add(i, None)
            yield document
    bad.check(final=True)


def save_vocab(
    path: str | Path, ids_U: Tensor, counts_V: Tensor, *, tokenizer: str | None, policy: str | None
) -> float:
    """Write ids and counts (safetensors, whole or not at all); returns the share of supervised tokens covered.

    Raises ConfigError when nothing was counted.
    """
    total = int(counts_V.sum())
    require(total > 0, "counts", total, "no supervised token was counted")
    vocab_maps(ids_U, counts_V.numel())
    coverage = int(counts_V[ids_U].sum()) / total
    about = {"format": FORMAT, "vocab_size": counts_V.numel(), "tokenizer": tokenizer, "policy": policy}
    write_tensors(Path(path), {"ids": ids_U, "counts": counts_V}, about | {"coverage": coverage})
    return coverage


def load_vocab(path: str | Path, vocab_size: int, *, tokenizer: str | None = None) -> Tensor:
    """int64 [U], ascending policy ids.

    Raises ConfigError for a file of another kind, or one made for another vocabulary size or
    tokenizer than the policy's.
    """
    name = "draft.vocab_path"
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            about = json.loads((file.metadata() or {}).get("cospec", "{}"))
            require(about.get("format") == FORMAT, name, str(path), "is no draft vocabulary")
            ids = file.get_tensor("ids").clone()
    except (OSError, SafetensorError) as error:
        raise ConfigError(name, str(path), f"cannot be read ({error})") from error
    rule = f"was made for a vocabulary of {about['vocab_size']} tokens, the policy's has {vocab_size}"
    require(about["vocab_size"] == vocab_size, name, str(path), rule)
    made_for = about.get("tokenizer")
    same = tokenizer is None or made_for is None or tokenizer == made_for
    require(same, name, str(path), "was made with another tokenizer than the policy's")
    vocab_maps(ids, vocab_size)
    return ids.to(torch.int64)
