"""EAGLE-3 draft folders (config.json, safetensors, README.md), in and out; see export.eagle3_config for the families.

A folder that was read can be written back with nothing lost. Nothing is unpickled, no
name, shape or dtype is taken on trust, and a draft that has not been trained is not
written: a server would run it without a word, at an acceptance length of one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from cospec.config import ConfigError, Eagle3Config, require
from cospec.draft.eagle3 import Eagle3Draft, initial_values
from cospec.draft.vocab import check_vocab
from cospec.durable import new_folder
from cospec.export.card import CARD, Card, card_text, commit
from cospec.export.eagle3_config import Family, config_json, read_config
from cospec.export.files import check_inside, open_tensors, read_json, write_json
from cospec.tensor_writer import Spec, TensorWriter, file_order

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
    raw = read_raw(folder)
    tensors = _Tensors(folder, ignore)
    config, _, kept = read_config(
        raw,
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
    for name, parameter in draft.named_parameters():
        _refuse_untrained(draft, name, parameter)
    return draft


def read_raw(folder: str | Path) -> dict[str, Any]:
    """The config.json of a draft folder; raises ConfigError where there is none to read."""
    path = Path(folder) / "config.json"
    require(path.is_file(), "draft folder", str(folder), "must hold config.json")
    check_inside(path, Path(folder))
    return read_json(path)


def save_draft(
    draft: Eagle3Draft,
    folder: str | Path,
    *,
    family: Family = "vllm",
    state: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    verifier: str | None = None,
    card: Card | None = None,
    max_shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
    ignore: Collection[str] = (),
) -> None:
    """Write a draft for servers. The folder appears under its name only when complete.

    A sharded draft (FSDP2): all ranks that share it call this together; one tensor at a time
    is gathered, the first rank writes, and an error on any rank is raised on all.

    Args:
        state: whole tensors to write instead of the draft's own, read one at a time.
        dtype: of the floating tensors on disk; None keeps the draft's.
        verifier: name or path of the policy; the speculators family cannot do without.
        card: what README.md says of policy, data, acceptance and commit.
        max_shard_bytes: of tensor data in one file; more makes several files and an index.
        overwrite: replace a folder that has files in it.
        ignore: see `config_json`.

    Raises ConfigError for a missing, misshapen, non-finite or untrained tensor, a map that
    does not fit, or a flag that the family cannot say; FileExistsError for a folder in use.
    """
    config = draft.config
    raw = config_json(config, family, kept=draft.kept_config, verifier=verifier, ignore=ignore)
    own = draft.state_dict()
    source = own if state is None else state
    for name in own:
        require(name in source, "tensor", name, "is missing from the draft's state")
    unknown = sorted(set(source) - set(own))
    require(not unknown, "tensor", unknown, "is no part of the draft")
    names = _check_maps(source, config)
    floating = dtype or own["lm_head.weight"].dtype
    prefix = LAYER_PREFIX[family]
    stored = {name.replace("midlayer.", prefix, 1): name for name in names}
    specs = [
        Spec(new, tuple(own[old].shape), floating if own[old].is_floating_point() else own[old].dtype)
        for new, old in sorted(stored.items())
    ]
    _say_dtype(raw, str(floating).removeprefix("torch."))
    card = card or Card(policy=verifier, commit=commit())
    ranks = _Ranks(source)
    with ExitStack() as stack:
        partial = ranks.first(lambda: stack.enter_context(new_folder(folder, overwrite=overwrite)))
        writer = ranks.first(lambda: TensorWriter(partial, specs, max_shard_bytes=max_shard_bytes))
        ranks.agree()
        for spec in file_order(specs):
            name = stored[spec.name]
            tensor = source[name]
            if isinstance(tensor, DTensor):
                tensor = tensor.full_tensor()
            ranks.first(lambda spec=spec, name=name, tensor=tensor: _write(writer, draft, name, spec, tensor))
        ranks.agree()

        def publish() -> None:
            writer.finish()
            write_json(partial / "config.json", raw)
            (partial / CARD).write_text(card_text(card, config, family))
            stack.pop_all().close()

        ranks.first(publish)
        ranks.agree()


def _write(writer: TensorWriter, draft: Eagle3Draft, name: str, spec: Spec, tensor: Tensor) -> None:
    _check_shape(name, tuple(tensor.shape), spec.shape)
    if spec.dtype.is_floating_point:
        _refuse_untrained(draft, name, tensor)
    writer.write(spec.name, tensor.detach().to(spec.dtype))


class _Ranks:
    """The ranks that write one draft together; the first of them touches the disk.

    After a failure the collective calls go on, so that no rank waits for another, until
    `agree` raises the error everywhere.
    """

    def __init__(self, state: Mapping[str, Tensor]):
        shards = (t for t in state.values() if isinstance(t, DTensor)) if dist.is_initialized() else ()
        shard = next(iter(shards), None)
        self.group = None if shard is None else shard.device_mesh.get_group()
        self.is_first = self.group is None or dist.get_rank(self.group) == 0
        self.error: Exception | None = None

    def first(self, work: Callable[[], Any]) -> Any:
        if not self.is_first or self.error is not None:
            return None
        if self.group is None:
            return work()
        try:
            return work()
        except Exception as error:  # whatever it is, the others must hear of it
            self.error = error
        return None

    def agree(self) -> None:
        if self.group is None:
            return
        box = [None if self.error is None else (type(self.error).__name__, str(self.error))]
        dist.broadcast_object_list(box, src=dist.get_global_rank(self.group, 0), group=self.group)
        if self.error is not None:
            raise self.error
        if box[0] is not None:
            kind, text = box[0]
            raise FileExistsError(text) if kind == "FileExistsError" else ConfigError("export", kind, text)


def _check_maps(state: Mapping[str, Tensor], config: Eagle3Config) -> list[str]:
    """Names to write; a whole vocabulary has no map."""
    d2t, t2d = state["d2t"], state["t2d"]
    check_vocab(d2t, t2d, config.vocab_size, config.draft_vocab_size)
    if config.draft_vocab_size != config.vocab_size:
        return list(state)
    _refuse_permutation(d2t)
    return [name for name in state if name not in ("d2t", "t2d")]


def _say_dtype(raw: dict[str, Any], written: str) -> None:
    raw["torch_dtype"] = written
    for settings in (raw, raw.get("transformer_layer_config", {})):
        settings.update({name: written for name in ("dtype", "torch_dtype") if name in settings})


class _Tensors:
    """The tensors of a folder under the names of Eagle3Draft."""

    def __init__(self, folder: str | Path, ignore: Collection[str]):
        self.folder = open_tensors(folder)
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


def _refuse_untrained(draft: Eagle3Draft, name: str, tensor: Tensor) -> None:
    """No NaN or infinity, no constant matrix, none that still holds its initial draw."""
    tensor = tensor.detach()
    if not bool(torch.isfinite(tensor).all()):
        raise ConfigError("tensor", name, "holds NaN or infinity")
    if tensor.ndim < 2:
        return
    if bool((tensor == tensor.flatten()[0]).all()):
        raise ConfigError("tensor", name, "holds one value everywhere: it was never trained")
    if draft.init_seed is None:
        return
    drawn = initial_values(name, tuple(tensor.shape), draft.init_seed)
    if torch.equal(tensor.cpu().to(torch.float32), drawn):
        raise ConfigError("tensor", name, "still holds the values it was initialised with: train it first")
