"""Weights of a policy to and from Hugging Face folders (safetensors only)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cospec import hf
from cospec.durable import new_folder
from cospec.policy.stream import WeightStream
from cospec.tensor_writer import Spec, TensorWriter
from cospec.titan import DecoderConfig, assign, hf_adapter, hf_config, plain_name

Declared = list[tuple[str, tuple[int, ...], torch.dtype]]
"""Name, shape and dtype of tensors, in the order in which they come."""


@dataclass(frozen=True)
class _Layout:
    """How a policy's tensors and those of a Hugging Face folder correspond."""

    made: dict[str, dict[str, tuple[int, ...]]]
    """For each parameter (a tied one once) the Hugging Face tensors that it becomes, with shapes."""
    shapes: dict[str, torch.Size]
    """Of the whole state dict."""

    @classmethod
    def of(cls, config: DecoderConfig) -> _Layout:
        adapter = hf_adapter(config)
        with torch.device("meta"):
            model = config.build()
        made = {
            name: {key: tuple(value.shape) for key, value in adapter.to_hf({name: parameter.detach()}).items()}
            for name, parameter in model.named_parameters()
        }
        return cls(made, {name: value.shape for name, value in model.state_dict().items()})

    def check_state(self, names: set[str]) -> None:
        _check_names("state", names, wanted=set(self.shapes), known=set(self.shapes))


def to_hf(config: DecoderConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face tensors of a whole state dict (see `build.full_state`).

    Raises ValueError naming tensors that are missing, unknown or misshapen, or that the
    format cannot hold.
    """
    return dict(_stream_to_hf(config, _Layout.of(config), state))


def _stream_to_hf(config: DecoderConfig, layout: _Layout, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The same one by one, in the order of `layout.made`; `state` is asked for one tensor at a time."""
    adapter = hf_adapter(config)
    layout.check_state(set(state))
    for name in layout.made:
        value = state[name].detach()
        _check_shape(name, value.shape, layout.shapes[name])
        yield from adapter.to_hf({name: value}).items()
        del value
    for name in layout.shapes.keys() - layout.made.keys():
        if not _is_tied_head(config, name):
            _refuse_unless_zero(name, state[name])
        elif not torch.equal(state[name], state["tok_embeddings.weight"]):
            raise ValueError("lm_head.weight differs from tok_embeddings.weight, but the policy ties them")


def translate_stream(config: DecoderConfig, stream: WeightStream) -> tuple[Declared, Iterator[tuple[str, Tensor]]]:
    """What the tensors of a stream become, and these, read from it as they are asked for.

    Raises ValueError as `to_hf` does, for names and shapes before a tensor is read.
    """
    layout, adapter = _Layout.of(config), hf_adapter(config)
    layout.check_state(set(stream.shapes))
    declared: Declared = []
    for name, shape, dtype in (entry for part in stream.headers for entry in part):
        _check_shape(name, shape, layout.shapes[name])
        declared += [(key, made, dtype) for key, made in layout.made.get(name, {}).items()]

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, value in stream.items():
            if name in layout.made:
                yield from adapter.to_hf({name: value.detach()}).items()
            elif not _is_tied_head(config, name):
                _refuse_unless_zero(name, value)

    return declared, tensors()


def _is_tied_head(config: DecoderConfig, name: str) -> bool:
    return config.enable_weight_tying and name == "lm_head.weight"


def _refuse_unless_zero(name: str, value: Tensor) -> None:
    if value.any():
        raise ValueError(f"{name} is not zero, and a Hugging Face folder has no place for it")


def from_hf(config: DecoderConfig, hf_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a policy out of Hugging Face tensors; the inverse of `to_hf`.

    Raises ValueError naming tensors that are missing, unknown or misshapen.
    """
    layout, adapter = _Layout.of(config).made, hf_adapter(config)
    wanted = {key for keys in layout.values() for key in keys}
    _check_names("hf_state", set(hf_state), wanted=wanted, known=wanted | _ignored(config, hf_state))
    state = {name: _read(adapter, name, keys, hf_state) for name, keys in layout.items()}
    if config.enable_weight_tying:
        state["lm_head.weight"] = state["tok_embeddings.weight"]
    return state


def load_hf(model: nn.Module, folder: str | Path) -> None:
    """Fill a model, or a pipeline stage of one, sharded or not, from a folder, tensor by tensor.

    Raises ValueError naming the folder and the tensors that are missing, unknown or misshapen.
    """
    config, files = model.config, hf.TensorFolder(folder)
    layout, adapter = _Layout.of(config).made, hf_adapter(config)
    known = {key for keys in layout.values() for key in keys}
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    wanted = {key for name in parameters for key in layout[name]}
    _check_names(str(folder), set(files), wanted=wanted, known=known | _ignored(config, files))
    for name, parameter in parameters.items():
        assign(parameter, _read(adapter, name, layout[name], files))


def save_hf(
    config: DecoderConfig,
    state: Mapping[str, Tensor],
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a whole state dict as a folder that transformers loads; one process calls it.

    `state` is asked for one tensor at a time, and one is in memory. The folder appears under
    its name only when it is complete.

    Args:
        dtype: of the tensors in the files; None takes that of the embeddings.
        max_shard_bytes: of tensor data in one file; more makes several files and an index.
        overwrite: replace a folder that has files in it.
        extra: more keys of config.json, for example eos_token_id.

    Raises ValueError as `to_hf`; FileExistsError for a folder in use.
    """
    dtype = dtype or state["tok_embeddings.weight"].dtype
    layout = _Layout.of(config)
    specs = [Spec(key, shape, dtype) for made in layout.made.values() for key, shape in made.items()]
    kind = str(dtype).removeprefix("torch.")
    raw = {**hf_config(config), **(extra or {}), "dtype": kind, "torch_dtype": kind}
    with new_folder(folder, overwrite=overwrite) as partial:
        writer = TensorWriter(partial, specs, max_shard_bytes=max_shard_bytes)
        for key, value in _stream_to_hf(config, layout, state):
            writer.write(key, value.to(dtype))
        writer.finish()
        (partial / "config.json").write_text(json.dumps(raw, indent=2))


def _read(adapter, name: str, keys: Mapping[str, tuple[int, ...]], source: Mapping[str, Tensor]) -> Tensor:
    tensors = {}
    for key, shape in keys.items():
        tensors[key] = source[key]
        _check_shape(key, tensors[key].shape, shape)
    return adapter.from_hf(tensors)[name]


def _ignored(config: DecoderConfig, source: Mapping[str, Tensor]) -> set[str]:
    """Tensors that files may hold without being parameters: old RoPE tables, a tied head's copy."""
    ignored = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(len(config.layers))}
    tied, head, table = config.enable_weight_tying, "lm_head.weight", "model.embed_tokens.weight"
    if tied and head in source and table in source and torch.equal(source[head], source[table]):
        ignored.add(head)
    return ignored


def _check_names(where: str, names: set[str], *, wanted: set[str], known: set[str]) -> None:
    for what, wrong in (("lacks", wanted - names), ("has unknown", names - known)):
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise ValueError(f"{where} {what} tensors: {', '.join(sorted(wrong)[:3])}{more}")


def _check_shape(name: str, shape: torch.Size, expected: tuple[int, ...] | torch.Size) -> None:
    if tuple(shape) != tuple(expected):
        raise ValueError(f"{name} has shape {list(shape)}, the policy needs {list(expected)}")
