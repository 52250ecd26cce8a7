"""Saved features of SpecForge and speculators behind the interface of our own store.

    SpecForge      rows_{a}-{b}/data_{i}.ckpt[.gz], a torch.save dict per sample
                   EAGLE-3 form: aux_hidden_state (taps) and hidden_state (after the final norm)
                   DFlash form:  hidden_states (taps), maybe target_last_hidden_states (after the final norm)
    speculators    a `datasets` folder with hidden_states/hs_{row}.safetensors: hidden_states [T, L, D],
                   of which [:, -1] is the last layer before the final norm
    legacy         data_{i}.pt: v1 hidden_states, a list, the last before the norm;
                   v0 hidden_state (taps) and target (after the norm)

Pickles are opened with `weights_only=True`, which runs no code; files that need more are
refused. Opening a folder lists names and reads one sample; the others are read, and judged, when
they are asked for.
"""

from __future__ import annotations

import gzip
import io
import pickle
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cospec.config import ConfigError, require
from cospec.features.source import BadSample, FeatureDocument, FeatureInfo, FeatureSource, check_sample, token_key
from cospec.features.store import DESCRIPTION, FeatureStore

_NUMBERED = re.compile(r"data_(\d+)\.(ckpt|ckpt\.gz|pt)")
_PROBES = 50  # samples to try for one that can be read, when a folder is opened


def open_features(
    folder: str | Path,
    *,
    tap_layers: Sequence[int] | None = None,
    vocab_size: int | None = None,
    need_layers: bool = True,
    allow_incomplete: bool = False,
) -> FeatureSource:
    """Whatever features the folder holds, ours or foreign.

    Args:
        tap_layers: 0-based layers that were tapped; foreign files do not say, so they must
            be given there, and must agree with what our own store says.
        vocab_size: of the policy; foreign samples with other ids are bad.
        need_layers: False takes foreign files without `tap_layers`, for uses that ask nothing of the taps.
        allow_incomplete: see FeatureStore.

    Raises ConfigError: no features, or tap layers missing or in disagreement.
    """
    path = Path(folder)
    require(path.is_dir(), "features", str(folder), "is no folder")
    if (path / DESCRIPTION).is_file():
        store = FeatureStore(path, allow_incomplete=allow_incomplete)
        given = None if tap_layers is None else tuple(tap_layers)
        rule = f"the store in {folder} holds the outputs of layers {store.info.tap_layers}"
        require(given in (None, store.info.tap_layers), "draft.tap_layers", given, rule)
        return store
    source = _open_foreign(path, vocab_size)
    rule = f"{folder}: {source.info.format} files do not say which layers they hold; name them (0-based)"
    require(tap_layers is not None or not need_layers, "draft.tap_layers", None, rule)
    if tap_layers is None:
        return source
    taps = tuple(tap_layers)
    count = source.info.num_taps
    require(count in (None, len(taps)), "draft.tap_layers", taps, f"{folder} holds the outputs of {count} layers")
    source.info = replace(source.info, tap_layers=taps)
    return source


def _open_foreign(path: Path, vocab_size: int | None) -> FeatureSource:
    if any(path.glob("rows_*")):
        return PickledFeatures(path, [f for d in path.glob("rows_*") for f in d.iterdir()], "specforge", vocab_size)
    if (path / "hidden_states").is_dir():
        return SpeculatorsFeatures(path, vocab_size)
    flat = [f for f in path.iterdir() if _NUMBERED.fullmatch(f.name)]
    require(bool(flat), "features", str(path), "holds no features in a form that is known (see docs/offline.md)")
    form = "speculators-legacy" if any(f.suffix == ".pt" for f in flat) else "specforge"
    return PickledFeatures(path, flat, form, vocab_size)


class PickledFeatures(FeatureSource):
    """One torch.save dict per sample: SpecForge, and speculators' former files."""

    def __init__(self, folder: Path, files: Sequence[Path], form: str, vocab_size: int | None):
        self.folder = folder
        numbered = [(int(m[1]), f) for f in files if (m := _NUMBERED.fullmatch(f.name))]
        self.files = [f for _, f in sorted(numbered)]  # indices may have gaps
        require(bool(self.files), "features", str(folder), "holds no samples")
        self.info = FeatureInfo(format=form, last_is_normed=None, vocab_size=vocab_size, policy=None)
        self.info = _learn_sizes(self, self._read)

    def __len__(self) -> int:
        return len(self.files)

    def name(self, index: int) -> str:
        return str(self.files[index].relative_to(self.folder))

    def __getitem__(self, index: int) -> FeatureDocument:
        document, normed = self._read(index)
        if document.last_hidden is not None and normed != self.info.last_is_normed:
            raise BadSample(document.name, "is in another form than the rest of the folder")
        return check_sample(document, self.info)

    def _read(self, index: int) -> tuple[FeatureDocument, bool]:
        name = self.name(index)
        raw = load_pickle(self.files[index], name)
        ids, mask = (_flat(_tensor(raw, key, name)) for key in ("input_ids", "loss_mask"))
        if raw.get("aux_hidden_state") is not None:
            taps, last, normed = _tensor(raw, "aux_hidden_state", name), _tensor(raw, "hidden_state", name), True
        elif isinstance(raw.get("hidden_states"), list | tuple):
            layers = raw["hidden_states"]
            if len(layers) < 2 or not all(isinstance(x, Tensor) for x in layers):
                raise BadSample(name, "hidden_states must list the tapped layers and the last one")
            try:
                taps = torch.cat([_rows(x) for x in layers[:-1]], dim=-1)
            except RuntimeError as error:
                raise BadSample(name, f"the layers of hidden_states differ in length ({error})") from error
            last, normed = layers[-1], False
        elif "hidden_states" in raw:
            taps, last, normed = _tensor(raw, "hidden_states", name), raw.get("target_last_hidden_states"), True
        elif "target" in raw:
            taps, last, normed = _tensor(raw, "hidden_state", name), _tensor(raw, "target", name), True
        else:
            raise BadSample(name, f"is in no known form, it has {sorted(map(str, raw))}")
        last = _rows(last) if isinstance(last, Tensor) else None
        return FeatureDocument(ids.to(torch.int64), mask.bool(), _rows(taps), last, name), normed


