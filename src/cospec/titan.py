"""The seam to torchtitan: the only module that imports it.

Turns a `PolicyConfig` (or any torchtitan decoder spec) into a torchtitan model whose
inner attention asks the caller's attention context, initialises it by name and seed, and
moves its weights to and from Hugging Face folders.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchtitan.tools.utils  # noqa: F401  (decides on the device; set_device corrects it)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from cospec import hf
from cospec.config import PolicyConfig, RopeConfig, require


def set_device(device: torch.device) -> None:
    """Tell torchtitan which device it runs on.

    It decides that while it is imported, and takes a machine without an accelerator for
    a CUDA one; its modules copy the answer, so the copies are set too.
    """
    values = {
        "device_type": device.type,
        "device_module": torch.get_device_module(device.type),
        "get_local_device": lambda: device,
    }
    for name, module in list(sys.modules.items()):
        if name == "torchtitan" or name.startswith("torchtitan."):
            for key, value in values.items():
                if key in vars(module):
                    setattr(module, key, value)


if not torch.cuda.is_available():
    set_device(torch.device("cpu"))  # before the imports below: they read it once
logging.getLogger("torchtitan").setLevel(logging.WARNING)
# Its router asks for a float32 autocast, which the CPU has no need of.
warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype is not supported")

from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part  # noqa: E402
from torchtitan.models import llama3, qwen3  # noqa: E402
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.models.common.attention import FusedQKVLinear, QKVLinear  # noqa: E402
from torchtitan.models.common.config_utils import (  # noqa: E402
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.decoder import Decoder  # noqa: E402
from torchtitan.models.common.param_init import skip_param_init  # noqa: E402
from torchtitan.models.common.rope import RoPE  # noqa: E402
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock  # noqa: E402
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter  # noqa: E402
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock  # noqa: E402
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter  # noqa: E402
from torchtitan.protocols.module import Module  # noqa: E402

DecoderConfig = Decoder.Config
INIT_STD = 0.02


class PackedAttention(Module):
    """Inner attention that hands the packed rows to the attention context of the call.

    The context is whatever the model was given as `attention_masks`: an object with
    `attend(layer_id, q_TNH, k_TMH, v_TMH, scale) -> out_TNH`. So one model serves
    training (packed documents, context parallel) and decoding (key/value caches).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        layer_id: int

    def __init__(self, config: Config):
        super().__init__()
        self.layer_id = config.layer_id

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks, scale=None, enable_gqa=False, **_) -> Tensor:
        if not hasattr(attention_masks, "attend"):
            raise TypeError(
                f"attention_masks is a {type(attention_masks).__name__}; the policy needs an attention context with "
                "attend(layer_id, q, k, v, scale)"
            )
        if scale is None:
            scale = q_BLNH.shape[-1] ** -0.5
        out_TNH = attention_masks.attend(
            self.layer_id, q_BLNH.flatten(0, 1), k_BLNH.flatten(0, 1), v_BLNH.flatten(0, 1), scale
        )
        return out_TNH.unflatten(0, q_BLNH.shape[:2])


class PolicyCosSinRoPE(CosSinRoPE):
    """Rotate-half RoPE with every scaling of `RopeConfig` (torchtitan's lacks some)."""

    config: PolicyCosSinRoPE.Config

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        settings: RopeConfig

    def _precompute_cache(self) -> Tensor:
        angles, factor = _rope_angles(self.config, self.config.settings)
        return torch.cat([angles.cos(), angles.cos(), angles.sin(), angles.sin()], dim=-1) * factor


class PolicyComplexRoPE(ComplexRoPE):
    """Adjacent-pair RoPE with every scaling of `RopeConfig`."""

    config: PolicyComplexRoPE.Config

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        settings: RopeConfig

    def _precompute_cache(self) -> Tensor:
        angles, factor = _rope_angles(self.config, self.config.settings)
        return torch.complex(angles.cos() * factor, angles.sin() * factor)


def _rope_angles(config: RoPE.Config, settings: RopeConfig) -> tuple[Tensor, float]:
    """Angles [max_seq_len, dim / 2] on the default device, and the factor of cos and sin."""
    inv_freq, factor = hf.rope_frequencies(settings, config.dim)
    positions = torch.arange(config.max_seq_len, dtype=torch.float32)
    return torch.outer(positions, inv_freq.to(positions.device)), factor


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


