"""Samples to extract features of: jsonl, text or `datasets` folders; token ids, text or chat messages.

A sample is read when it is asked for. One that cannot be used (bad JSON, a template error, no
supervised token) raises BadSample with its name; the extraction goes on without it.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cospec.config import ConfigError, require
from cospec.data.source import make_document, read_text
from cospec.features.source import BadSample
from cospec.records import Document


class Samples:
    """A sequence of samples, each of which gives one document, or several (see `encode_chat`).

    fingerprint: hash of the content, so that a store is not continued from another file.
    """

    def __init__(
        self,
        length: int,
        fields: Callable[[int], Mapping[str, Any]],
        name: Callable[[int], str],
        fingerprint: str,
        tokenizer: Any = None,
        max_tokens: int | None = None,
    ):
        self._length, self._fields, self.name, self.fingerprint = length, fields, name, fingerprint
        self.tokenizer, self.max_tokens = tokenizer, max_tokens

    def __len__(self) -> int:
        return self._length

    def documents(self, index: int) -> list[Document]:
        """The documents of a sample, cut to `max_tokens`. Raises BadSample."""
        name = self.name(index)
        try:
            fields = dict(self._fields(index))
            messages = fields.get("messages") or fields.get("conversations")
            if messages is None or fields.get("input_ids") is not None:
                return [make_document(fields, name, self._tokenize(), self.max_tokens)]
            require(self.tokenizer is not None, "tokenizer", None, "must be given: the samples are chat messages")
            encoded = encode_chat(self.tokenizer, messages)
            return [
                make_document({"input_ids": ids, "loss_mask": mask}, name, None, self.max_tokens)
                for ids, mask in encoded
            ]
        except ConfigError:
            raise
        except Exception as error:  # a chat template may raise anything
            text = str(error).removeprefix(f"{name}: ")
            raise BadSample(
                name, text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
            ) from error

    def _tokenize(self) -> Callable[[str], Sequence[int]] | None:
        if self.tokenizer is None:
            return None
        return lambda text: self.tokenizer(text)["input_ids"]


def open_samples(
    path: str | Path, *, tokenizer: Any = None, max_tokens: int | None = None, split: str | None = None
) -> Samples:
    """`.jsonl`, any other file as text, or a folder of `datasets.save_to_disk`.

    Raises ConfigError for a path without samples, or text without a tokenizer.
    """
    path = Path(path)
    require(path.exists(), "data", str(path), "does not exist")
    if path.is_dir():
        return _open_dataset(path, split, tokenizer, max_tokens)
    with open(path, "rb") as file:
        fingerprint = hashlib.file_digest(file, "sha256").hexdigest()
    if path.suffix != ".jsonl":
        require(tokenizer is not None, "tokenizer", None, f"must be given: {path} is text")
        require(max_tokens is not None, "max_tokens", None, f"must be given: {path} is cut into pieces of it")
        try:
            pieces = read_text(path, tokenize=lambda t: tokenizer(t)["input_ids"], max_tokens=int(max_tokens or 0))
        except ValueError as error:
            raise ConfigError("data", str(path), str(error)) from error
        return Samples(
            len(pieces), lambda i: {"input_ids": pieces[i].input_ids}, lambda i: f"{path}, piece {i}", fingerprint
        )
    numbers, offsets, offset = array("q"), array("q"), 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                numbers.append(number)
                offsets.append(offset)
            offset += len(line)
    require(len(offsets) > 0, "data", str(path), "holds no samples")

    def fields(index: int) -> Mapping[str, Any]:
        with open(path, "rb") as file:
            file.seek(offsets[index])
            value = json.loads(file.readline())
        if not isinstance(value, dict):
            raise ValueError(f"must be a JSON object, is a {type(value).__name__}")
        return value

    return Samples(len(offsets), fields, lambda i: f"{path}:{numbers[i]}", fingerprint, tokenizer, max_tokens)


def _open_dataset(path: Path, split: str | None, tokenizer: Any, max_tokens: int | None) -> Samples:
    from datasets import DatasetDict, load_from_disk

    try:
        table = load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise ConfigError("data", str(path), f"is no folder of datasets.save_to_disk ({error})") from error
    if isinstance(table, DatasetDict):
        require(split in table, "split", split, f"must be one of {', '.join(map(str, table))}")
        table = table[split]
    require(len(table) > 0, "data", str(path), "holds no samples")
    name = f"{path}" if split is None else f"{path} {split}"
    return Samples(
        len(table), lambda i: table[i], lambda i: f"{name}, sample {i}", table._fingerprint, tokenizer, max_tokens
    )


def encode_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[tuple[list[int], list[int]]]:
    """(input_ids, loss_mask) of a conversation, as serving would have produced them.

    Every assistant turn is rendered after the prompt that serving would have given it, with all
    that the turn says, its thinking too. Where a template changes earlier turns (many drop
    their thinking) the turns cannot share one sequence, and the conversation gives one
    document per such turn; else it is one document. Supervised are the assistant's tokens up to
    the end-of-sequence token.

    Raises ValueError for messages without an assistant turn, or a template that does not go on
    from its own generation prompt; whatever the template raises.
    """
    turns = [_plain(m) for m in messages]
    found: list[tuple[list[int], list[int], str]] = []
    for i, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        prompt = tokenizer.apply_chat_template(turns[:i], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(turns[: i + 1], tokenize=False)
        if not whole.startswith(prompt):
            raise ValueError(f"chat template: turn {i} does not go on from its own generation prompt")
        ids, mask, before = [], [], ""
        if found and prompt.startswith(found[-1][2]):
            ids, mask, before = found.pop()
        prompt_ids = tokenizer(prompt[len(before) :], add_special_tokens=False)["input_ids"]
        answer_ids = list(tokenizer(whole[len(prompt) :], add_special_tokens=False)["input_ids"])
        end = tokenizer.eos_token_id
        spoken = len(answer_ids) - answer_ids[::-1].index(end) if end in answer_ids else len(answer_ids)
        ids = [*ids, *prompt_ids, *answer_ids]
        mask = [*mask, *[0] * len(prompt_ids), *[1] * spoken, *[0] * (len(answer_ids) - spoken)]
        found.append((ids, mask, whole))
    if not found:
        raise ValueError("no assistant turn: nothing to supervise")
    return [(ids, mask) for ids, mask, _ in found]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in the role/content form; ShareGPT's from/value is translated."""
    if "role" in message:
        return {k: v for k, v in message.items() if v is not None}
    names = {"human": "user", "gpt": "assistant", "system": "system", "tool": "tool"}
    speaker = message.get("from")
    if speaker not in names:
        raise ValueError(f"message of {speaker!r}: must have a role, or be from one of {', '.join(names)}")
    return {"role": names[speaker], "content": message["value"]}


def check_document(document: Document, name: str, vocab_size: int, longest: int) -> None:
    """Raise BadSample for ids outside the vocabulary, or more tokens than a row or the policy has room for."""
    low, high = torch.aminmax(document.input_ids)
    if int(low) < 0 or int(high) >= vocab_size:
        raise BadSample(name, f"token id {int(high)} is outside 0..{vocab_size - 1}")
    if document.input_ids.numel() > longest:
        raise BadSample(name, f"has {document.input_ids.numel()} tokens, at most {longest} fit; set max_tokens")


def load_tokenizer(folder: str | None) -> Any:
    """The tokenizer of a folder; None where there is none, or no transformers to read it."""
    if folder is None or not any((Path(folder) / n).is_file() for n in ("tokenizer.json", "tokenizer_config.json")):
        return None
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError("tokenizer", folder, "needs the package transformers: pip install transformers") from error
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)
