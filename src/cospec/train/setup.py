"""From a config to a Learner, and the life of a run around it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from cospec.channel.pipeline import PipelineChannel
from cospec.channel.plan import plan_taps
from cospec.config import ConfigError, RunConfig, require
from cospec.draft.attach import attach_draft
from cospec.export.eagle3 import load_draft
from cospec.features.vocab import load_vocab
from cospec.mesh import Mesh, build_mesh, choose_dtype, close_mesh
from cospec.ops.kernels import choose_kernel
from cospec.policy.build import build_policy
from cospec.policy.pipeline import PipelineRunner
from cospec.policy.runner import Runner, SequentialRunner
from cospec.policy.schedule import action_order, stage_ranks
from cospec.titan import stage_layers
from cospec.train.draft_side import DraftSide, shell
from cospec.train.faults import watched
from cospec.train.metrics import MetricsLog, check_run_folder
from cospec.train.optim import Optimizer
from cospec.train.resume import Checkpoints
from cospec.train.serving import end
from cospec.train.step import Learner


@contextmanager
def open_mesh(config: RunConfig, *, can_serve: bool = False) -> Iterator[Mesh]:
    """The mesh of the run, left together at the end; seeds and determinism are set.

    can_serve: see `build_mesh`; ranks that serve are left when the others come to the end.

    Raises RankFault where a rank fails or falls silent, see train.faults.
    """
    mesh = build_mesh(
        config.mesh, device=config.train.device, timeout_s=config.train.comm_timeout_s, can_serve=can_serve
    )
    random.seed(config.seed)
    torch.manual_seed(config.seed)
    torch.use_deterministic_algorithms(config.train.deterministic)
    with watched(config, mesh):
        yield mesh
        if mesh.link is not None and not mesh.serves_only:
            end(mesh.link)
    # Not in a finally: after an error on one rank the others may never reach the barrier.
    close_mesh(mesh)


def build_learner(config: RunConfig, mesh: Mesh, *, total_steps: int | None = None) -> Learner:
    """Policy, draft (unless draft.enabled is off), runner and optimizers."""
    dtype = choose_dtype(config.train.dtype, mesh.device)
    try:
        choose_kernel(mesh.device, dtype, config.attention.kernel)
    except ValueError as error:
        raise ConfigError("attention.kernel", config.attention.kernel, str(error)) from error
    steps = config.train.steps if total_steps is None else total_steps
    stages = build_stages(config, mesh, dtype)
    some_part = next(iter(stages.values()))
    draft = build_draft(config, mesh, some_part, dtype=dtype, total_steps=steps) if config.draft.enabled else None
    tap_layers = draft.model.config.tap_layers if draft else ()
    runner: Runner
    if mesh.pp_size == 1:
        runner = SequentialRunner(stages[0], mesh, config.attention, tap_layers)
    else:
        runner = build_pipeline(config, mesh, stages, tap_layers, dtype)
    return Learner(config, mesh, runner, Optimizer(runner.parts, config.policy_optim, steps), draft)


def build_stages(config: RunConfig, mesh: Mesh, dtype: torch.dtype) -> dict[int, torch.nn.Module]:
    """The parts of the policy on this rank by pipeline stage: one, the whole, without a pipeline."""
    options = {
        "seed": config.seed,
        "device": mesh.device,
        "dtype": dtype,
        "activation_checkpoint": config.train.activation_checkpoint,
    }
    if mesh.pp_size == 1:
        return {0: build_policy(config.policy, mesh, **options)}
    ranks = stage_ranks(config.pipeline.schedule, mesh.pp_size)
    options["num_stages"] = len(ranks)
    return {
        s: build_policy(config.policy, mesh, stage=s, **options) for s, rank in enumerate(ranks) if rank == mesh.pp_rank
    }


def build_pipeline(
    config: RunConfig, mesh: Mesh, stages: dict[int, torch.nn.Module], tap_layers: Sequence[int], dtype: torch.dtype
) -> PipelineRunner:
    """The runner of a policy in stages and, with tap layers, the channel that its taps go by."""
    pipeline, spec = config.pipeline, next(iter(stages.values())).config
    shape = (config.train.row_tokens // (2 * mesh.cp_size) * 2, spec.dim)
    channel = None
    if tap_layers:
        ranks = stage_ranks(pipeline.schedule, mesh.pp_size)
        plan = plan_taps(
            action_order(pipeline.schedule, mesh.pp_size, pipeline.microbatches),
            ranks,
            stage_layers(len(spec.layers), len(ranks)),
            tap_layers,
            shape=shape,
            source_dtype=dtype,
            dtype=None if pipeline.tap_dtype == "auto" else choose_dtype(pipeline.tap_dtype, mesh.device),
            slots=pipeline.tap_slots,
            deferred=pipeline.defer_draft,
        )
        channel = PipelineChannel(plan, mesh, timeout_s=pipeline.tap_timeout_s)
    return PipelineRunner(
        stages, mesh, pipeline, config.attention, shape=shape, dtype=dtype, tap_layers=tap_layers, port=channel
    )


def build_draft(
    config: RunConfig, mesh: Mesh, policy, *, dtype: torch.dtype, total_steps: int, tokenizer: str | None = None
) -> DraftSide:
    """The draft, new or from `draft.init`, with its vocabulary and optimizer; a shell away from the last stage.

    Args:
        policy: read for its `config` only.
        tokenizer: hash of the policy's tokenizer where it is known; a saved vocabulary must be of the same.
    """
    settings, vocab = config.draft, None
    checkpoint = load_draft(settings.init, tap_layers=settings.tap_layers) if settings.init is not None else None
    if settings.vocab_path is not None:
        rule = "cannot be given with draft.init: the draft brings its own vocabulary"
        require(checkpoint is None, "draft.vocab_path", settings.vocab_path, rule)
        vocab = load_vocab(settings.vocab_path, policy.config.vocab_size, tokenizer=tokenizer)
        if settings.draft_vocab_size is None:
            settings = replace(settings, draft_vocab_size=vocab.numel())
    home = stage_ranks(config.pipeline.schedule, mesh.pp_size)[-1] if mesh.pp_size > 1 else 0
    here = mesh.pp_rank == home
    model = attach_draft(  # on every rank, so that a setting that does not fit is found on all
        policy,
        settings,
        mesh=mesh if here else None,
        seed=config.seed,
        vocab=vocab,
        checkpoint=checkpoint,
        device=mesh.device if here else "cpu",
        dtype=dtype,
    )
    if not here:
        model = shell(model)
    return DraftSide(config, mesh, model, Optimizer([model], config.draft_optim, total_steps), home)


@contextmanager
def open_run(
    config: RunConfig,
    mesh: Mesh,
    *,
    data: Mapping[str, Any],
    phases: tuple[str, ...],
    longest: int = 0,
    vocab_size: int = 0,
) -> Iterator[tuple[Learner, Checkpoints, MetricsLog]]:
    """Learner, checkpoints and record of a run; nothing is written before every setting was found to fit.

    Args:
        data, phases: see `Checkpoints`.
        longest: tokens of the longest sequence known beforehand; must fit the policy's positions.
        vocab_size: of the data, where it is known beforehand; the policy must have as many tokens.
    """
    check_run_folder(config)
    learner = build_learner(config, mesh)
    spec = learner.runner.parts[0].config
    positions = spec.max_seq_len
    rule = f"must be at least {longest}, the longest sequence in tokens"
    require(longest <= positions, "policy.max_position_embeddings", positions, rule)
    rule = f"the policy has {spec.vocab_size} tokens, must be at least {vocab_size}: the task's vocabulary"
    require(vocab_size <= spec.vocab_size, "policy.vocab_size", spec.vocab_size, rule)
    saves = Checkpoints(config, learner, data=data, phases=phases)
    with MetricsLog(config, rank=mesh.world_rank) as log:
        if config.checkpoint.resume:
            log.resume(saves.recorded_steps)
        log.note(describe(learner))
        if saves.path is not None:
            log.note(f"resuming from {saves.path}")
        yield learner, saves, log


def describe(learner: Learner) -> str:
    """One line for the console: what trains where. A collective call."""
    mesh = learner.mesh
    own = sum(p.numel() for part in learner.runner.parts for p in part.parameters())
    first = mesh.dp_rank == mesh.cp_rank == 0  # shards of one stage say the size of the whole
    policy = mesh.sum_all(torch.tensor(float(own if first else 0), dtype=torch.float64, device=mesh.device)).item()
    text = f"policy {policy / 1e6:.2f} M parameters"
    if learner.draft is not None:
        draft = sum(p.numel() for p in learner.draft.model.parameters())
        text += (
            f", draft {draft / 1e6:.2f} M reading layers {', '.join(map(str, learner.draft.model.config.tap_layers))}"
        )
    text += f"; {mesh.device.type}, pp {mesh.pp_size} x dp {mesh.dp_size} x cp {mesh.cp_size}"
    if mesh.ep_size > 1:
        text += f", ep {mesh.ep_size}"
    return text if mesh.link is None else f"{text} + serve {len(mesh.link.serving)}"
