"""config.json of EAGLE-3 drafts, in and out.

Three families (`Family`): `sglang` (flat, ids of tapped layers in `eagle_config`), `vllm`
(flat, ids at top level) and `speculators` (the layer's settings nested in
`transformer_layer_config`). The ids of sglang name a 0-based layer's output, those of the
other two HF's `hidden_states`, which is one more; cospec holds the first kind.

A key is understood, or known to change nothing in the computation and kept as it is, or
refused by its name. So is what two readers of one file take differently (`_disagreements`).
`norm_output` means here what servers mean by it: the normed state feeds the next step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from cospec.config import ConfigError, Eagle3Config, require
from cospec.hf import read_rope, rope_json

Family = Literal["sglang", "vllm", "speculators"]
IDS = "eagle_aux_hidden_state_layer_ids"
LLAMA, QWEN3 = "LlamaForCausalLMEagle3", "Eagle3Qwen3ForCausalLM"
ARCHITECTURES = {LLAMA: False, "Eagle3LlamaForCausalLM": False, QWEN3: True}
"""Flat architectures, and whether their layer norms query and key heads."""
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
UNSERVED = {
    "qk_norm": "its layer has no q/k norms",
    "attention_bias": "its projections have no bias",
    "norm_before_residual": "its residual is the raw state",
    "norm_before_fc": "it has no norm there",
    "sliding_window": "it attends to everything",
}
"""What SGLang's EAGLE-3 layer passes over without a word, with acceptance for the price."""

# fmt: off
INERT = frozenset({
    "_name_or_path", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "max_window_layers", "pad_token_id", "pretraining_tp", "torch_dtype", "transformers_version", "use_cache",
})
"""Keys that change nothing in the computation: kept, and written back."""
SPECULATORS = frozenset({
    "auto_map", "base_model_ep_plan", "embed_requires_grad", "enable_sp_ulysses", "has_no_defaults_at_init",
    "speculators_config", "speculators_version",
})
"""The same, but only in their own family: by `speculators_config` vLLM knows that family."""
ROPE = frozenset({
    "rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate", "mscale",
    "mscale_all_dim", "partial_rotary_factor",
})
LAYER = frozenset({
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings", "attention_bias", "rope_theta",
    "rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window", "layer_types",
})
DRAFT = frozenset({"architectures", "draft_vocab_size", "target_hidden_size", IDS, *FLAGS})
# fmt: on

FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "num_hidden_layers": 1,
    "tie_word_embeddings": False,
    "partial_rotary_factor": 1.0,
}
"""Keys with one value that the draft follows; absent means that value."""


