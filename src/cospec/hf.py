"""Hugging Face folders without Hugging Face code: config.json, RoPE tables, sharded safetensors.

Nothing here unpickles: weights are safetensors or they are refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cospec.config import PolicyConfig, RopeConfig, require
from cospec.tensor_writer import INDEX

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "llama": "LlamaForCausalLM"}


def read_policy_config(folder: str | Path) -> PolicyConfig:
    """The sizes in a folder's config.json (schemas of transformers 4 and 5).

    Raises ConfigError for a missing file, an unknown model type, or a setting that the
    policy would not follow (biases, sliding windows, other activations ...).
    """
    path = Path(folder) / "config.json"
    require(path.is_file(), "policy.hf_path", str(folder), "must be a folder with config.json")
    raw = json.loads(path.read_text())
    model_type = raw.get("model_type")
    require(model_type in ARCHITECTURES, "model_type", model_type, f"{path}: must be one of {', '.join(ARCHITECTURES)}")
    _refuse_what_is_not_followed(raw, path)
    heads = raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or (128 if model_type == "qwen3" else raw["hidden_size"] // heads)
    sizes: dict[str, Any] = {}
    if model_type == "qwen3_moe":
        sizes = {
            "num_experts": raw.get("num_experts") or raw["num_local_experts"],
            "num_experts_per_tok": raw["num_experts_per_tok"],
            "moe_intermediate_size": raw["moe_intermediate_size"],
        }
    return PolicyConfig(
        model_type=model_type,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_hidden_layers=raw["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        max_position_embeddings=raw["max_position_embeddings"],
        rms_norm_eps=raw["rms_norm_eps"],
        rope=read_rope(raw),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        **sizes,
    )


def _refuse_what_is_not_followed(raw: Mapping[str, Any], path: Path) -> None:
    expected = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
    if raw["model_type"] == "qwen3_moe":
        expected |= {"decoder_sparse_step": 1, "norm_topk_prob": True}
        # Absent means transformers' default, which scales the chosen experts differently.
        require("norm_topk_prob" in raw, "norm_topk_prob", None, f"{path}: must be present and true")
    for name, value in expected.items():
        require(raw.get(name, value) == value, name, raw.get(name), f"{path}: only {value!r} is supported")
    for name in ("mlp_only_layers", "quantization_config"):
        require(not raw.get(name), name, raw.get(name), f"{path}: not supported")
    kinds = set(raw.get("layer_types") or ["full_attention"])
    require(kinds == {"full_attention"}, "layer_types", sorted(kinds), f"{path}: only full_attention is supported")


def read_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """RoPE settings of a config.json: `rope_parameters`, or `rope_theta` with `rope_scaling`."""
    rope = {**(raw.get("rope_parameters") or {}), **(raw.get("rope_scaling") or {})}
    scaling = rope.get("rope_type", rope.get("type", "default"))
    known = ("default", "linear", "llama3", "yarn")
    require(scaling in known, "rope_type", scaling, f"must be one of {', '.join(known)}")
    for name in ("mscale", "mscale_all_dim"):
        require(rope.get(name) is None, f"rope.{name}", rope.get(name), "not supported")
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    require(partial in (None, 1, 1.0), "partial_rotary_factor", partial, "only 1 is supported")
    defaults = RopeConfig()
    optional = (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "truncate",
    )
    chosen = {name: rope[name] for name in optional if rope.get(name) is not None}
    original = rope.get("original_max_position_embeddings")
    if original is None and scaling in ("llama3", "yarn"):
        original = raw["max_position_embeddings"]
    return RopeConfig(
        theta=float(rope.get("rope_theta", raw.get("rope_theta", defaults.theta))),
        scaling="none" if scaling == "default" else scaling,
        original_max_position_embeddings=original or defaults.original_max_position_embeddings,
        **chosen,
    )


def rope_json(rope: RopeConfig) -> dict[str, Any]:
    """The entries of config.json that say the RoPE, in both schemas."""
    if rope.scaling == "none":
        parameters: dict[str, Any] = {"rope_type": "default"}
    else:
        parameters = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = rope.original_max_position_embeddings
    if rope.scaling == "llama3":
        parameters |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.scaling == "yarn":
        parameters |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        if rope.attention_factor is not None:
            parameters["attention_factor"] = rope.attention_factor
    return {
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.scaling == "none" else dict(parameters),
        "rope_parameters": {"rope_theta": rope.theta, **parameters},
    }


def policy_json(cfg: PolicyConfig) -> dict[str, Any]:
    """The config.json of a policy given by its sizes."""
    raw = {
        "architectures": [ARCHITECTURES[cfg.model_type]],
        "model_type": cfg.model_type,
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "num_hidden_layers": cfg.num_hidden_layers,
        "num_attention_heads": cfg.num_attention_heads,
        "num_key_value_heads": cfg.num_key_value_heads,
        "head_dim": cfg.head_dim,
        "max_position_embeddings": cfg.max_position_embeddings,
        "rms_norm_eps": cfg.rms_norm_eps,
        "tie_word_embeddings": cfg.tie_word_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        **rope_json(cfg.rope),
    }
    if cfg.model_type == "llama":
        raw["mlp_bias"] = False
    else:
        raw["use_sliding_window"] = False
    if cfg.model_type == "qwen3_moe":
        raw |= {
            "num_experts": cfg.num_experts,
            "num_experts_per_tok": cfg.num_experts_per_tok,
            "moe_intermediate_size": cfg.moe_intermediate_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return raw


class TensorFolder(Mapping[str, Tensor]):
    """Tensors of a folder's *.safetensors, each read when asked for.

    Raises ValueError naming the file when there are none, one is missing or unreadable.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        index = self.folder / INDEX
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        elif (self.folder / "model.safetensors").is_file():
            names = ["model.safetensors"]
        else:
            raise ValueError(f"{self.folder}: no {INDEX} or model.safetensors (pickled weights are not read)")
        self._file_of: dict[str, Any] = {}
        for name in names:
            if Path(name).name != name:
                raise ValueError(f"{index}: {name!r} is not a plain file name")
            try:
                file = safe_open(str(self.folder / name), framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{self.folder / name}: not a readable safetensors file ({error})") from error
            for key in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                self._file_of[key] = file

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def __contains__(self, key: object) -> bool:
        return key in self._file_of  # the inherited one would read the tensor

    def __getitem__(self, key: str) -> Tensor:
        return self._file_of[key].get_tensor(key)


def rope_frequencies(rope: RopeConfig, dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies float32 [dim / 2] (CPU) and the factor of cos and sin.

    Written in the order of operations that transformers uses, so that tables are equal to
    the bit. Sources: Su et al. 2021 (RoPE); the Llama 3.1 release (`llama3`);
    Peng et al. 2023, YaRN, section 3.2 and appendix A.2 (`yarn`).
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float() / dim
    powers = rope.theta**exponents
    inv_freq = 1.0 / powers
    if rope.scaling == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.scaling == "llama3":
        return _llama3_frequencies(rope, inv_freq), 1.0
    if rope.scaling == "yarn":
        factor = rope.attention_factor
        if factor is None:
            factor = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
        return _yarn_frequencies(rope, powers, dim), factor
    return inv_freq, 1.0


def _llama3_frequencies(rope: RopeConfig, inv_freq: Tensor) -> Tensor:
    old = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    smooth = (old / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    slow = torch.where(wavelength > old / rope.low_freq_factor, inv_freq / rope.factor, inv_freq)
    blended = (1 - smooth) * slow / rope.factor + smooth * slow
    between = (wavelength >= old / rope.high_freq_factor) & (wavelength <= old / rope.low_freq_factor)
    return torch.where(between, blended, slow)


def _yarn_frequencies(rope: RopeConfig, powers: Tensor, dim: int) -> Tensor:
    def dim_of(rotations: float) -> float:
        return (
            dim
            * math.log(rope.original_max_position_embeddings / (rotations * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # keeps the ramp finite
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept
