"""The runs: RL with speculative rollouts (`run_rl`), supervised co-training (`run_sft`).

warm start -> [ rollouts -> step -> refit ] x steps -> evaluation -> report
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cospec.config import ConfigError, RunConfig, require
from cospec.data.source import DocumentStream, read_dataset, read_jsonl, synthetic_documents
from cospec.records import Document
from cospec.rl.checked import CheckedTask
from cospec.rl.grpo import METRICS, policy_loss, policy_metrics
from cospec.rl.tasks import Task, make_task
from cospec.train.evaluate import Evaluator
from cospec.train.faults import doing
from cospec.train.metrics import MetricsLog, step_row
from cospec.train.optim import Optimizer
from cospec.train.report import write_report
from cospec.train.resume import Checkpoints, frozen_copy
from cospec.train.rollouts import (
    build_engine,
    build_served_engine,
    check_engine,
    refit,
    roll_out,
    rollout_row,
    sampling,
    serving_ranks,
    static_draft_ranks,
    to_documents,
)
from cospec.train.serving import serve
from cospec.train.setup import open_mesh, open_run
from cospec.train.step import Learner, LossRows, cotrain_step, policy_logprobs

WARM_POLICY, WARM_DRAFT, RUN = "warm start, policy", "warm start, draft", "steps"


def run_rl(config: RunConfig, task: Task | None = None) -> None:
    """Speculative RL rollouts, policy step, draft co-training and refit on one mesh.

    task: one of your own, instead of the one that `rl.task` names; its prompts and demonstrations are
        the same on every rank. Rewards are asked for on the first rank, once for each rollout.

    Raises TaskError where the task fails or gives what cannot be used, see rl.checked.
    """
    name = config.rl.task if task is None else type(task).__name__
    task = CheckedTask(make_task(config.rl.task, seed=config.seed) if task is None else task)
    config = replace(config, policy=replace(config.policy, vocab_size=task.vocab_size))
    limits = {"longest": _check_lengths(config, task), "vocab_size": task.vocab_size}
    check_engine(config)
    _check_share(config, config.rl.prompts_per_step * config.rl.samples_per_prompt, "rollouts")
    task.eval_prompts(config.eval.prompts)  # raises before the warm start, not after it
    rl = config.rl
    data = {
        "task": name,
        "prompts_per_step": rl.prompts_per_step,
        "samples_per_prompt": rl.samples_per_prompt,
        "stop_token_id": task.stop_token_id,
    }
    phases = (WARM_POLICY, WARM_DRAFT, RUN)
    with ExitStack() as stack:
        mesh = stack.enter_context(open_mesh(config, can_serve=True))
        if mesh.serves_only:
            serve(mesh, partial(build_served_engine, config, mesh.device))
            return
        run = open_run(config, mesh, data=data, phases=phases, **limits)
        learner, saves, log = stack.enter_context(run)
        warm_start(learner, task, log, saves)
        serving = serving_ranks(config, mesh)
        static_draft = None
        if learner.draft is not None and config.eval.static_control:
            static_draft = frozen_copy(learner.draft, static_draft_ranks(config, mesh))
        engine = build_engine(config, learner, max_prompt=task.max_prompt_tokens)
        first_step = saves.enter(RUN, learner, static_draft) or 0
        evaluator = Evaluator(config, task, engine, learner, static_draft, log)
        refit(engine, learner, version=first_step)
        if saves.recorded_steps is None:
            evaluator.run(step=0)
            saves.save(RUN, 0, learner, static_draft)
        params, group, steps = sampling(config, task), rl.samples_per_prompt, config.train.steps
        for step in range(first_step, steps):
            doing(f"rollouts of step {step}")
            started = time.perf_counter()
            first = step * rl.prompts_per_step
            prompts = [task.train_prompt(first + i) for i in range(rl.prompts_per_step) for _ in range(group)]
            scored = roll_out(engine, task, prompts, params, mesh, first_sample=first * group, serving=serving)
            row = rollout_row(scored, time.perf_counter() - started)
            doing(f"training step {step}")
            row |= rl_updates(learner, to_documents(scored, config), step)
            doing(f"the refit after step {step}")
            begun = time.perf_counter()
            refit(engine, learner, version=step + 1)
            log.step(step, row | {"refit_s": time.perf_counter() - begun})
            if step + 1 == steps or (config.eval.every and (step + 1) % config.eval.every == 0):
                evaluator.run(step=step + 1)
            saves.step_done(RUN, step + 1, steps, learner, static_draft)
        speed = evaluator.speed()
        if mesh.world_rank == 0:
            rows, evaluations = log.rows(), log.evaluations()
            log.note(write_report(config.output_dir, rows=rows, evaluations=evaluations, speed=speed))


def rl_updates(learner: Learner, documents: list[Document], step: int) -> dict[str, Any]:
    """The optimizer steps on one batch of rollouts; the draft trains in the first. Returns their fields of a row."""
    config, mesh = learner.config, learner.mesh
    sums = torch.zeros(len(METRICS) + 1, dtype=torch.float64, device=mesh.device)
    loss = partial(grpo_rows_loss, config=config, sums=sums)
    options = {"temperature": config.rollout.temperature, "draft_share": config.draft.share}
    old_logp = None
    if config.rl.updates_per_batch > 1:
        old_logp = policy_logprobs(learner, documents, **options)
    stats = cotrain_step(learner, documents, step=step, policy_loss=loss, old_logp=old_logp, **options)
    for _ in range(config.rl.updates_per_batch - 1):
        cotrain_step(learner, documents, step=step, policy_loss=loss, old_logp=old_logp, train_draft=False, **options)
    *totals, count = mesh.sum_all(sums).tolist()
    return step_row(stats) | dict(zip(METRICS, [t / max(1.0, count) for t in totals], strict=True))


def grpo_rows_loss(rows: LossRows, *, config: RunConfig, sums: Tensor) -> Tensor:
    """The clipped loss of the rows; adds their metrics to `sums`."""
    rl = config.rl
    args = (rows.logp, rows.advantages, rows.rollout_logp)
    bounds = {"clip_low": rl.clip_low, "clip_high": rl.clip_high, "importance_cap": rl.importance_cap}
    sums += policy_metrics(*args, old_logp_T=rows.old_logp, **bounds)
    return policy_loss(*args, old_logp_T=rows.old_logp, kl_coef=rl.kl_coef, **bounds)


def warm_start(learner: Learner, task: Task, log: MetricsLog, saves: Checkpoints) -> None:
    """Teach the policy the task's format from demonstrations, then the draft the policy."""
    warm = learner.config.warm_start
    policy_optim = Optimizer(learner.runner.parts, warm.policy_optim, warm.policy_steps)
    pupil = replace(learner, policy_optim=policy_optim, draft=None)
    first_step = saves.enter(WARM_POLICY, pupil) if warm.policy_steps else None
    if first_step is not None:
        log.note(f"warm start: {warm.policy_steps} supervised policy steps")
        for step in range(first_step, warm.policy_steps):
            doing(f"step {step} of the policy's warm start")
            documents = task.demonstrations(step * warm.batch_documents, warm.batch_documents)
            stats = cotrain_step(pupil, documents, step=step)
            log.phase(WARM_POLICY, step, warm.policy_steps, policy_loss=stats.policy_loss)
            saves.step_done(WARM_POLICY, step + 1, warm.policy_steps, pupil)
    if learner.draft is None or not warm.draft_steps:
        return
    optim = Optimizer([learner.draft.model], warm.draft_optim, warm.draft_steps)
    pupil = replace(learner, draft=replace(learner.draft, optim=optim))
    first_step = saves.enter(WARM_DRAFT, pupil)
    if first_step is not None:
        log.note(f"warm start: {warm.draft_steps} draft steps on the frozen policy's features")
        for step in range(first_step, warm.draft_steps):
            doing(f"step {step} of the draft's warm start")
            documents = task.demonstrations(step * warm.draft_batch_documents, warm.draft_batch_documents)
            stats = cotrain_step(pupil, documents, step=step, train_policy=False)
            length = stats.draft_simulated_acceptance_length
            log.phase(WARM_DRAFT, step, warm.draft_steps, simulated_acceptance_length=length)
            saves.step_done(WARM_DRAFT, step + 1, warm.draft_steps, pupil)


