"""EAGLE-3 draft folders (config.json, safetensors), in and out; see export.eagle3_config for the families.

A folder that was read can be written back with nothing lost. Nothing is unpickled, no
name, shape or dtype is taken on trust, and a draft that has not been trained is not
written: a server would run it without a word, at an acceptance length of one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cospec.config import ConfigError, Eagle3Config, require
from cospec.draft.eagle3 import Eagle3Draft, initial_values
from cospec.draft.vocab import check_vocab
from cospec.export.eagle3_config import Family, config_json, read_config
from cospec.hf import TensorFolder, write_folder

LAYER_PREFIX = {"sglang": "midlayer.", "vllm": "layers.0.", "speculators": "layers.0."}
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_draft(
    folder: str | Path, *, tap_layers: Collection[int] | None = None, ignore: Collection[str] = ()
) -> Eagle3Draft:
    """The draft of a folder, on the CPU in float32 (float64 files stay so).

    Args:
        tap_layers: 0-based layers, for a config.json that names none.
        ignore: keys of config.json and tensor names to accept although they are not
            understood; the keys are written back, the tensors are not.

    Raises ConfigError (a ValueError) naming what is missing, not understood or does not
    fit: config keys, tensor names, shapes, dtypes, the vocabulary map, an untrained head.
    """
    path = Path(folder) / "config.json"
    require(path.is_file(), "draft folder", str(folder), "must hold config.json")
    tensors = _Tensors(folder, ignore)
    config, _, kept = read_config(
        json.loads(path.read_text()),
        own_embedding="embed_tokens.weight" in tensors,
        tap_layers=tap_layers,
        ignore=ignore,
    )
    draft = Eagle3Draft(config)
    draft.kept_config = kept
    state = tensors.read(draft.state_dict(), config)
    if any(t.dtype == torch.float64 for t in state.values()):
        draft.double()
    draft.load_state_dict(state)
    _refuse_untrained(draft, draft.state_dict())
    return draft


def save_draft(
    draft: Eagle3Draft,
    folder: str | Path,
    *,
    family: Family = "vllm",
    state: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    verifier: str | None = None,
    overwrite: bool = False,
) -> None:
    """Write a draft for servers. The folder appears under its name only when complete.

    Args:
        state: whole tensors of a sharded draft (`policy.build.full_state`); one rank writes.
        dtype: of the floating tensors on disk; None keeps theirs.
        verifier: name or path of the policy, for the speculators family.
        overwrite: replace a folder that has files in it.

    Raises ConfigError for a missing, misshapen, non-finite or untrained tensor, a map that
    does not fit, or a flag that the family cannot say; FileExistsError for a folder in use.
    """
    config = draft.config
    raw = config_json(config, family, kept=draft.kept_config, verifier=verifier)
    state = dict(draft.state_dict() if state is None else state)
    for name, expected in draft.state_dict().items():
        require(name in state, "tensor", name, "is missing from the draft's state")
        tensor = state[name]
        require(not isinstance(tensor, DTensor), "tensor", name, "is a shard: give the whole state")
        _check_shape(name, tuple(tensor.shape), tuple(expected.shape))
    unknown = sorted(set(state) - set(draft.state_dict()))
    require(not unknown, "tensor", unknown, "is no part of the draft")
    check_vocab(state["d2t"], state["t2d"], config.vocab_size, config.draft_vocab_size)
    _refuse_untrained(draft, state)
    if config.draft_vocab_size == config.vocab_size:
        _refuse_permutation(state["d2t"])
        del state["d2t"], state["t2d"]
    if dtype is not None:
        state = {k: v.to(dtype) if v.is_floating_point() else v for k, v in state.items()}
    written = str(state["lm_head.weight"].dtype).removeprefix("torch.")
    raw["torch_dtype"] = written
    for settings in (raw, raw.get("transformer_layer_config", {})):
        settings.update({name: written for name in ("dtype", "torch_dtype") if name in settings})
    prefix = LAYER_PREFIX[family]
    write_folder(folder, raw, {k.replace("midlayer.", prefix, 1): v for k, v in state.items()}, overwrite=overwrite)


class _Tensors:
    """The tensors of a folder under the names of Eagle3Draft."""

    def __init__(self, folder: str | Path, ignore: Collection[str]):
        self.folder = TensorFolder(folder)
        self.names: dict[str, str] = {}
        for stored in sorted(set(self.folder) - set(ignore)):
            name = f"midlayer.{stored.removeprefix('layers.0.')}" if stored.startswith("layers.0.") else stored
            require(name not in self.names, "tensor", stored, f"is there twice, also as {self.names.get(name)}")
            self.names[name] = stored

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def read(self, expected: Mapping[str, Tensor], config: Eagle3Config) -> dict[str, Tensor]:
        unknown = sorted(set(self.names) - set(expected))
        require(not unknown, "tensor", unknown, "is not understood; config.json describes no such part")
        whole = config.draft_vocab_size == config.vocab_size
        optional = {"d2t", "t2d"} if whole else {"t2d"}  # t2d follows from d2t
        missing = sorted(set(expected) - set(self.names) - optional)
        require(not missing, "tensor", missing, "is missing: a server would run with random values")
        state = {}
        for name, stored in self.names.items():
            tensor = self.folder[stored]
            _check_shape(stored, tuple(tensor.shape), tuple(expected[name].shape))
            if expected[name].is_floating_point():
                require(tensor.dtype in FLOATS, f"dtype of {stored}", tensor.dtype, "must be a plain floating type")
            else:
                kind = expected[name].dtype
                require(tensor.dtype == kind, f"dtype of {stored}", tensor.dtype, f"must be {kind}")
            state[name] = tensor
        state.setdefault("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        if "t2d" not in state:
            ids = state["d2t"] + torch.arange(config.draft_vocab_size)
            low, high = int(ids.min()), int(ids.max())
            require(
                low >= 0 and high < config.vocab_size, "d2t", (low, high), f"ids must be 0..{config.vocab_size - 1}"
            )
            state["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
        check_vocab(state["d2t"], state["t2d"], config.vocab_size, config.draft_vocab_size)
        if whole:
            _refuse_permutation(state["d2t"])
        return state


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    require(shape == expected, f"shape of {name}", shape, f"config.json asks for {expected}")


def _refuse_permutation(d2t: Tensor) -> None:
    require(not bool(d2t.any()), "d2t", "not zero", "a draft with the whole vocabulary has the policy's ids")


def _refuse_untrained(draft: Eagle3Draft, state: Mapping[str, Tensor]) -> None:
    """No NaN or infinity anywhere, no constant matrix, none that still holds its initial draw."""
    for name, _ in draft.named_parameters():
        tensor = state[name].detach()
        if not bool(torch.isfinite(tensor).all()):
            raise ConfigError("tensor", name, "holds NaN or infinity")
        if tensor.ndim < 2:
            continue
        if bool((tensor == tensor.flatten()[0]).all()):
            raise ConfigError("tensor", name, "holds one value everywhere: it was never trained")
        if draft.init_seed is None:
            continue
        drawn = initial_values(name, tuple(tensor.shape), draft.init_seed)
        if torch.equal(tensor.cpu().to(torch.float32), drawn):
            raise ConfigError("tensor", name, "still holds the values it was initialised with: train it first")
