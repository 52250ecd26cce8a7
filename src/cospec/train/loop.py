"""The runs: RL with speculative rollouts (`run_rl`), supervised co-training (`run_sft`).

warm start -> [ rollouts -> step -> refit ] x steps -> evaluation -> report
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

from cospec.config import RunConfig
from cospec.data.source import DocumentStream, read_jsonl, synthetic_documents
from cospec.policy.build import full_state
from cospec.records import Document, StepStats
from cospec.rl.grpo import policy_loss
from cospec.rl.tasks import Task, make_task
from cospec.train.evaluate import Evaluator
from cospec.train.metrics import MetricsLog, step_row
from cospec.train.optim import Optimizer
from cospec.train.report import write_report
from cospec.train.rollouts import build_engine, refit, roll_out, rollout_row, sampling, to_documents
from cospec.train.setup import build_learner, describe, open_mesh
from cospec.train.step import Learner, LossRows, cotrain_step, policy_logprobs


def run_rl(config: RunConfig) -> None:
    """Speculative RL rollouts, policy step, draft co-training and refit on one mesh."""
    task = make_task(config.rl.task, seed=config.seed)
    config = replace(config, policy=replace(config.policy, vocab_size=task.tokenizer.vocab_size))
    with open_mesh(config) as mesh, MetricsLog(config, rank=mesh.world_rank) as log:
        learner = build_learner(config, mesh)
        log.note(describe(learner))
        warm_start(learner, task, log)
        engine = build_engine(config, learner, max_prompt=task.max_prompt_tokens)
        static_draft = full_state(learner.draft.draft) if learner.draft is not None else None
        evaluator = Evaluator(config, task, engine, learner, static_draft, log)
        refit(engine, learner, version=0)
        evaluator.run(step=0)
        params, group = sampling(config, task), config.rl.samples_per_prompt
        for step in range(config.train.steps):
            started = time.perf_counter()
            first = step * config.rl.prompts_per_step
            prompts = [task.train_prompt(first + i) for i in range(config.rl.prompts_per_step) for _ in range(group)]
            scored = roll_out(engine, task, prompts, params, mesh, first_sample=first * group)
            row = rollout_row(scored, time.perf_counter() - started)
            stats = rl_updates(learner, to_documents(scored, config), step)
            begun = time.perf_counter()
            refit(engine, learner, version=step + 1)
            log.step(step, row | step_row(stats) | {"refit_s": time.perf_counter() - begun})
            if config.eval.every and (step + 1) % config.eval.every == 0 and step + 1 < config.train.steps:
                evaluator.run(step=step + 1)
        evaluator.run(step=config.train.steps)
        speed = evaluator.speed()
        if mesh.world_rank == 0:
            log.note(write_report(config.output_dir, rows=log.rows(), evaluations=evaluator.rows, speed=speed))


def rl_updates(learner: Learner, documents: list[Document], step: int) -> StepStats:
    """The optimizer steps on one batch of rollouts; the draft trains in the first."""
    config = learner.config
    loss = partial(grpo_rows_loss, config=config)
    options = {"temperature": config.rollout.temperature, "draft_share": config.draft.share}
    old_logp = None
    if config.rl.updates_per_batch > 1:
        old_logp = policy_logprobs(learner, documents, **options)
    stats = cotrain_step(learner, documents, step=step, policy_loss=loss, old_logp=old_logp, **options)
    for _ in range(config.rl.updates_per_batch - 1):
        cotrain_step(learner, documents, step=step, policy_loss=loss, old_logp=old_logp, train_draft=False, **options)
    return stats


def grpo_rows_loss(rows: LossRows, *, config: RunConfig):
    rl = config.rl
    return policy_loss(
        rows.logp,
        rows.advantages,
        rows.rollout_logp,
        old_logp_T=rows.old_logp,
        clip_low=rl.clip_low,
        clip_high=rl.clip_high,
        importance_cap=rl.importance_cap,
        kl_coef=rl.kl_coef,
    )


def warm_start(learner: Learner, task: Task, log: MetricsLog) -> None:
    """Teach the policy the task's format from demonstrations, then the draft the policy."""
    warm = learner.config.warm_start
    if warm.policy_steps:
        log.note(f"warm start: {warm.policy_steps} supervised policy steps")
        pupil = replace(
            learner,
            policy_optim=Optimizer(learner.runner.parts, warm.policy_optim, warm.policy_steps),
            draft=None,
        )
        for step in range(warm.policy_steps):
            first = step * warm.batch_documents
            stats = cotrain_step(pupil, [task.demonstration(first + i) for i in range(warm.batch_documents)], step=step)
            log.phase("warm start, policy", step, warm.policy_steps, policy_loss=stats.policy_loss)
    if warm.draft_steps and learner.draft is not None:
        log.note(f"warm start: {warm.draft_steps} draft steps on the frozen policy's features")
        optim = Optimizer([learner.draft.draft], warm.draft_optim, warm.draft_steps)
        pupil = replace(learner, draft=replace(learner.draft, optim=optim))
        for step in range(warm.draft_steps):
            first = step * warm.draft_batch_documents
            documents = [task.demonstration(first + i) for i in range(warm.draft_batch_documents)]
            stats = cotrain_step(pupil, documents, step=step, train_policy=False)
            length = stats.draft_simulated_acceptance_length
            log.phase("warm start, draft", step, warm.draft_steps, simulated_acceptance_length=length)


def run_sft(config: RunConfig) -> None:
    """Policy by next-token loss on documents, draft co-trained on the same rows."""
    if config.data.path is None:
        documents = synthetic_documents(config.data.synthetic_documents, config.policy.vocab_size, seed=config.seed)
    else:
        documents = read_jsonl(config.data.path)
    stream = DocumentStream(documents, seed=config.seed)
    with open_mesh(config) as mesh, MetricsLog(config, rank=mesh.world_rank) as log:
        learner = build_learner(config, mesh)
        log.note(describe(learner))
        for step in range(config.train.steps):
            batch = stream.batch(step, config.train.batch_documents)
            stats = cotrain_step(learner, batch, step=step, draft_share=config.draft.share)
            log.step(step, step_row(stats))
