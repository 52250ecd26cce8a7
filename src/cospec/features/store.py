"""A folder of saved features: safetensors shards, one small index, one description.

    store.json            what defines the store: format version, policy, tap layers, sizes, dtype, settings
    policy.safetensors    optional: the policy's embeddings, final norm and head
    shard-00000.safetensors ...
    index.safetensors     where every document lies; written last, so its presence means "complete"

A shard holds the documents of a fixed range of source samples, concatenated:
`input_ids` int32 [S], `loss_mask` bool [S] (unshifted), `taps` [S, P * Dt], `last_hidden`
[S, Dt], and per document `lengths`, `source`, `supervised`, `key`. A shard depends on its own
samples only, so an interrupted extraction writes the missing ones and the store is the
same to the bit. Files appear under their names when they are whole (temporary name, fsync,
rename); nothing here is a pickle.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cospec.config import ConfigError, require
from cospec.durable import fsync
from cospec.features.source import BadSample, FeatureDocument, FeatureInfo, FeatureSource, check_sample, token_key
from cospec.records import Document

FORMAT, FORMAT_VERSION = "cospec-features", 1
DESCRIPTION, INDEX, POLICY = "store.json", "index.safetensors", "policy.safetensors"
TEMPORARY = ".writing-"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
PER_DOCUMENT = ("lengths", "source", "supervised", "key")


class StoreError(RuntimeError):
    """A store that cannot be written or read; names the file and the reason."""


def shard_name(shard: int) -> str:
    return f"shard-{shard:05d}.safetensors"


class StoreWriter:
    """Writes a store, or goes on with one; several processes may write different shards.

    Args:
        info: what defines the store. `info.settings` must fix the shards' content.
        num_shards: of the whole store.
        first: one process makes it with True, before the others make theirs with False. It
            creates the description, removes leftovers of a killed writer, and keeps other
            runs out for as long as it lives.

    Raises:
        ConfigError: the folder holds a store with another definition (names the setting and
            both values), or anything else.
        StoreError: another run is writing the same store; the disk is full (nothing half
            written is left behind, complete shards stay).
    """

    def __init__(self, folder: str | Path, info: FeatureInfo, *, num_shards: int, first: bool = True):
        require(num_shards >= 1, "num_shards", num_shards, "must be >= 1: there is nothing to extract")
        require(info.dtype in DTYPES, "dtype", info.dtype, f"must be one of {', '.join(DTYPES)}")
        self.folder, self.info, self.num_shards = Path(folder), info, num_shards
        self.dtype = DTYPES[str(info.dtype)]
        self.description = _describe(info, num_shards)
        self._lock: Any = None
        if first:
            self._begin()

    def _begin(self) -> None:
        path = self.folder / DESCRIPTION
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("output", str(self.folder), f"cannot be made: {error.strerror}") from error
        if not path.exists():
            strange = [p.name for p in self.folder.iterdir() if not p.name.startswith(TEMPORARY)]
            require(not strange, "output", str(self.folder), f"is no feature store and holds {', '.join(strange[:3])}")
            with _atomic(path) as temporary:
                temporary.write_text(json.dumps(self.description, indent=1) + "\n")
        self._lock = open(path)  # noqa: SIM115  (held, and let go when the process ends)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StoreError(f"{self.folder}: another extraction is writing this store") from error
        _check_same(json.loads(path.read_text()), self.description, str(self.folder))
        for left in self.folder.glob(f"{TEMPORARY}*"):
            left.unlink()

    def missing(self) -> list[int]:
        """Shards that are not there yet."""
        return [i for i in range(self.num_shards) if not (self.folder / shard_name(i)).exists()]

    def write_shard(
        self,
        shard: int,
        documents: Sequence[tuple[int, FeatureDocument]],
        skipped: Sequence[tuple[str, str]] = (),
    ) -> int:
        """Write one shard; returns its bytes.

        Args:
            documents: (source sample, document) in order. One that must not be trained on
                (see `check_sample`) is left out and listed with the skipped.
            skipped: (name, reason) of samples that were left out before.
        """
        kept: list[tuple[int, FeatureDocument]] = []
        left_out = list(skipped)
        for source, document in documents:
            try:
                if document.last_hidden is None:
                    raise BadSample(document.name, "has no last hidden state")
                taps, last = document.taps.to("cpu", self.dtype), document.last_hidden.to("cpu", self.dtype)
                # After the cast: float16 makes infinities of large values.
                kept.append((source, check_sample(replace(document, taps=taps, last_hidden=last), self.info)))
            except BadSample as error:
                left_out.append((error.name, error.reason))
        width = int(self.info.hidden_size or 0)
        docs = [d for _, d in kept]

        def cat(parts: list[Tensor], *shape: int, dtype: torch.dtype) -> Tensor:
            return torch.cat([p.to("cpu", dtype) for p in parts]) if parts else torch.zeros(0, *shape, dtype=dtype)

        def per_document(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64)

        tensors = {
            "lengths": per_document([d.input_ids.numel() for d in docs]),
            "source": per_document([s for s, _ in kept]),
            "supervised": per_document([int(d.loss_mask[1:].sum()) for d in docs]),
            "key": per_document([_signed(token_key(d.input_ids.cpu())) for d in docs]),
            "input_ids": cat([d.input_ids for d in docs], dtype=torch.int32),
            "loss_mask": cat([d.loss_mask for d in docs], dtype=torch.bool),
            "taps": cat([d.taps for d in docs], int(self.info.num_taps or 0) * width, dtype=self.dtype),
            "last_hidden": cat([d.last_hidden for d in docs if d.last_hidden is not None], width, dtype=self.dtype),
        }
        # One metadata key: safetensors writes several in an order of their own.
        about = {"shard": shard, "store": self.description["id"], "skipped": left_out}
        return write_tensors(self.folder / shard_name(shard), tensors, about)

    def finish(self) -> None:
        """Write the index once every shard is there. Raises StoreError naming missing or foreign shards,
        ConfigError when no document is left."""
        missing = self.missing()
        if missing:
            raise StoreError(f"{self.folder}: cannot finish, {len(missing)} shards are missing, first {missing[0]}")
        arrays, skipped, sizes = _scan(self.folder, range(self.num_shards), self.description["id"])
        if not len(arrays["lengths"]):
            reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped[:5])
            raise ConfigError("features", str(self.folder), f"no document could be kept ({reasons})")
        about = {"store": self.description["id"], "skipped": skipped, "bytes": sizes}
        write_tensors(self.folder / INDEX, arrays, about)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


class FeatureStore(FeatureSource):
    """Lazy reader of a store: opening reads the index, a document is read when it is asked for.

    Args:
        allow_incomplete: read the shards that are there while an extraction is under way.
        open_shards: memory-mapped files kept open; more of them only saves reopening (0.1 ms).

    Raises ConfigError: no store, an unfinished or an empty one, or one of a later format.
    StoreError: damaged files, when they are met.
    """

    verified = True

    def __init__(self, folder: str | Path, *, allow_incomplete: bool = False, open_shards: int = 4):
        self.folder = Path(folder)
        self.description = read_description(self.folder)
        self.info = _info(self.description)
        self.complete = (self.folder / INDEX).exists()
        self.num_shards: int = self.description["num_shards"]
        if self.complete:
            arrays, about = _read_all(self.folder / INDEX, ("shard", "start", *PER_DOCUMENT))
            if about.get("store") != self.description["id"]:
                raise StoreError(f"{self.folder / INDEX}: belongs to another store than {DESCRIPTION}")
            self.skipped: list[tuple[str, str]] = [tuple(s) for s in about["skipped"]]
            self.shard_bytes: dict[str, int] = about["bytes"]
        else:
            present = [i for i in range(self.num_shards) if (self.folder / shard_name(i)).exists()]
            rule = f"its extraction is not finished: {len(present)} of {self.num_shards} shards are there; run it again"
            require(allow_incomplete, "features", str(folder), rule)
            arrays, self.skipped, self.shard_bytes = _scan(self.folder, present, self.description["id"])
        require(len(arrays["lengths"]) > 0, "features", str(folder), "the store holds no documents")
        self.arrays = {name: value.numpy() for name, value in arrays.items()}
        self._open_shards = open_shards
        self._files: OrderedDict[int, dict[str, Any]] = OrderedDict()

    def __len__(self) -> int:
        return len(self.arrays["lengths"])

    @property
    def num_tokens(self) -> int:
        return int(self.arrays["lengths"].sum())

    @property
    def num_bytes(self) -> int:
        return sum(self.shard_bytes.values())

    def name(self, index: int) -> str:
        return f"{self.folder}, document {index} (sample {self.arrays['source'][index]})"

    def split_key(self, index: int) -> int:
        return int(self.arrays["key"][index]) % 2**64

    def __getitem__(self, index: int) -> FeatureDocument:
        ids, mask, taps, last = self._read(index, "input_ids", "loss_mask", "taps", "last_hidden")
        return FeatureDocument(ids.to(torch.int64), mask, taps, last, self.name(index))

    def tokens(self, index: int) -> Document:
        ids, mask = self._read(index, "input_ids", "loss_mask")
        return Document(ids.to(torch.int64), mask)

    def as_dataset(self):
        """A `datasets.Dataset` of `input_ids`, `loss_mask`, `taps` and `last_hidden` that reads on access."""
        from datasets import Dataset

        def read(rows: dict) -> dict:
            documents = [self[i] for i in rows["document"]]
            return {n: [getattr(d, n) for d in documents] for n in ("input_ids", "loss_mask", "taps", "last_hidden")}

        return Dataset.from_dict({"document": range(len(self))}).with_transform(read)

    def close(self) -> None:
        self._files.clear()

    def _read(self, index: int, *names: str) -> list[Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        start, length = int(self.arrays["start"][index]), int(self.arrays["lengths"][index])
        slices = self._shard(int(self.arrays["shard"][index]))
        # Copies: a view would keep the whole mapped file alive.
        return [slices[name][start : start + length].clone() for name in names]

    def _shard(self, shard: int) -> dict[str, Any]:
        if shard in self._files:
            self._files.move_to_end(shard)
            return self._files[shard]
        path = self.folder / shard_name(shard)
        try:
            size = path.stat().st_size
            if size != self.shard_bytes[path.name]:
                raise StoreError(f"{path}: has {size} bytes, the index says {self.shard_bytes[path.name]}")
            file = safe_open(str(path), framework="pt", device="cpu")
            slices = {n: file.get_slice(n) for n in ("input_ids", "loss_mask", "taps", "last_hidden")}
        except (OSError, SafetensorError) as error:
            raise StoreError(f"{path}: cannot be read ({error})") from error
        while len(self._files) >= self._open_shards:
            self._files.popitem(last=False)
        self._files[shard] = slices
        return slices


def read_description(folder: str | Path) -> dict[str, Any]:
    """store.json, checked. Raises ConfigError."""
    path = Path(folder) / DESCRIPTION
    require(path.is_file(), "features", str(folder), f"is no feature store: it has no {DESCRIPTION}")
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError("features", str(path), f"is damaged: {error}") from error
    require(isinstance(raw, dict) and raw.get("format") == FORMAT, "features", str(path), f"is not a {FORMAT} store")
    version = raw.get("format_version")
    ok = isinstance(version, int) and version <= FORMAT_VERSION
    require(ok, "features", str(path), f"format version {version}, this cospec reads up to {FORMAT_VERSION}")
    return raw


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> int:
    """Write one safetensors file, whole or not at all; returns its bytes. Raises StoreError."""
    with _atomic(path) as temporary:
        save_file(dict(tensors), temporary, metadata={"cospec": json.dumps(about, sort_keys=True)})
    return path.stat().st_size


@contextmanager
def _atomic(path: Path) -> Iterator[Path]:
    """A temporary name to write to, that becomes `path` when all of it is on disk."""
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    try:
        yield temporary
        os.chmod(temporary, 0o666 & ~_umask())  # safetensors makes files that only their owner can read
        fsync(temporary)
        os.replace(temporary, path)
        fsync(path.parent)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):  # the folder itself may be what is wrong
            temporary.unlink()
        raise StoreError(f"cannot write {path}: {error}; what was complete before is still there") from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _describe(info: FeatureInfo, num_shards: int) -> dict[str, Any]:
    raw = {"format": FORMAT, "format_version": FORMAT_VERSION, "num_shards": num_shards}
    raw |= {k: v for k, v in asdict(info).items() if k != "format"}
    raw = json.loads(json.dumps(raw))  # tuples become lists, as a reader sees them
    return raw | {"id": hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()[:16]}


def _info(raw: Mapping[str, Any]) -> FeatureInfo:
    names = {f.name for f in fields(FeatureInfo)} - {"format"}
    values: dict[str, Any] = {k: v for k, v in raw.items() if k in names}
    values["tap_layers"] = tuple(values["tap_layers"])
    return FeatureInfo(format="cospec", **values)


def _check_same(saved: Any, ours: Any, where: str, name: str = "") -> None:
    if isinstance(saved, dict) and isinstance(ours, dict):
        for key in sorted((saved.keys() | ours.keys()) - {"id"}):
            _check_same(saved.get(key), ours.get(key), where, f"{name}.{key}" if name else key)
    elif saved != ours:
        raise ConfigError(name, ours, f"the store in {where} was begun with {saved!r}; choose another folder")


def _scan(
    folder: Path, shards: Sequence[int], store: str
) -> tuple[dict[str, Tensor], list[tuple[str, str]], dict[str, int]]:
    """Index arrays, skipped samples and file sizes, from the small tensors of the shards."""
    found: dict[str, list[Tensor]] = {n: [] for n in ("shard", "start", *PER_DOCUMENT)}
    skipped, sizes = [], {}
    for shard in shards:
        path = folder / shard_name(shard)
        tensors, about = _read_all(path, PER_DOCUMENT)
        if about.get("store") != store or about.get("shard") != shard:
            raise StoreError(f"{path}: belongs to another store or place; remove it and run the extraction again")
        lengths = tensors["lengths"]
        found["shard"].append(torch.full_like(lengths, shard))
        found["start"].append(torch.cumsum(lengths, 0) - lengths)
        for name, value in tensors.items():
            found[name].append(value)
        skipped += [tuple(s) for s in about["skipped"]]
        sizes[path.name] = path.stat().st_size
    empty = torch.zeros(0, dtype=torch.int64)
    return {name: torch.cat([empty, *parts]) for name, parts in found.items()}, skipped, sizes


def _read_all(path: Path, names: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            about = json.loads((file.metadata() or {}).get("cospec", "{}"))
            return {name: file.get_tensor(name).clone() for name in names}, about
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{path}: cannot be read ({error})") from error


def _signed(key: int) -> int:
    return key - 2**64 if key >= 2**63 else key