def read_config(
    raw: Mapping[str, Any],
    *,
    own_embedding: bool = False,
    tap_layers: Collection[int] | None = None,
    ignore: Collection[str] = (),
) -> tuple[Eagle3Config, Family, dict[str, Any]]:
    """The draft's config, the file's family, and the keys that were kept (to write back).

    Args:
        own_embedding: whether the tensors hold `embed_tokens`; the file does not say.
        tap_layers: 0-based layers, for a file that names none (servers would guess).
        ignore: keys to accept although they are not understood.

    Raises ConfigError naming the key: not understood, missing, or two values that disagree.
    """
    family = _family(raw)
    _disagreements(raw, family, ignore)
    if family == "speculators":
        layer = {k: v for k, v in raw["transformer_layer_config"].items() if k != "architectures"}
        outer = {k: v for k, v in raw.items() if k not in ("transformer_layer_config", "speculators_model_type")}
        kept = _keep(outer, DRAFT, ignore, INERT | SPECULATORS)
        kept_layer = {"model_type": layer.get("model_type", "llama"), **_keep(layer, LAYER, ignore)}
        kind = layer.get("model_type", "llama")
        require(kind in ("llama", "qwen3"), "transformer_layer_config.model_type", kind, "must be llama or qwen3")
        qk_norm = kind == "qwen3"
    else:
        layer, kept_layer = dict(raw), {}
        kept = _keep(raw, DRAFT | LAYER | {"eagle_config"}, ignore)
        qk_norm = ARCHITECTURES[raw["architectures"][0]]
        kind, kinds = raw.get("model_type", "llama"), ("qwen3",) if qk_norm else ("llama", "qwen2")
        require(kind in kinds, "model_type", kind, f"must be {' or '.join(kinds)} for {raw['architectures'][0]}")
        kept_layer["model_type"] = kind
    window = _sliding_window(layer)
    if window is None:  # settings of a window that is off change nothing
        kept_layer |= {k: layer[k] for k in ("sliding_window", "use_sliding_window", "layer_types") if k in layer}
    kept["transformer_layer_config"] = kept_layer
    if kind != "llama":  # absent, readers take 128 and 32, not what follows from the other sizes
        for name in ("head_dim", "num_key_value_heads") if qk_norm else ("num_key_value_heads",):
            _needed(layer, name)
    hidden, heads = _needed(layer, "hidden_size"), _needed(layer, "num_attention_heads")
    vocab = _needed(layer, "vocab_size")
    config = Eagle3Config(
        hidden_size=hidden,
        target_hidden_size=_count(raw, "target_hidden_size", hidden),
        intermediate_size=_needed(layer, "intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=_count(layer, "num_key_value_heads", heads),
        head_dim=_count(layer, "head_dim", hidden // heads),
        vocab_size=vocab,
        draft_vocab_size=_count(raw, "draft_vocab_size", vocab),
        tap_layers=_tap_layers(raw, tap_layers),
        rms_norm_eps=_number(layer, "rms_norm_eps"),
        max_position_embeddings=_needed(layer, "max_position_embeddings"),
        rope=_read_rope(layer),
        qk_norm=qk_norm,
        attention_bias=_flag(layer, "attention_bias"),
        sliding_window=window,
        own_embedding=own_embedding,
        **{name: _flag(raw, name) for name in FLAGS},
    )
    return config, family, kept


def config_json(
    c: Eagle3Config,
    family: Family,
    *,
    kept: Mapping[str, Any] | None = None,
    verifier: str | None = None,
    ignore: Collection[str] = (),
) -> dict[str, Any]:
    """What config.json says of a draft; `read_config` gives the same config back.

    Args:
        kept: inert keys to carry along, from `read_config`.
        verifier: name or path of the policy, which the speculators family must say.
        ignore: flags to write although SGLang passes over them (`UNSERVED`); not qk_norm.

    Raises ConfigError when the family has no place for a flag.
    """
    require(family in ("sglang", "vllm", "speculators"), "family", family, "must be sglang, vllm or speculators")
    for name, reason in UNSERVED.items() if family == "sglang" else ():
        value = getattr(c, name)
        passes = not value or (name in ignore and name != "qk_norm")
        require(passes, f"draft.{name}", value, f"SGLang would pass over it, {reason}: write vllm or speculators")
    kept = dict(kept or {})
    nested = dict(kept.pop("transformer_layer_config", {}))
    if family != "speculators":
        kept = {name: value for name, value in kept.items() if name not in SPECULATORS}
    layer: dict[str, Any] = {
        "model_type": "qwen3" if c.qk_norm else "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "rms_norm_eps": c.rms_norm_eps,
        "max_position_embeddings": c.max_position_embeddings,
        "attention_bias": c.attention_bias,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **rope_json(c.rope),
    }
    if c.sliding_window is not None:
        layer |= {
            "sliding_window": c.sliding_window,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention"],
        }
    draft: dict[str, Any] = {
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_hidden_size,
        **{name: getattr(c, name) for name in FLAGS},
    }
    own, hf_ids = list(c.tap_layers), [i + 1 for i in c.tap_layers]
    if family == "sglang":
        if not c.norm_output:  # absent, SpecForge norms before the head as everyone does; false switches that off
            del draft["norm_output"]
        ids = {"eagle_config": {IDS: own, "use_aux_hidden_state": True}}
        return {**kept, "architectures": [LLAMA], **layer, **nested, **draft, **ids}
    if family == "vllm":
        return {**kept, "architectures": [QWEN3 if c.qk_norm else LLAMA], **layer, **nested, **draft, IDS: hf_ids}
    if "speculators_config" not in kept:
        require(verifier is not None, "verifier", None, "must name the policy: readers of this family ask it for sizes")
    kept.setdefault(
        "speculators_config",
        {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
    )
    return {
        **kept,
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        **draft,
        IDS: hf_ids,
        "tie_word_embeddings": False,
        "transformer_layer_config": {**layer, **nested, "model_type": layer["model_type"]},
    }


def _family(raw: Mapping[str, Any]) -> Family:
    if "speculators_model_type" in raw:
        kind = raw["speculators_model_type"]
        require(kind == "eagle3", "speculators_model_type", kind, "only eagle3 is supported")
        require(
            isinstance(raw.get("transformer_layer_config"), Mapping),
            "transformer_layer_config",
            raw.get("transformer_layer_config"),
            "must hold the settings of the layer",
        )
        return "speculators"
    names = raw.get("architectures")
    known = isinstance(names, list) and len(names) == 1 and names[0] in list(ARCHITECTURES)
    rule = f"must be one of {', '.join(ARCHITECTURES)}, or a speculators file: no other kind of draft is read"
    require(known, "architectures", names, rule)
    return "vllm" if IDS in raw else "sglang"


def _keep(
    raw: Mapping[str, Any],
    understood: Collection[str],
    ignore: Collection[str],
    inert: Collection[str] = INERT,
) -> dict[str, Any]:
    """The inert keys; raises for a key that is neither understood, inert, fixed nor ignored."""
    kept = {}
    for name, value in raw.items():
        if name in FIXED:
            require(value is None or value == FIXED[name], name, value, f"only {FIXED[name]!r} is supported")
        elif name in inert or name in ignore:
            kept[name] = value
        else:
            require(name in understood, name, value, "is not understood; it may change what the draft computes")
    return kept


def _or(value: Any, default: Any) -> Any:
    """An absent or null key means the default; 0 is a value, and a wrong one."""
    return default if value is None else value


def _flag(raw: Mapping[str, Any], name: str) -> bool:
    value = _or(raw.get(name), False)
    require(isinstance(value, bool), name, value, "must be true or false")
    return value


def _needed(layer: Mapping[str, Any], name: str) -> int:
    require(layer.get(name) is not None, name, layer.get(name), "must be in config.json")
    return _count(layer, name, 0)


def _count(raw: Mapping[str, Any], name: str, default: int) -> int:
    value = _or(raw.get(name), default)
    require(type(value) is int and value >= 1, name, value, "must be a whole number >= 1")
    return value


def _number(raw: Mapping[str, Any], name: str) -> float:
    require(raw.get(name) is not None, name, None, "must be in config.json")
    value = raw[name]
    sound = type(value) in (int, float) and 0 <= value < float("inf")
    require(sound, name, value, "must be a number >= 0")
    return value


def _disagreements(raw: Mapping[str, Any], family: Family, ignore: Collection[str]) -> None:
    """Raise ConfigError for what readers of one file understand differently. `ignore` takes our meaning."""
    if family == "sglang" and "norm_output" not in ignore:
        require(
            raw.get("norm_output") is not False,
            "norm_output",
            False,
            "SpecForge reads it as a head without the norm, servers as a raw state that feeds the next step: "
            "leave the key out (norm before the head, raw state) or let norm_output pass",
        )
    if family == "speculators":
        require(
            raw.get("norm_before_residual") is not None,
            "norm_before_residual",
            None,
            "must be in config.json: without it vLLM takes true and the speculators package false",
        )


def _tap_layers(raw: Mapping[str, Any], given: Collection[int] | None) -> tuple[int, ...]:
    named: list[tuple[str, tuple[int, ...]]] = []
    eagle = _or(raw.get("eagle_config"), {})
    require(isinstance(eagle, Mapping), "eagle_config", eagle, "must be an object")
    for name in eagle:
        require(
            name in (IDS, "use_aux_hidden_state"),
            f"eagle_config.{name}",
            eagle[name],
            "is not understood; it may change what the draft computes",
        )
    require(
        eagle.get("use_aux_hidden_state", True) is True,
        "eagle_config.use_aux_hidden_state",
        eagle.get("use_aux_hidden_state"),
        "must be true: an EAGLE-3 draft reads hidden states of the policy",
    )
    if eagle.get(IDS) is not None:
        named.append((f"eagle_config.{IDS}", _ids(eagle, f"eagle_config.{IDS}")))
    if raw.get(IDS) is not None:
        named.append((f"{IDS} less one", tuple(i - 1 for i in _ids(raw, IDS))))
    if given is not None:
        named.append(("tap_layers", tuple(given)))
    require(bool(named), IDS, None, "the file names no tapped layers and servers guess them: give tap_layers")
    for name, layers in named:
        require(layers == named[0][1], name, layers, f"disagrees with {named[0][0]}={named[0][1]}")
    layers = named[0][1]
    require(
        min(layers) >= 0,
        named[0][0],
        layers,
        "names the embedding or nothing: 0-based layers of the policy are expected",
    )
    return layers


def _ids(raw: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = raw[IDS]
    sound = isinstance(value, list | tuple) and bool(value) and all(type(i) is int for i in value)
    require(sound, name, value, "must be a list of layer numbers")
    return tuple(value)


def _sliding_window(layer: Mapping[str, Any]) -> int | None:
    kinds = layer.get("layer_types")
    window = None if layer.get("sliding_window") is None else _count(layer, "sliding_window", 0)
    if kinds is not None:
        require(
            isinstance(kinds, list) and len(kinds) == 1 and kinds[0] in ("full_attention", "sliding_attention"),
            "layer_types",
            kinds,
            "must say full_attention or sliding_attention for the one layer",
        )
        slides = kinds[0] == "sliding_attention"
        require(not slides or window is not None, "sliding_window", window, "layer_types asks for a window size")
        return window if slides else None
    if window is None:
        return None
    switch = layer.get("use_sliding_window")
    require(
        isinstance(switch, bool),
        "sliding_window",
        window,
        "say use_sliding_window or layer_types: readers disagree on a window without them",
    )
    return window if switch else None


def _read_rope(layer: Mapping[str, Any]):
    for schema in ("rope_scaling", "rope_parameters"):
        settings = _or(layer.get(schema), {})
        require(isinstance(settings, Mapping), schema, settings, "must be an object")
        for name, value in settings.items():
            require(name in ROPE, f"{schema}.{name}", value, "is not understood")
            kinds = (str,) if name in ("rope_type", "type") else (bool,) if name == "truncate" else (int, float)
            sound = value is None or (type(value) in kinds and value != float("inf") and value == value)
            require(sound, f"{schema}.{name}", value, f"must be {' or '.join(k.__name__ for k in kinds)}")
    if layer.get("rope_theta") is not None:
        _number(layer, "rope_theta")
    old, new = layer.get("rope_scaling") or {}, layer.get("rope_parameters") or {}
    pairs = [("rope_theta", layer.get("rope_theta"), new.get("rope_theta"))]
    pairs += [(f"rope_scaling.{name}", old[name], new[name]) for name in old if name in new]
    for name, a, b in pairs:
        if a is not None and b is not None and a != b:
            raise ConfigError(name, a, f"disagrees with rope_parameters, which says {b!r}")
    said = {k: v for k, v in layer.items() if v is not None} | {
        "rope_scaling": _said(old),
        "rope_parameters": _said(new),
    }
    return read_rope(said)


def _said(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}