def run_sft(config: RunConfig) -> None:
    """Policy by next-token loss on documents, draft co-trained on the same rows."""
    _check_share(config, config.train.batch_documents, "documents")
    documents = _documents(config)
    stream = DocumentStream(documents, seed=config.seed)
    data = {"documents": len(documents), "batch_documents": config.train.batch_documents}
    with (
        open_mesh(config) as mesh,
        open_run(config, mesh, data=data, phases=(RUN,)) as (learner, saves, log),
    ):
        steps = config.train.steps
        for step in range(saves.enter(RUN, learner) or 0, steps):
            doing(f"training step {step}")
            batch = _read_batch(stream, step, learner)
            stats = cotrain_step(learner, batch, step=step, draft_share=config.draft.share)
            log.step(step, step_row(stats))
            saves.step_done(RUN, step + 1, steps, learner)
        if mesh.world_rank == 0:
            log.note(write_report(config.output_dir, rows=log.rows(), evaluations=[]))


def _documents(config: RunConfig) -> Sequence[Document]:
    if config.data.path is None:
        return synthetic_documents(config.data.synthetic_documents, config.policy.vocab_size, seed=config.seed)
    try:
        folder = Path(config.data.path).is_dir()
        documents = read_dataset(config.data.path) if folder else read_jsonl(config.data.path)
        documents[0]  # malformed ones are found when they are read: most likely here, before anything is built
        return documents
    except (OSError, ValueError) as error:
        raise ConfigError("data.path", config.data.path, str(error)) from error


