"""Policies built from specs, cut into stages, filled by name and seed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.rope import RoPE
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher
from torchtitan.protocols.module import Module

from cospec.config import require
from cospec.titan.spec import DecoderConfig


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


def spread_experts(model: Decoder, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Leave this rank its part of the experts of every mixture, by expert over the one axis of `mesh`, in place.

    For a model of `build_meta`. torchtitan's dispatcher then takes each token to the ranks of its
    experts and back (all-to-all). Returns the experts' parameters, DTensors on `mesh`.
    Raises ValueError for a spec whose dispatcher knows no ranks.
    """
    found: set[nn.Parameter] = set()
    for module in model.modules():
        if not isinstance(module, RoutedExperts):
            continue
        if not isinstance(module.token_dispatcher, BaseEPTokenDispatcher):
            kind = type(module.token_dispatcher).__name__
            raise ValueError(f"mesh.ep: the policy's experts have a {kind}; use torchtitan's AllToAllTokenDispatcher")
        for name, parameter in list(module.inner_experts.named_parameters()):
            part = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            part = nn.Parameter(part, requires_grad=parameter.requires_grad)
            module.inner_experts.register_parameter(name, part)
            found.add(part)
        module.token_dispatcher.wire_meshes(ep_mesh=mesh)
    return found


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


def plain_name(name: str) -> str:
    """A parameter's name without the marks that activation checkpointing leaves in it."""
    return name.replace("_checkpoint_wrapped_module.", "")
