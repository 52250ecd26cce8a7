"""What the loop is judged by: held-out reward, acceptance with and without co-training, wall clock."""

from __future__ import annotations

import statistics
import time

import torch.distributed as dist
from torch import nn

from cospec.config import RunConfig
from cospec.rl.tasks import Task
from cospec.rollout.engine import Engine, acceptance_length
from cospec.train.faults import doing
from cospec.train.metrics import MetricsLog
from cospec.train.rollouts import ScoredRollouts, refit, roll_out, sampling, serving_ranks
from cospec.train.step import Learner

# Sample indices of evaluations lie far from those of training, so that no random number is shared.
_EVAL_SAMPLES = 1 << 40


class Evaluator:
    """Evaluates policy snapshots on held-out prompts, always the same prompts and random numbers.

    Args:
        static_draft: the draft as co-training found it, the control: it reads the live
            policy's taps and embeddings but is not trained. None: no control.
    """

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        engine: Engine,
        learner: Learner,
        static_draft: nn.Module | None,
        log: MetricsLog,
    ):
        self.config, self.task, self.engine, self.learner, self.log = config, task, engine, learner, log
        self.static_draft = static_draft
        self.serving = serving_ranks(config, learner.mesh)
        self.prompts = task.eval_prompts(config.eval.prompts)

    def run(self, step: int) -> dict:
        """Evaluate the policy that the engine holds; the engine is left as it was found."""
        doing(f"the evaluation after {step} steps")
        scored = self._roll_out()
        row = {"step": step, "reward_mean": scored.reward_mean, "tokens_mean": scored.tokens / len(self.prompts)}
        if self.learner.draft is not None:
            row["acceptance_length_cotrained"] = acceptance_length(scored.rollouts)
            if self.static_draft is not None:
                version = self.engine.policy_version
                refit(self.engine, self.learner, version, draft_from=self.static_draft)
                row["acceptance_length_static"] = acceptance_length(self._roll_out().rollouts)
                refit(self.engine, self.learner, version)
        with self.engine.speculation(0):
            row["acceptance_length_none"] = acceptance_length(self._roll_out().rollouts)
        self.log.evaluation(row)
        return row

    def speed(self, repeats: int = 3) -> list[dict]:
        """Seconds of the same prompts and weights without and with k draft tokens, in turns; medians.

        On one engine, or on those of all ranks that serve only, with the way there and back.
        """
        doing("the comparison of speeds")
        prompts = [self.prompts[i % len(self.prompts)] for i in range(self.config.eval.speed_batch)]
        most = self.config.rollout.num_draft_tokens if self.learner.draft is not None else 0
        depths = [0, *range(min(2, most), most + 1)] if most else [0]
        seconds: dict[int, list[float]] = {k: [] for k in depths}
        lengths: dict[int, float] = {}
        params = sampling(self.config, self.task)
        for _ in range(repeats):
            for k in depths:
                with self.engine.speculation(k):
                    started = time.perf_counter()
                    rollouts = self.engine.generate([p.token_ids for p in prompts], params)
                    seconds[k].append(time.perf_counter() - started)
                lengths[k] = acceptance_length(rollouts)
        base = statistics.median(seconds[0])
        rows = [
            {
                "num_draft_tokens": k,
                "batch": len(prompts),
                "seconds": statistics.median(seconds[k]),
                "speed_up": base / max(statistics.median(seconds[k]), 1e-9),
                "acceptance_length": lengths[k],
            }
            for k in depths
        ]
        if self.learner.mesh.world_size > 1:  # every rank measured: the figures of the first that has an engine
            dist.broadcast_object_list(rows, src=0 if self.learner.mesh.link is not None else self.serving[0])
        return rows

    def _roll_out(self) -> ScoredRollouts:
        return roll_out(
            self.engine,
            self.task,
            self.prompts,
            sampling(self.config, self.task),
            self.learner.mesh,
            first_sample=_EVAL_SAMPLES,
            serving=self.serving,
        )
