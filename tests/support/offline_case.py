"""A tiny policy, its features and offline runs on them, for tests of one rank and of many."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch

from cospec.config import (
    CheckpointConfig,
    DraftConfig,
    EvalConfig,
    MeshConfig,
    OfflineConfig,
    OptimConfig,
    PolicyConfig,
    RunConfig,
    TrainConfig,
)
from cospec.data.source import synthetic_documents
from cospec.features.extract import extract, open_writer
from cospec.features.samples import Samples
from cospec.features.source import FeatureInfo
from cospec.features.teacher import gather_ends, save_ends
from cospec.mesh import Mesh, build_mesh
from cospec.policy.build import build_policy
from cospec.policy.runner import SequentialRunner
from cospec.policy.weights import save_hf

V = 61
TAPS = (0, 1, 2)
POLICY = PolicyConfig(
    vocab_size=V,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
)


def documents(count: int = 24):
    return synthetic_documents(count, V, seed=3, length=(5, 30))


def save_policy(folder: Path, seed: int = 5) -> None:
    policy = build_policy(POLICY, seed=seed)
    with torch.no_grad():
        policy.lm_head.weight.mul_(9)  # an untrained policy is nearly uniform: nothing to learn from it
    save_hf(policy.config, dict(policy.state_dict()), folder)


def samples_of(docs) -> Samples:
    def fields(i: int) -> dict:
        return {"input_ids": docs[i].input_ids, "loss_mask": docs[i].loss_mask.long().tolist()}

    return Samples(len(docs), fields, lambda i: f"sample {i}", "synthetic")


def info(per_shard: int, dtype: str) -> FeatureInfo:
    return FeatureInfo(
        format="cospec",
        last_is_normed=True,
        tap_layers=TAPS,
        num_taps=3,
        hidden_size=POLICY.hidden_size,
        vocab_size=V,
        dtype=dtype,
        policy="tiny",
        policy_config=asdict(POLICY),
        settings={"documents_per_shard": per_shard},
    )


def extract_store(
    output: Path, policy_folder: Path, docs, mesh: Mesh, *, dtype: str = "float32", per_shard: int = 8, row_tokens=64
) -> None:
    policy = build_policy(PolicyConfig(hf_path=str(policy_folder)), mesh)
    runner = SequentialRunner(policy, mesh, RunConfig().attention, TAPS)
    samples = samples_of(docs)
    writer = open_writer(output, info(per_shard, dtype), mesh, num_shards=-(-len(samples) // per_shard))
    ends = gather_ends(runner.parts, mesh, POLICY)
    if mesh.world_rank == 0:
        save_ends(output, ends)
    extract(
        runner,
        samples,
        writer,
        mesh,
        documents_per_shard=per_shard,
        row_tokens=row_tokens,
        vocab_size=V,
        max_positions=POLICY.max_position_embeddings,
    )
    writer.close()


def run_config(output: Path, features: Path, policy_folder: Path | None, *, mesh=None, steps=6, **changes) -> RunConfig:
    draft = {"num_passes": 3, "tap_layers": TAPS, **changes.pop("draft", {})}
    values = {
        "output_dir": str(output),
        "policy": PolicyConfig(hf_path=None if policy_folder is None else str(policy_folder)),
        "mesh": mesh or MeshConfig(),
        "draft": DraftConfig(**draft),
        "draft_optim": OptimConfig(lr=1e-3, clip_norm=1e6),
        "policy_optim": OptimConfig(lr=1e-3),
        "train": TrainConfig(steps=steps, batch_documents=5, row_tokens=64, device="cpu"),
        "offline": OfflineConfig(features=str(features), validation_share=0.2),
        "eval": EvalConfig(every=0),
        "checkpoint": CheckpointConfig(),
    }
    return RunConfig(**{**values, **changes})


def one_rank() -> Mesh:
    return build_mesh(MeshConfig(), device="cpu")


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    out = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        grad = parameter.grad
        out[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).detach().clone()
    return out
