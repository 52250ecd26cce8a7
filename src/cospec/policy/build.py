"""From a `PolicyConfig` to a policy that trains on this rank's share of the mesh."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard

from cospec import titan
from cospec.config import ConfigError, PolicyConfig, check_expert_parts
from cospec.mesh import Mesh
from cospec.policy.weights import load_hf
from cospec.titan import head_weight as head_weight  # part of this module's interface


def build_policy(
    cfg: PolicyConfig | titan.DecoderConfig,
    mesh: Mesh | None = None,
    *,
    seed: int = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    stage: int = 0,
    num_stages: int = 1,
    activation_checkpoint: bool = False,
) -> nn.Module:
    """The policy with its weights: read from `cfg.hf_path`, else drawn by name and seed.

    `policy(tokens [1, T], positions=[1, T], attention_masks=context) -> [1, T, D]`, the
    normed final hidden state; `titan.head_weight(policy)` is the head.

    Sharding: FSDP2 over the mesh's dp x cp, each block a group of its own and embeddings,
    final norm and head the root group, which stays unsharded from forward to backward. With
    `mesh.ep` a mixture's experts are spread by expert over ep ranks, and each part is sharded
    over the ranks that have the same.
    Gradients are *summed* over the ranks: losses carry the global normalisation.
    Numerics: parameters and gradients are float32; `dtype` is the compute dtype (float64
    makes parameters float64 too). bfloat16 always goes through FSDP2's mixed precision,
    on a single process over a mesh of one rank, for which a process group is started.

    A forward leaves the root group gathered: run none between a backward and the
    optimizer's step, or the next forward still uses the old embeddings and head.

    Args:
        cfg: settings, or a torchtitan decoder spec of your own (see `titan.with_packed_attention`).
        stage, num_stages: which pipeline stage to build (see `titan.cut_stage`); it has the
            values that the whole policy has there.
        activation_checkpoint: recompute every block in backward.

    Raises ConfigError for sizes that do not fit, and when `mesh.ep` cannot share out the experts.
    """
    device = torch.device(device or (mesh.device if mesh is not None else "cpu"))
    spec = titan.build_config(cfg) if isinstance(cfg, PolicyConfig) else titan.with_packed_attention(cfg)
    expert_mesh = mesh.expert_mesh if mesh is not None else None
    check_expert_parts(mesh.ep_size if mesh is not None else 1, titan.num_experts(spec))
    storage = torch.float64 if dtype == torch.float64 else torch.float32
    model = titan.build_meta(spec, dtype=storage)
    titan.cut_stage(model, stage, num_stages)
    experts = titan.spread_experts(model, expert_mesh["ep"]) if expert_mesh is not None else set()
    if activation_checkpoint:
        for name, block in model.layers.items():
            model.layers[name] = checkpoint_wrapper(block)  # names in state dicts stay
    fsdp_mesh = mesh.fsdp_mesh if mesh is not None else None
    if fsdp_mesh is None and dtype != storage:
        fsdp_mesh = (mesh.shard_mesh if mesh is not None else None) or _mesh_of_one(device)
    if fsdp_mesh is not None:
        efsdp = expert_mesh["efsdp"] if expert_mesh is not None else None
        shard(model, fsdp_mesh, dtype, reshard_after_forward=num_stages == 1, experts=experts, expert_mesh=efsdp)
    titan.materialise(model, device)
    model.compute_dtype = dtype
    if isinstance(cfg, PolicyConfig) and cfg.hf_path is not None:
        try:
            load_hf(model, cfg.hf_path)
        except ValueError as error:  # every rank reads the same files and raises the same
            raise ConfigError("policy.hf_path", cfg.hf_path, f"its tensors do not fit its config: {error}") from error
    else:
        titan.init_parameters(model, seed)
    return model


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    *,
    reshard_after_forward: bool = True,
    experts: Collection[nn.Parameter] = (),
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Apply FSDP2 in place: each entry of `model.layers`, then the rest as the root group.

    reshard_after_forward: False keeps blocks gathered until backward, which saves a pipeline
        one gather per microbatch.
    experts: parameters that are sharded over `expert_mesh` instead of `mesh`.
    """
    place = None
    if expert_mesh is not None:
        place = partial(_place_experts, experts=experts, mesh=FSDPMeshInfo(expert_mesh, shard_mesh_dim=0))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.promote_types(dtype, torch.float32))
    for block in model.layers.values():
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=precision,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=place,
        )
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has neither AVG nor PREMUL_SUM


def _place_experts(
    parameter: nn.Parameter, *, experts: Collection[nn.Parameter], mesh: FSDPMeshInfo
) -> ShardPlacementResult | None:
    """Experts [E, ., .] are cut by expert where there is one for every rank at least, else inside of each."""
    if parameter not in experts:
        return None
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    few = mesh.shard_mesh_size > local.shape[0] and local.shape[1] % mesh.shard_mesh_size == 0
    return ShardPlacementResult(Shard(1 if few else 0), mesh)


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict as whole CPU tensors (copies), gathered one at a time. A collective call.

    Names are those of the unsharded model: `load_state_dict` of a plain copy takes them.
    """
    state: dict[str, Tensor] = {}
    seen: dict[int, str] = {}
    for name, value in model.state_dict().items():
        if id(value) in seen:  # tied weights are gathered once
            state[name] = state[seen[id(value)]]
            continue
        seen[id(value)] = name
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        state[name] = whole.detach().to("cpu", copy=True)
    return state


def _mesh_of_one(device: torch.device) -> DeviceMesh:
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device.type, (1,), mesh_dim_names=("fsdp",))
