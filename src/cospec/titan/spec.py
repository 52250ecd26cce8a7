"""From settings to torchtitan specs and back; no tensors."""

from __future__ import annotations

import copy
import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torchtitan.models import llama3, qwen3
from torchtitan.models.common import Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import FusedQKVLinear, QKVLinear
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.common.rope import RoPE
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

from cospec import hf
from cospec.config import PolicyConfig, RopeConfig, require
from cospec.titan.modules import PackedAttention, PolicyComplexRoPE, PolicyCosSinRoPE

DecoderConfig = Decoder.Config
INIT_STD = 0.02


def build_config(cfg: PolicyConfig) -> DecoderConfig:
    """The torchtitan spec of a policy, with `PackedAttention` in every layer.

    Raises ConfigError when two sources are given, a flavor is unknown, or sizes do not fit.
    """
    require(
        cfg.hf_path is None or cfg.flavor is None,
        "policy.flavor",
        cfg.flavor,
        "give either hf_path or flavor, not both",
    )
    if cfg.hf_path is not None:
        cfg = hf.read_policy_config(cfg.hf_path)
    elif cfg.flavor is not None:
        return with_packed_attention(_flavor_config(cfg.flavor))
    _check_sizes(cfg)
    dim, moe, llama = cfg.hidden_size, cfg.model_type == "qwen3_moe", cfg.model_type == "llama"
    linear = {"weight": partial(nn.init.normal_, std=INIT_STD)}
    # Outputs onto the residual stream are scaled down by its number of summands.
    output_std = INIT_STD / math.sqrt(2 * cfg.num_hidden_layers)
    output = {"weight": partial(nn.init.normal_, std=output_std)}
    experts = {"w1_EFD": linear["weight"], "w2_EDF": output["weight"], "w3_EFD": linear["weight"]}

    def norm(size: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=size, eps=cfg.rms_norm_eps, param_init={"weight": nn.init.ones_})

    rope_class = PolicyComplexRoPE if llama else PolicyCosSinRoPE
    rope = rope_class.Config(
        dim=cfg.head_dim, max_seq_len=cfg.max_position_embeddings, theta=cfg.rope.theta, settings=cfg.rope
    )
    layers: list[Any] = []
    for layer_id in range(cfg.num_hidden_layers):
        parts: dict[str, Any] = {
            "attention_norm": norm(dim),
            "ffn_norm": norm(dim),
            "attention": make_gqa_config(
                dim=dim,
                n_heads=cfg.num_attention_heads,
                n_kv_heads=cfg.num_key_value_heads,
                head_dim=cfg.head_dim,
                wqkv_param_init=linear,
                wo_param_init=output,
                inner_attention=PackedAttention.Config(layer_id=layer_id),
                rope=rope,
                qk_norm=None if llama else norm(cfg.head_dim),
            ),
        }
        if moe:
            parts["moe"] = make_moe_config(
                num_experts=cfg.num_experts,
                router=make_router_config(
                    dim=dim,
                    num_experts=cfg.num_experts,
                    gate_param_init=linear,
                    top_k=cfg.num_experts_per_tok,
                    score_func="softmax",
                    route_norm=True,
                ),
                routed_experts=make_routed_experts_config(
                    dim=dim,
                    hidden_dim=cfg.moe_intermediate_size,
                    num_experts=cfg.num_experts,
                    top_k=cfg.num_experts_per_tok,
                    param_init=experts,
                    comm_backend="standard",
                ),
                load_balance_coeff=None,  # a bias that files of these models cannot hold
            )
        else:
            parts["feed_forward"] = make_ffn_config(
                dim=dim, hidden_dim=cfg.intermediate_size, w1_param_init=linear, w2w3_param_init=output
            )
        layers.append((Llama3TransformerBlock if llama else Qwen3TransformerBlock).Config(**parts))
    return (Llama3Model if llama else Qwen3Model).Config(
        dim=dim,
        vocab_size=cfg.vocab_size,
        tok_embeddings=Embedding.Config(num_embeddings=cfg.vocab_size, embedding_dim=dim, param_init=linear),
        norm=norm(dim),
        lm_head=Linear.Config(in_features=dim, out_features=cfg.vocab_size, param_init=linear),
        layers=layers,
        enable_weight_tying=cfg.tie_word_embeddings,
    )