def _read_batch(stream: DocumentStream, step: int, learner: Learner) -> list[Document]:
    """The step's documents. Raises ConfigError for one that is malformed or too long, or has unknown tokens."""
    config, policy = learner.config, learner.runner.parts[0].config
    try:
        documents = stream.batch(step, config.train.batch_documents)
    except ValueError as error:
        raise ConfigError("data.path", config.data.path, str(error)) from error
    for document in documents:
        length = document.input_ids.numel()
        require(length <= policy.max_seq_len, "data.path", config.data.path, _too_long(length, policy.max_seq_len))
        _check_row(config, length, "a document")
        low, high = int(document.input_ids.min()), int(document.input_ids.max())
        rule = f"holds token {high if low >= 0 else low}, must be 0..{policy.vocab_size - 1}: the policy's vocabulary"
        require(low >= 0 and high < policy.vocab_size, "data.path", config.data.path, rule)
    return documents


def _check_lengths(config: RunConfig, task: Task) -> int:
    """The longest sequence in tokens that rollouts or the warm start can make; must fit a row."""
    longest = task.max_prompt_tokens + config.rollout.max_new_tokens
    _check_row(config, longest, "the longest prompt and rollout.max_new_tokens")
    if config.warm_start.policy_steps or config.warm_start.draft_steps:
        demonstration = task.max_prompt_tokens + task.max_response_tokens
        _check_row(config, demonstration, "the longest demonstration")
        longest = max(longest, demonstration)
    return longest


def _check_row(config: RunConfig, length: int, what: str) -> None:
    step = 2 * config.mesh.cp  # a document is padded to a multiple of it
    padded, capacity = -(-length // step) * step, config.train.row_tokens // step * step
    rule = f"must be at least {padded}: {what} has {length} tokens and must fit one row"
    require(padded <= capacity, "train.row_tokens", config.train.row_tokens, rule)


def _check_share(config: RunConfig, documents: int, what: str) -> None:
    trained = math.floor(documents * config.draft.share)
    rule = f"picks none of the {documents} {what} of a step: the draft would not train"
    require(not config.draft.enabled or trained > 0, "draft.share", config.draft.share, rule)


def _too_long(length: int, positions: int) -> str:
    return f"holds a document of {length} tokens, the policy has {positions} positions"
