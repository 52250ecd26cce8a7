"""Is a folder of features sound, and whose is it?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from cospec.config import ConfigError
from cospec.features.source import BadSample, FeatureSource, check_sample
from cospec.features.store import FeatureStore, StoreError, shard_name
from cospec.features.teacher import PolicyEnds, check_features_fit


@dataclass
class Findings:
    """Figures of a folder as (name, text), and what is wrong with it."""

    figures: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def inspect(source: FeatureSource, ends: PolicyEnds | None = None, *, most: int | None = None) -> Findings:
    """Read the documents (`most`, spread evenly; None: all) and check what can be checked.

    ends: of the policy that the features should be of. With them the next-token loss of the
    saved final hidden states is compared under both readings of `last_is_normed`.
    """
    info, found = source.info, Findings()
    say = found.figures.append
    say(("format", info.format))
    say(("policy", info.policy or "not said"))
    say(("tap layers", "not said" if info.tap_layers is None else ", ".join(map(str, info.tap_layers))))
    say(("taps x hidden size", f"{info.num_taps} x {info.hidden_size}"))
    say(("vocabulary", str(info.vocab_size or "not said")))
    say(("tokenizer", (info.tokenizer or "not said")[:16]))
    say(("dtype", str(info.dtype)))
    normed = {None: "no final hidden state", True: "after the final norm", False: "before the final norm"}
    say(("final hidden state", normed[info.last_is_normed]))
    say(("documents", str(len(source))))
    if isinstance(source, FeatureStore):
        _check_store(source, found)
    if ends is not None:
        try:
            check_features_fit(info, ends)
        except ConfigError as error:
            found.problems.append(str(error))
            ends = None
    count = len(source) if most is None else min(most, len(source))
    chosen = [i * len(source) // count for i in range(count)]
    tokens, supervised, longest = 0, 0, 0
    losses = torch.zeros(2, dtype=torch.float64)
    for i in chosen:
        try:
            document = check_sample(source[i], info)
        except (BadSample, StoreError) as error:
            found.problems.append(str(error))
            continue
        tokens += document.input_ids.numel()
        longest = max(longest, document.input_ids.numel())
        supervised += int(document.loss_mask[1:].sum())
        if ends is not None and document.last_hidden is not None:
            labels = document.input_ids[1:]
            for which, is_normed in enumerate((True, False)):
                hidden = ends.final_hidden(document.last_hidden[:-1].float(), is_normed)
                losses[which] += torch.nn.functional.cross_entropy(
                    hidden @ ends.head_VD.float().T, labels, reduction="sum"
                ).double()
    say(("documents read", str(count)))
    say(("tokens in them", f"{tokens}, {supervised / max(tokens, 1):.1%} supervised, longest document {longest}"))
    if ends is not None and tokens > count:
        right, wrong = (losses / (tokens - count)).tolist()
        if not info.last_is_normed:
            right, wrong = wrong, right
        say(("next-token loss", f"{right:.3f} as said, {wrong:.3f} if the final norm were the other way"))
        if wrong < right - 0.05:  # where the norm changes little, both readings are as good
            found.problems.append("the final hidden states predict better if the final norm is read the other way")
    return found


def _check_store(store: FeatureStore, found: Findings) -> None:
    found.figures.append(("size", f"{store.num_bytes / 1e6:.1f} MB in {len(store.shard_bytes)} shards"))
    found.figures.append(("samples skipped", str(len(store.skipped))))
    for name, value in store.info.settings.items():
        found.figures.append((name.replace("_", " "), str(value)[:60]))
    if not store.complete:
        found.problems.append(f"not finished: {len(store.shard_bytes)} of {store.num_shards} shards are there")
    for name in _missing(store):
        found.problems.append(f"{name} is missing or of another size than the index says")


def _missing(store: FeatureStore) -> Iterator[str]:
    names: Sequence[str] = [shard_name(i) for i in range(store.num_shards)] if store.complete else []
    for name in names:
        path = store.folder / name
        if not path.is_file() or path.stat().st_size != store.shard_bytes.get(name):
            yield name