def _check_sizes(cfg: PolicyConfig) -> None:
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    ):
        require(getattr(cfg, name) >= 1, f"policy.{name}", getattr(cfg, name), "must be >= 1")
    heads, kv_heads = cfg.num_attention_heads, cfg.num_key_value_heads
    require(
        heads % kv_heads == 0,
        "policy.num_attention_heads",
        heads,
        f"must be a multiple of num_key_value_heads={kv_heads}",
    )
    require(
        cfg.head_dim >= 2 and cfg.head_dim % 2 == 0, "policy.head_dim", cfg.head_dim, "must be even and >= 2 for RoPE"
    )
    require(cfg.rms_norm_eps > 0, "policy.rms_norm_eps", cfg.rms_norm_eps, "must be > 0")
    require(
        cfg.model_type in ("qwen3", "qwen3_moe", "llama"),
        "policy.model_type",
        cfg.model_type,
        "qwen3, qwen3_moe or llama",
    )
    rope = cfg.rope
    scalings = ("none", "linear", "llama3", "yarn")
    require(rope.scaling in scalings, "policy.rope.scaling", rope.scaling, f"must be one of {', '.join(scalings)}")
    require(rope.theta > 0, "policy.rope.theta", rope.theta, "must be > 0")
    require(rope.factor >= 1, "policy.rope.factor", rope.factor, "must be >= 1")
    if cfg.model_type == "qwen3_moe":
        require(cfg.num_experts >= 1, "policy.num_experts", cfg.num_experts, "must be >= 1")
        for name in ("hidden_size", "moe_intermediate_size"):  # the grouped bfloat16 product wants 16-byte rows
            size = getattr(cfg, name)
            require(size % 8 == 0, f"policy.{name}", size, "must be a multiple of 8 for a mixture")
        require(
            cfg.moe_intermediate_size >= 1, "policy.moe_intermediate_size", cfg.moe_intermediate_size, "must be >= 1"
        )
        require(
            1 <= cfg.num_experts_per_tok <= cfg.num_experts,
            "policy.num_experts_per_tok",
            cfg.num_experts_per_tok,
            f"must be in 1..num_experts={cfg.num_experts}",
        )


def num_experts(config: DecoderConfig) -> int:
    """Experts of a mixture; 0 for a dense policy."""
    counts = {layer.moe.num_experts for layer in config.layers if getattr(layer, "moe", None) is not None}
    return math.gcd(*counts)


def _flavor_config(flavor: str) -> DecoderConfig:
    families = {"qwen3": qwen3.qwen3_configs, "llama3": llama3.llama3_configs}
    family, _, name = flavor.partition("/")
    known = [f"{f}/{n}" for f, flavors in families.items() for n in flavors]
    require(flavor in known, "policy.flavor", flavor, f"must be one of {', '.join(known)}")
    config = families[family][name](attn_backend="flex")
    for layer in config.layers:
        if layer.moe is not None:
            layer.moe.load_balance_coeff = None
    return config


def with_packed_attention(config: DecoderConfig) -> DecoderConfig:
    """Any torchtitan decoder spec, ready for cospec; the given spec is not changed.

    Every layer that has an inner attention gets `PackedAttention`; fused query/key/value
    projections become three (the layout of checkpoints), so that each entry of a state
    dict is one parameter; a token embedding without an initialiser of its own gets one.
    """
    layers = []
    for layer_id, layer in enumerate(config.layers):
        attention = copy.copy(getattr(layer, "attention", None))
        layer = copy.copy(layer)
        if attention is not None and hasattr(attention, "inner_attention"):
            attention.inner_attention = PackedAttention.Config(layer_id=layer_id)
            if isinstance(getattr(attention, "qkv_linear", None), FusedQKVLinear.Config):
                attention.qkv_linear = _separate_qkv(attention.qkv_linear)
            layer.attention = attention
        layers.append(layer)
    embeddings = config.tok_embeddings
    if embeddings.param_init is None or embeddings.param_init.get("weight") is skip_param_init:
        embeddings = dataclasses.replace(embeddings, param_init={"weight": partial(nn.init.normal_, std=INIT_STD)})
    return dataclasses.replace(config, layers=layers, tok_embeddings=embeddings)


