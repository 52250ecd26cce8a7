"""Choose the tokens that a draft may propose: the most frequent ones among the supervised.

    python scripts/build_draft_vocab.py --features features/ --policy policy/ --size 32000 --output vocab.safetensors
    python scripts/build_draft_vocab.py --data chats.jsonl --policy policy/ --size 32000 --output vocab.safetensors

Use the file with `--draft.vocab_path` in any recipe; the draft's checkpoint carries the vocabulary from
then on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro

from cospec.config import ConfigError, require
from cospec.draft.vocab import choose_vocab, count_tokens
from cospec.features.foreign import open_features
from cospec.features.samples import Samples, load_tokenizer, open_samples
from cospec.features.source import BadSample, BadSamples
from cospec.features.store import StoreError
from cospec.features.teacher import folder_tokenizer_hash
from cospec.features.vocab import documents_of, save_vocab, supervised_tokens
from cospec.hf import read_policy_config
from cospec.records import Document


@dataclass(frozen=True, kw_only=True)
class VocabConfig:
    size: int
    """Tokens of the draft vocabulary."""
    output: str
    features: str | None = None
    """Saved features, ours or foreign; or give `data`."""
    data: str | None = None
    """Documents as scripts/extract_features.py takes them."""
    policy: str | None = None
    """The policy's folder: sizes, tokenizer, end-of-sequence ids. Not needed for a store of our own."""
    vocab_size: int | None = None
    """The policy's, where there is neither a folder nor a store to say it."""
    always: tuple[int, ...] = ()
    """Ids to have whatever the counts say; end-of-sequence ids of `policy` are added."""
    max_tokens: int = 2048
    max_bad_share: float = 0.05


def run(config: VocabConfig) -> None:
    require(
        (config.features is None) != (config.data is None), "features", config.features, "give it or data, not both"
    )
    output = Path(config.output).absolute()
    rule = "must be a file in a folder that exists"
    require(output.parent.is_dir() and not output.is_dir(), "output", config.output, rule)
    bad = BadSamples(config.max_bad_share)
    vocab_size, tokenizer, name = config.vocab_size, None, config.policy
    if config.policy is not None:
        vocab_size, tokenizer = read_policy_config(config.policy).vocab_size, folder_tokenizer_hash(config.policy)
    if config.features is not None:
        source = open_features(config.features, vocab_size=vocab_size, need_layers=False)
        theirs = source.info.vocab_size
        rule = f"the features are of a policy with {theirs} tokens"
        require(None in (vocab_size, theirs) or vocab_size == theirs, "policy's vocabulary", vocab_size, rule)
        both = (tokenizer, source.info.tokenizer)
        require(None in both or both[0] == both[1], "policy's tokenizer", tokenizer, "the features are of another")
        vocab_size, tokenizer = vocab_size or theirs, tokenizer or source.info.tokenizer
        name = name or source.info.policy
        documents = documents_of(source, bad)
    else:
        samples = open_samples(str(config.data), tokenizer=load_tokenizer(config.policy), max_tokens=config.max_tokens)
        documents = read(samples, bad)
    require(vocab_size is not None, "vocab_size", None, "must be given: neither a policy nor a store says it")
    counts = count_tokens(supervised_tokens(documents), int(vocab_size or 0))
    ids = choose_vocab(counts, config.size, always={*config.always, *end_ids(config.policy)})
    coverage = save_vocab(config.output, ids, counts, tokenizer=tokenizer, policy=name)
    if bad.reasons:
        print(bad.report())
    print(
        f"{config.output}: {config.size} of {vocab_size} tokens cover {coverage:.2%} of {int(counts.sum())} supervised"
    )


def read(samples: Samples, bad: BadSamples) -> Iterator[Document]:
    for i in range(len(samples)):
        try:
            documents = samples.documents(i)
        except BadSample as error:
            bad.add(i, str(error))
            bad.check()
        else:
            bad.add(i, None)
            yield from documents
    bad.check(final=True)


def end_ids(folder: str | None) -> set[int]:
    """End-of-sequence ids in a policy's config.json and generation_config.json."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json") if folder is not None else ():
        path = Path(str(folder)) / name
        value = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return found


if __name__ == "__main__":
    try:
        run(tyro.cli(VocabConfig, description=__doc__))
    except (ConfigError, StoreError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
