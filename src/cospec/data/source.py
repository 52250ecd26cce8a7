"""Where documents come from: jsonl, text, `datasets` folders; a resumable stream of batches.

Sources are lazy sequences: opening one indexes it, a document is read when it is asked
for. Every source refuses a document that supervises nothing and names it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from cospec.records import Document

Tokenize = Callable[[str], Sequence[int]]
"""Text to token ids, for example `lambda text: tokenizer(text)["input_ids"]`."""


class LazyDocuments(Sequence[Document]):
    """A sequence whose documents are made on access; slices are lists."""

    def __init__(self, length: int, read: Callable[[int], Document]):
        self._length = length
        self._read = read

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self._read(i) for i in range(*index.indices(self._length))]
        if not -self._length <= index < self._length:
            raise IndexError(f"document {index} of {self._length}")
        return self._read(index % self._length)


def make_document(fields: dict, name: str, tokenize: Tokenize | None = None, max_tokens: int | None = None) -> Document:
    """A document of `input_ids` (and `loss_mask`), or of `text` with a tokenizer.

    Without `loss_mask` every token but the first is supervised. `max_tokens` cuts the end.

    Raises:
        ValueError: naming `name`, for missing or misshapen fields, and for a mask that
            supervises no token (the first cannot be: nobody predicts it).
    """
    if fields.get("input_ids") is not None:
        ids = _values(fields["input_ids"], "input_ids", name)
    elif fields.get("text") is not None:
        if tokenize is None:
            raise ValueError(f"{name}: has `text` but there is no tokenizer here: give `input_ids`")
        ids = _values(tokenize(fields["text"]), "the tokens of `text`", name)
    else:
        wanted = "`input_ids`" if tokenize is None else "`input_ids` or `text`"
        raise ValueError(f"{name}: needs {wanted}, has {sorted(fields)}")
    if not ids or not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 2**63 for i in ids):
        raise ValueError(f"{name}: input_ids must be a non-empty list of integers in 0..2**63-1")
    mask = fields.get("loss_mask")
    mask = [1] * len(ids) if mask is None else _values(mask, "loss_mask", name)
    if len(mask) != len(ids) or not all(m in (0, 1) for m in mask):
        raise ValueError(f"{name}: loss_mask must hold {len(ids)} values 0 or 1, one per token")
    if max_tokens is not None and max_tokens < 2:
        raise ValueError(f"max_tokens={max_tokens} must be >= 2: a document needs a token to predict")
    ids, mask = ids[:max_tokens], mask[:max_tokens]
    mask[0] = 0
    if not any(mask):
        cut = "" if max_tokens is None else f" in its first {max_tokens} tokens"
        raise ValueError(f"{name}: loss_mask supervises no token{cut}; remove the sample or mend its mask")
    return Document(torch.tensor(ids, dtype=torch.int64), torch.tensor(mask, dtype=torch.bool))


def _values(value: object, field: str, name: str) -> list:
    """`value` as a list. Raises ValueError for what has no elements, as a single number."""
    if isinstance(value, torch.Tensor) and value.ndim:
        return value.tolist()
    if not isinstance(value, Iterable):
        raise ValueError(f"{name}: {field} must be a list, is a {type(value).__name__}")
    return list(value)


def read_jsonl(path: str | Path, *, tokenize: Tokenize | None = None, max_tokens: int | None = None) -> LazyDocuments:
    """One document per line of a jsonl file: see `make_document` for the fields.

    Opening reads the file once for the places of its lines; blank lines are passed over.
    A malformed line raises ValueError with `file:line` when it is read.
    """
    path = Path(path)
    places: list[tuple[int, int]] = []  # (line number from 1, byte offset)
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                places.append((number, offset))
            offset += len(line)
    if not places:
        raise ValueError(f"{path}: holds no documents")

    def read(index: int) -> Document:
        number, start = places[index]
        name = f"{path}:{number}"
        with path.open("rb") as file:
            file.seek(start)
            line = file.readline()
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{name}: not a JSON line: {error}") from error
        if not isinstance(fields, dict):
            raise ValueError(f"{name}: must be a JSON object, is a {type(fields).__name__}")
        return make_document(fields, name, tokenize, max_tokens)

    return LazyDocuments(len(places), read)


def read_text(path: str | Path, *, tokenize: Tokenize, max_tokens: int) -> list[Document]:
    """A text file, cut at blank lines into documents, those again into pieces of `max_tokens`.

    Pieces of a single token, which supervise nothing, are left out.
    """
    if max_tokens < 2:
        raise ValueError(f"max_tokens={max_tokens} must be >= 2: a document needs a token to predict")
    documents = []
    for paragraph in Path(path).read_text(encoding="utf-8").split("\n\n"):
        ids = list(tokenize(paragraph.strip("\n"))) if paragraph.strip() else []
        for start in range(0, len(ids), max_tokens):
            piece = ids[start : start + max_tokens]
            if len(piece) > 1:
                documents.append(make_document({"input_ids": piece}, f"{path}, piece {len(documents)}"))
    if not documents:
        raise ValueError(f"{path}: holds no documents")
    return documents


def read_dataset(
    folder: str | Path, *, split: str | None = None, tokenize: Tokenize | None = None, max_tokens: int | None = None
) -> LazyDocuments:
    """A folder written by `datasets`' `save_to_disk`, memory-mapped; columns as in `make_document`.

    split: of a folder with several; each is also a folder of its own in it.
    """
    from datasets import DatasetDict, load_from_disk

    try:
        dataset = load_from_disk(str(folder))
    except FileNotFoundError as error:
        raise ValueError(f"{folder}: is no folder of datasets.save_to_disk") from error
    except Exception as error:  # whatever damaged files do to its parsers; one without rows is an IndexError
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{folder}: datasets cannot load it, it is damaged or holds no documents ({what})") from error
    if isinstance(dataset, DatasetDict):
        splits = sorted(map(str, dataset))
        split = splits[0] if split is None and len(splits) == 1 else split
        if split not in splits:
            given = "" if split is None else f", not {split}"
            rule = f"name one of them, or its folder, as {folder}/{splits[0]}"
            raise ValueError(f"{folder}: holds the splits {', '.join(splits)}{given}: {rule}")
        dataset = dataset[split]
    if len(dataset) == 0:
        raise ValueError(f"{folder}: holds no documents")
    return LazyDocuments(
        len(dataset), lambda i: make_document(dataset[i], f"{folder}, sample {i}", tokenize, max_tokens)
    )


def synthetic_documents(
    count: int, vocab_size: int, *, seed: int, length: tuple[int, int] = (16, 64)
) -> list[Document]:
    """Learnable nonsense: each token follows from the last by a fixed rule, with one in ten at random.

    Lengths are uniform in `length`; the first quarter of a document is a prompt (not supervised).
    """
    shortest, longest = length
    if not 2 <= shortest <= longest:
        raise ValueError(f"length={length} must be (shortest, longest) with 2 <= shortest <= longest")
    generator = torch.Generator().manual_seed(seed)
    successor = torch.randperm(vocab_size, generator=generator)
    documents = []
    for _ in range(count):
        size = int(torch.randint(shortest, longest + 1, (), generator=generator))
        ids = torch.randint(vocab_size, (size,), generator=generator)
        keep = torch.rand(size, generator=generator) < 0.9
        for i in range(1, size):
            if keep[i]:
                ids[i] = successor[ids[i - 1]]
        documents.append(Document(ids, torch.arange(size) >= max(1, size // 4)))
    return documents


class DocumentStream:
    """Batches of documents in an order that depends on the seed and the step alone.

    The global sample i is document `order(epoch)[i % n]` with `epoch = i // n`; each epoch
    has an order of its own. Nothing depends on the number of ranks: all of them see the
    whole batch and the packer deals it out.

    `batch(step, count)` is a pure function. `next_batch(count)` walks on from a position
    that `state()` and `load_state()` keep.
    """

    def __init__(self, documents: Sequence[Document], seed: int):
        if len(documents) < 1:
            raise ValueError("a DocumentStream needs at least one document")
        self.documents = documents
        self.seed = seed
        self.position = 0
        self._cached: tuple[int, list[int]] = (-1, [])

    def batch(self, step: int, count: int) -> list[Document]:
        """Documents of samples `step * count` up to `(step + 1) * count`."""
        return [self.documents[i] for i in self._indices(step * count, count)]

    def indices(self, step: int, count: int) -> list[int]:
        """Which documents `batch(step, count)` reads."""
        return list(self._indices(step * count, count))

    def next_batch(self, count: int) -> list[Document]:
        found = [self.documents[i] for i in self._indices(self.position, count)]
        self.position += count
        return found

    def state(self) -> dict[str, int]:
        return {"position": self.position, "seed": self.seed, "num_documents": len(self.documents)}

    def load_state(self, state: dict[str, int]) -> None:
        """Raises ValueError when the state is of another seed or number of documents."""
        for name, value in (("seed", self.seed), ("num_documents", len(self.documents))):
            if state[name] != value:
                raise ValueError(f"the saved data stream has {name}={state[name]}, this run has {name}={value}")
        self.position = state["position"]

    def _indices(self, first: int, count: int) -> Iterator[int]:
        if first < 0 or count < 1:
            raise ValueError(f"a batch needs a step >= 0 and count >= 1, got first sample {first}, count {count}")
        for sample in range(first, first + count):
            epoch, place = divmod(sample, len(self.documents))
            if self._cached[0] != epoch:
                self._cached = (epoch, self._order(epoch))
            yield self._cached[1][place]

    def _order(self, epoch: int) -> list[int]:
        digest = hashlib.sha256(f"documents/{self.seed}/{epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return torch.randperm(len(self.documents), generator=generator).tolist()