def _separate_qkv(fused: FusedQKVLinear.Config) -> QKVLinear.Config:
    # The fused initialiser draws q, k and v inside a closure; both families use INIT_STD there.
    init = {"weight": partial(nn.init.normal_, std=INIT_STD), "bias": nn.init.zeros_}

    def part(heads: int) -> Linear.Config:
        return Linear.Config(
            in_features=fused.wqkv.in_features,
            out_features=heads * fused.head_dim,
            bias=fused.wqkv.bias,
            param_init=init,
        )

    return QKVLinear.Config(head_dim=fused.head_dim, wq=part(fused.n_heads), wkv=part(fused.n_kv_heads))


def policy_config_from_hf(folder: str | Path) -> PolicyConfig:
    """The sizes of the policy in a Hugging Face folder."""
    return hf.read_policy_config(folder)


def policy_config(config: DecoderConfig) -> PolicyConfig:
    """The sizes of a torchtitan spec. Raises ValueError for a family without a Hugging Face form here."""
    layer, moe = config.layers[0], config.layers[0].moe
    if isinstance(config, Llama3Model.Config):
        model_type = "llama"
    elif isinstance(config, Qwen3Model.Config):
        model_type = "qwen3" if moe is None else "qwen3_moe"
    else:
        raise ValueError(f"{type(config).__qualname__} has no Hugging Face form here: only Qwen3 and Llama 3 have")
    attention, rope = layer.attention, layer.attention.rope
    sizes: dict[str, Any] = {}
    if moe is not None:
        sizes = {
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.router.top_k,
            "moe_intermediate_size": moe.routed_experts.inner_experts.hidden_dim,
        }
    else:
        sizes = {"intermediate_size": layer.feed_forward.w1.out_features}
    return PolicyConfig(
        model_type=model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        num_hidden_layers=len(config.layers),
        num_attention_heads=attention.n_heads,
        num_key_value_heads=attention.n_kv_heads or attention.n_heads,
        head_dim=attention.head_dim or config.dim // attention.n_heads,
        max_position_embeddings=rope.max_seq_len,
        rms_norm_eps=config.norm.eps,
        rope=rope_settings(rope),
        tie_word_embeddings=config.enable_weight_tying,
        **sizes,
    )


def rope_settings(rope: RoPE.Config) -> RopeConfig:
    if isinstance(rope, PolicyCosSinRoPE.Config | PolicyComplexRoPE.Config):
        return rope.settings
    if rope.scaling == "llama":
        return RopeConfig(
            theta=rope.theta,
            scaling="llama3",
            factor=rope.scaling_factor,
            low_freq_factor=rope.low_freq_factor,
            high_freq_factor=rope.high_freq_factor,
            original_max_position_embeddings=rope.original_max_position_embeddings,
        )
    if rope.scaling == "yarn" and rope.rope_factor > 1:
        return RopeConfig(
            theta=rope.theta,
            scaling="yarn",
            factor=rope.rope_factor,
            beta_fast=rope.beta_fast,
            beta_slow=rope.beta_slow,
            original_max_position_embeddings=rope.original_seq_len,
            truncate=rope.truncate,
            attention_factor=1.0,  # torchtitan's tables have none
        )
    return RopeConfig(theta=rope.theta)


def hf_config(config: DecoderConfig) -> dict[str, Any]:
    """A config.json of the policy that transformers loads."""
    return hf.policy_json(policy_config(config))


def hf_adapter(config: DecoderConfig) -> Qwen3StateDictAdapter | Llama3StateDictAdapter:
    """torchtitan's translation of state dicts (`to_hf`, `from_hf`), one tensor at a time; see `policy.weights`."""
    policy_config(config)  # refuses other families
    # Untied: the adapters then treat each tensor by itself, and the shared one is ours to place.
    untied: Any = dataclasses.replace(config, enable_weight_tying=False)
    adapter = Llama3StateDictAdapter if isinstance(config, Llama3Model.Config) else Qwen3StateDictAdapter
    return adapter(untied, None)
