"""Co-training runs on a mesh of any shape, for tests that compare topologies."""

from __future__ import annotations

from dataclasses import replace

import torch

from cospec.config import DraftConfig, MeshConfig, OptimConfig, PipelineConfig, PolicyConfig, RunConfig, TrainConfig
from cospec.data.source import DocumentStream, synthetic_documents
from cospec.mesh import build_mesh
from cospec.records import Document, StepStats
from cospec.train.setup import build_learner
from cospec.train.step import Learner, cotrain_step

VOCAB = 61


def config(mesh: MeshConfig | None = None, *, pipeline: PipelineConfig | None = None, **policy) -> RunConfig:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "moe_intermediate_size": 16,
    }
    optim = OptimConfig(name="adamw", lr=1e-3)
    return RunConfig(
        mesh=mesh or MeshConfig(),
        policy=PolicyConfig(**{**sizes, **policy}),
        policy_optim=optim,
        draft=DraftConfig(num_passes=3, share=1.0),
        draft_optim=optim,
        pipeline=pipeline or PipelineConfig(tap_timeout_s=30.0),
        train=TrainConfig(steps=10, row_tokens=48, device="cpu", dtype="float32", logit_chunk=24, comm_timeout_s=60.0),
    )


def batch(step: int, count: int = 8) -> list[Document]:
    stream = DocumentStream(synthetic_documents(40, VOCAB, length=(2, 40), seed=1), seed=2)
    return stream.batch(step, count)


def make(run: RunConfig) -> Learner:
    mesh = build_mesh(run.mesh, device="cpu", timeout_s=run.train.comm_timeout_s)
    torch.manual_seed(run.seed)
    return build_learner(run, mesh)


def figures(stats: StepStats) -> tuple[float, float, float, float]:
    return stats.policy_loss, stats.draft_loss, stats.policy_grad_norm, stats.draft_grad_norm


def train(rank: int, run: RunConfig, steps: int = 10, **options) -> list[tuple[float, ...]]:
    """Figures of every step: policy loss, draft loss, both gradient norms."""
    learner = make(run)
    return [figures(cotrain_step(learner, batch(step), step=step, **options)) for step in range(steps)]


def with_pipeline(run: RunConfig, **changes) -> RunConfig:
    return replace(run, pipeline=replace(run.pipeline, **changes))