class SpeculatorsFeatures(FeatureSource):
    """A `datasets` folder of tokens with one safetensors file of features per row."""

    def __init__(self, folder: Path, vocab_size: int | None):
        from datasets import load_from_disk

        self.folder = folder
        try:
            self.table = load_from_disk(str(folder))
        except (OSError, ValueError) as error:
            raise ConfigError(
                "features", str(folder), f"has hidden_states but no readable dataset ({error})"
            ) from error
        columns = self.table.column_names
        lacking = [c for c in ("input_ids", "loss_mask") if c not in columns]
        require(not lacking and len(self.table) > 0, "features", str(folder), f"the dataset has columns {columns}")
        self.info = FeatureInfo(format="speculators", last_is_normed=None, vocab_size=vocab_size)
        self.info = _learn_sizes(self, lambda i: (self._read(i), False))

    def __len__(self) -> int:
        return len(self.table)

    def name(self, index: int) -> str:
        return f"hidden_states/hs_{index}.safetensors"

    def split_key(self, index: int) -> int:
        return token_key(torch.as_tensor(self.table[index]["input_ids"]))

    def __getitem__(self, index: int) -> FeatureDocument:
        return check_sample(self._read(index), self.info)

    def _read(self, index: int) -> FeatureDocument:
        path, name, row = self.folder / self.name(index), self.name(index), self.table[index]
        _refuse_locked(path, name)
        try:
            with safe_open(str(path), framework="pt", device="cpu") as file:
                hidden_TLD, token_ids = file.get_tensor("hidden_states").clone(), file.get_tensor("token_ids").clone()
        except FileNotFoundError as error:
            raise BadSample(name, "is missing") from error
        except (OSError, SafetensorError) as error:
            raise BadSample(name, f"cannot be read ({error})") from error
        ids, mask = torch.as_tensor(row["input_ids"]), torch.as_tensor(row["loss_mask"])
        if not torch.equal(token_ids.flatten().long(), ids.long()):
            raise BadSample(name, f"its {token_ids.numel()} token_ids are not the {ids.numel()} input_ids of its row")
        if hidden_TLD.ndim != 3 or hidden_TLD.shape[1] < 2:
            raise BadSample(name, f"hidden_states has shape {list(hidden_TLD.shape)}, must be [T, layers, D]")
        return FeatureDocument(ids.long(), mask.bool(), hidden_TLD[:, :-1].flatten(1), hidden_TLD[:, -1], name)


def load_pickle(path: Path, name: str) -> Mapping[str, Any]:
    """The dict in a torch.save file, compressed or not. Raises BadSample; never runs what it reads."""
    _refuse_locked(path, name)
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as file:
                content: Any = io.BytesIO(file.read())
        else:
            content = path
        raw = torch.load(content, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise BadSample(name, "is missing") from error
    except pickle.UnpicklingError as error:
        unsafe = "Unsupported" in str(error) or "weights_only" in str(error).lower()
        what = "refused, it holds more than tensors" if unsafe else "is damaged"
        raise BadSample(name, f"{what} ({_first_line(error)})") from error
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, zlib.error) as error:
        raise BadSample(name, f"is damaged or truncated ({_first_line(error)})") from error
    if not isinstance(raw, Mapping):
        raise BadSample(name, f"holds a {type(raw).__name__}, not a dict")
    return raw


def _learn_sizes(source: FeatureSource, read: Callable[[int], tuple[FeatureDocument, bool]]) -> FeatureInfo:
    """Sizes and form, from the first sample that can be read and trained on."""
    reasons = []
    for index in range(min(len(source), _PROBES)):
        try:
            document, normed = read(index)
            check_sample(document, source.info)
        except BadSample as error:
            reasons.append(str(error))
            continue
        has_last = document.last_hidden is not None
        size = document.last_hidden.shape[1] if document.last_hidden is not None else None
        width = document.taps.shape[1]
        if size is not None and width % size:
            reasons.append(f"{document.name}: taps of width {width} are no multiple of {size}")
            continue
        return replace(
            source.info,
            last_is_normed=normed if has_last else None,
            hidden_size=size,
            num_taps=None if size is None else width // size,
            dtype=str(document.taps.dtype).removeprefix("torch."),
        )
    rule = f"none of its first {len(reasons)} samples can be read: " + "; ".join(reasons[:3])
    raise ConfigError("features", str(getattr(source, "folder", "")), rule)


def _refuse_locked(path: Path, name: str) -> None:
    if path.with_name(path.name + ".lock").exists():
        raise BadSample(name, "is still being written (a lock file lies beside it)")


def _tensor(raw: Mapping[str, Any], key: str, name: str) -> Tensor:
    value = raw.get(key)
    if not isinstance(value, Tensor):
        raise BadSample(name, f"{key} is {'missing' if value is None else 'no tensor'}")
    return value


def _flat(x: Tensor) -> Tensor:
    return x[0] if x.ndim == 2 and len(x) == 1 else x


def _rows(x: Tensor) -> Tensor:
    """[T, width] of [T, width] or [1, T, width]."""
    return x[0] if x.ndim == 3 and len(x) == 1 else x


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