def build_model(config: DecoderConfig, *, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Decoder:
    """A plain, uninitialised model: parameters in `dtype`, buffers (RoPE tables) computed.

    It returns the normed final hidden state, not logits (see `skip_lm_head`). Fill it with
    `init_parameters`, `load_hf` or `load_state_dict`.
    """
    model = build_meta(config, dtype=dtype)
    materialise(model, torch.device(device))
    return model


def build_meta(config: DecoderConfig, *, dtype: torch.dtype = torch.float32) -> Decoder:
    """The same without memory; shard it, then call `materialise`."""
    with torch.device("meta"):
        model = config.build()
    for parameter in model.parameters():  # not model.to(dtype): RoPE tables keep their own
        parameter.data = parameter.data.to(dtype)
    skip_lm_head(model)
    return model


def materialise(model: Decoder, device: torch.device) -> None:
    """Give a model built on the meta device (sharded or not) memory, buffers and its tied weight."""
    model.to_empty(device=device)
    if model.enable_weight_tying:  # to_empty makes two tensors of the shared one
        model.tok_embeddings.weight = model.lm_head.weight
    tables: dict[str, Tensor] = {}
    for module in model.modules():
        if isinstance(module, RoPE):  # equal in every layer: one table serves all
            key = f"{type(module).__name__}{module.config}"
            if key not in tables:
                module._init_self_buffers(buffer_device=device)
                tables[key] = module.cache
            module.cache = tables[key]
        elif isinstance(module, Module):
            module._init_self_buffers(buffer_device=device)


def stage_layers(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    """The layers of each pipeline stage, as torchtitan splits them.

    Embeddings and head count as a layer each, so the first and the last stage have fewer
    (the last may have none). Raises ConfigError when there are fewer layers than stages.
    """
    rule = f"must be >= the {num_stages} pipeline stages"
    require(num_layers >= num_stages, "policy.num_hidden_layers", num_layers, rule)
    names = _generate_llm_fqn_per_model_part(num_stages, num_layers)
    return [tuple(int(n.split(".")[1]) for n in part if n.startswith("layers.")) for part in names]


def cut_stage(model: Decoder, stage: int, num_stages: int) -> None:
    """Keep one pipeline stage of a model built by `build_meta`, see `stage_layers`.

    The first stage keeps the token embeddings, the last the final norm and the head; names
    of parameters stay those of the whole model. Raises ConfigError when there are fewer
    layers than stages, or when embeddings and head are one tensor that two stages would need.
    """
    require(0 <= stage < num_stages, "stage", stage, f"must be in 0..{num_stages - 1}")
    if num_stages == 1:
        return
    count = len(model.layers)
    kept = stage_layers(count, num_stages)[stage]
    rule = "must be false with pipeline stages: embeddings and head are on different ranks"
    require(not model.enable_weight_tying, "policy.tie_word_embeddings", True, rule)
    for i in range(count):
        if i not in kept:
            del model.layers[str(i)]
    if stage > 0:
        model.tok_embeddings = None
    if stage < num_stages - 1:
        model.norm = None
        model.lm_head = None


def skip_lm_head(model: Decoder, skip: bool = True) -> None:
    """Make the model return its normed final hidden state: losses apply the head in chunks."""
    model._skip_lm_head = skip


def head_weight(model: Decoder) -> Tensor:
    """The policy's output head [V, D], whole, in the model's compute dtype.

    Under FSDP this is the unsharded parameter between the root's forward and its backward
    (gradients flow); at other times a detached gathered copy, a collective call.
    """
    if model.lm_head is None:
        raise ValueError("this pipeline stage has no head: the last one has")
    weight = model.lm_head.weight
    if isinstance(weight, DTensor):
        return weight.full_tensor().detach().to(getattr(model, "compute_dtype", weight.dtype))
    return weight


@torch.no_grad()
def init_parameters(model: nn.Module, seed: int) -> None:
    """Draw every parameter from a generator seeded by (seed, its name).

    A parameter's values depend on nothing else: not on the other parameters that the
    module has (pipeline stages), nor on how it is sharded (it is drawn whole, in float32
    on the CPU, then cut). The global generator's state is kept.
    """
    saved = torch.get_rng_state()
    try:
        done: set[int] = set()
        for name, parameter, init in _initialisers(model):
            if id(parameter) in done:
                continue
            done.add(id(parameter))
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            # Initialisers of torchtitan specs take no generator, so the global one is lent.
            torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            full = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            init(full)
            assign(parameter, full)
    finally:
        torch.set_rng_state(saved)


def _initialisers(model: nn.Module) -> Iterable[tuple[str, nn.Parameter, Callable[[Tensor], object]]]:
    tied = getattr(model, "enable_weight_tying", False)
    for prefix, module in model.named_modules():
        for local, parameter in module.named_parameters(recurse=False):
            name = plain_name(f"{prefix}.{local}".lstrip("."))
            if tied and name == "tok_embeddings.weight" and model.lm_head is not None:
                continue  # drawn as the head
            init = (getattr(module, "_param_init", None) or {}).get(local)
            if init is None:
                raise ValueError(f"parameter {name} has no initialiser: set param_init in its torchtitan config")
            yield name, parameter, init


@torch.no_grad()
def assign(parameter: Tensor, full: Tensor) -> None:
    """Copy a whole tensor into a parameter, cutting it when the parameter is sharded. No communication."""
    if isinstance(parameter, DTensor):
        value = full.to(parameter.device, parameter.dtype)
        cut = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(cut.to_local())
    else:
        parameter.copy_(full)


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


def plain_name(name: str) -> str:
    """A parameter's name without the marks that activation checkpointing leaves in it."""
    return name.replace("_checkpoint_wrapped_module.", "")
