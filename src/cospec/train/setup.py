"""From a config to a Learner, and the life of a run around it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from cospec.config import RunConfig, require
from cospec.draft.attach import attach_draft
from cospec.export.eagle3 import load_draft
from cospec.mesh import Mesh, build_mesh, choose_dtype, close_mesh
from cospec.policy.build import build_policy
from cospec.policy.runner import SequentialRunner
from cospec.train.draft_side import DraftSide
from cospec.train.metrics import MetricsLog, check_run_folder
from cospec.train.optim import Optimizer
from cospec.train.resume import Checkpoints
from cospec.train.step import Learner


@contextmanager
def open_mesh(config: RunConfig) -> Iterator[Mesh]:
    """The mesh of the run, left together at the end; seeds and determinism are set."""
    mesh = build_mesh(config.mesh, device=config.train.device, timeout_s=config.train.comm_timeout_s)
    random.seed(config.seed)
    torch.manual_seed(config.seed)
    torch.use_deterministic_algorithms(config.train.deterministic)
    yield mesh
    # Not in a finally: after an error on one rank the others may never reach the barrier.
    close_mesh(mesh)


def build_learner(config: RunConfig, mesh: Mesh, *, total_steps: int | None = None) -> Learner:
    """Policy, draft (unless draft.enabled is off), runner and optimizers."""
    dtype = choose_dtype(config.train.dtype, mesh.device)
    steps = config.train.steps if total_steps is None else total_steps
    policy = build_policy(config.policy, mesh, seed=config.seed, device=mesh.device, dtype=dtype)
    draft = None
    if config.draft.enabled:
        checkpoint = load_draft(config.draft.init) if config.draft.init is not None else None
        model = attach_draft(
            policy, config.draft, mesh=mesh, seed=config.seed, checkpoint=checkpoint, device=mesh.device, dtype=dtype
        )
        draft = DraftSide(config, mesh, model, Optimizer([model], config.draft_optim, steps))
    runner = SequentialRunner(policy, mesh, config.attention, draft.model.config.tap_layers if draft else ())
    return Learner(config, mesh, runner, Optimizer(runner.parts, config.policy_optim, steps), draft)


@contextmanager
def open_run(
    config: RunConfig, mesh: Mesh, *, data: Mapping[str, Any], phases: tuple[str, ...], longest: int = 0
) -> Iterator[tuple[Learner, Checkpoints, MetricsLog]]:
    """Learner, checkpoints and record of a run; nothing is written before every setting was found to fit.

    Args:
        data, phases: see `Checkpoints`.
        longest: tokens of the longest sequence known beforehand; must fit the policy's positions.
    """
    check_run_folder(config)
    learner = build_learner(config, mesh)
    positions = learner.runner.parts[0].config.max_seq_len
    rule = f"must be at least {longest}, the longest sequence in tokens"
    require(longest <= positions, "policy.max_position_embeddings", positions, rule)
    saves = Checkpoints(config, learner, data=data, phases=phases)
    with MetricsLog(config, rank=mesh.world_rank) as log:
        if config.checkpoint.resume:
            log.resume(saves.recorded_steps)
        log.note(describe(learner))
        if saves.path is not None:
            log.note(f"resuming from {saves.path}")
        yield learner, saves, log


def describe(learner: Learner) -> str:
    """One line for the console: what trains where."""
    mesh = learner.mesh
    policy = sum(p.numel() for part in learner.runner.parts for p in part.parameters())
    text = f"policy {policy / 1e6:.2f} M parameters"
    if learner.draft is not None:
        draft = sum(p.numel() for p in learner.draft.model.parameters())
        text += (
            f", draft {draft / 1e6:.2f} M reading layers {', '.join(map(str, learner.draft.model.config.tap_layers))}"
        )
    return f"{text}; {mesh.device.type}, pp {mesh.pp_size} x dp {mesh.dp_size} x cp {mesh.cp_size}"
