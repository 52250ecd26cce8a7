"""What a folder of saved features looks like to whoever reads it, whoever wrote it."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cospec.config import ConfigError
from cospec.records import Document


class BadSample(ValueError):
    """A sample that must not be trained on; `name` is its file or index, `reason` what is wrong with it."""

    def __init__(self, name: str, reason: str):
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason


@dataclass(frozen=True)
class FeatureInfo:
    """What a folder says of itself; None where its format has no place for it.

    tap_layers: 0-based decoder layers, low to high. last_is_normed: whether `last_hidden` is
    after the policy's final norm; None when there is no last hidden state. policy: name or
    path, for people. tokenizer: `tokenizer_hash` of the tokenizer that made the ids.
    """

    format: str
    last_is_normed: bool | None
    tap_layers: tuple[int, ...] | None = None
    num_taps: int | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    dtype: str | None = None
    policy: str | None = None
    tokenizer: str | None = None
    policy_config: dict[str, Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FeatureDocument:
    """One document with its features.

    input_ids: int64 [T]. loss_mask: bool [T], unshifted: the mask sits on the token that is
    predicted. taps: [T, P * Dt], the tapped layers' outputs low to high. last_hidden:
    [T, Dt], see `FeatureInfo.last_is_normed`; None in files without one.
    """

    input_ids: Tensor
    loss_mask: Tensor
    taps: Tensor
    last_hidden: Tensor | None
    name: str = ""


class FeatureSource(ABC):
    """Documents with features, read when they are asked for.

    `verified`: the documents were checked when they were written, so `tokens` and
    `__getitem__` find no bad sample; otherwise either may raise BadSample.
    """

    info: FeatureInfo
    verified: bool = False

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> FeatureDocument: ...

    @abstractmethod
    def name(self, index: int) -> str:
        """The sample as a message should call it."""

    def tokens(self, index: int) -> Document:
        """The document without features; raises BadSample for all that `__getitem__` would refuse."""
        document = self[index]
        return Document(document.input_ids, document.loss_mask)

    def split_key(self, index: int) -> int:
        """0 <= key < 2**64: which side of a split the document falls on. Equal documents should have equal keys."""
        return int.from_bytes(hashlib.sha256(self.name(index).encode()).digest()[:8], "big")

    def close(self) -> None:  # noqa: B027  (nothing to close is a fine default)
        """Close files."""


def split_by_document(source: FeatureSource, validation_share: float) -> tuple[list[int], list[int]]:
    """(training, validation) indices; a document stays on its side whatever else is added or reordered."""
    if not 0 <= validation_share < 1:
        raise ConfigError("offline.validation_share", validation_share, "must be in [0, 1)")
    sides: tuple[list[int], list[int]] = ([], [])
    for i in range(len(source)):
        sides[source.split_key(i) < validation_share * 2**64].append(i)
    return sides


def check_sample(document: FeatureDocument, info: FeatureInfo) -> FeatureDocument:
    """The document, if it can be trained on; else BadSample naming the first thing that is wrong."""
    ids, name = document.input_ids, document.name
    if ids.ndim != 1 or ids.numel() < 1:
        raise BadSample(name, f"input_ids has shape {list(ids.shape)}, must be [T]")
    length = ids.numel()
    if document.loss_mask.shape != ids.shape:
        raise BadSample(name, f"loss_mask has shape {list(document.loss_mask.shape)}, input_ids has [{length}]")
    for field_name, value in (("taps", document.taps), ("last hidden state", document.last_hidden)):
        if value is None:
            continue
        if value.ndim != 2 or len(value) != length:
            raise BadSample(name, f"{field_name} has shape {list(value.shape)} for {length} tokens")
        if not value.is_floating_point():
            raise BadSample(name, f"{field_name} is {value.dtype}, must be a float")
        if not math.isfinite(value.sum(dtype=torch.float64).item()):  # one NaN or infinity anywhere
            raise BadSample(name, f"{field_name} holds non-finite values")
    size = info.hidden_size
    if size is not None:
        if document.last_hidden is not None and document.last_hidden.shape[1] != size:
            raise BadSample(
                name, f"last hidden state has width {document.last_hidden.shape[1]}, the folder's is {size}"
            )
        if info.num_taps is not None and document.taps.shape[1] != info.num_taps * size:
            raise BadSample(
                name, f"taps have width {document.taps.shape[1]}, {info.num_taps} layers of {size} are expected"
            )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or (info.vocab_size is not None and high >= info.vocab_size):
        top = "" if info.vocab_size is None else f"..{info.vocab_size - 1}"
        raise BadSample(name, f"token id {low if low < 0 else high} is outside 0{top}")
    if not bool(document.loss_mask[1:].any()):
        raise BadSample(name, "loss_mask supervises no token")
    return document


class BadSamples:
    """The samples that were skipped, by name; an error when they are too many.

    Args:
        max_share: of the samples looked at; judged from the 20th bad one on, and at the end.
    """

    def __init__(self, max_share: float):
        if not 0 <= max_share <= 1:
            raise ConfigError("offline.max_bad_share", max_share, "must be in 0..1")
        self.max_share = max_share
        self.seen: set[int] = set()
        self.reasons: dict[int, str] = {}

    def add(self, index: int, error: str | None) -> None:
        self.seen.add(index)
        if error is not None:
            self.reasons[index] = error

    def check(self, *, final: bool = False) -> None:
        """Raise ConfigError, listing names, when more than `max_share` of those seen are bad."""
        bad, seen = len(self.reasons), len(self.seen)
        if bad and (final or bad >= 20 or bad == seen) and bad > self.max_share * seen:
            rule = f"{bad} of {seen} samples are bad, at most {self.max_share:.1%} may be:\n{self.report()}"
            raise ConfigError("features", bad, rule)

    def report(self, most: int = 20) -> str:
        """One line for each skipped sample."""
        lines = [f"  skipped {reason}" for _, reason in sorted(self.reasons.items())]
        more = [] if len(lines) <= most else [f"  ... and {len(lines) - most} more"]
        return "\n".join([*lines[:most], *more])


def token_key(input_ids: Tensor) -> int:
    """First 8 bytes of the sha256 of the int64 ids: equal for equal documents only."""
    digest = hashlib.sha256(input_ids.to(torch.int64).contiguous().numpy().tobytes()).digest()
    return int.from_bytes(digest[:8], "big")


def tokenizer_hash(vocabulary: dict[str, int]) -> str:
    """sha256 of a tokenizer's token -> id table (`tokenizer.get_vocab()`)."""
    text = "\n".join(f"{i}\t{token}" for token, i in sorted(vocabulary.items(), key=lambda x: (x[1], x[0])))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def cat_names(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
