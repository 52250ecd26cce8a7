"""What cospec needs to know of torch's pipeline schedules: stages, ranks, order of work.

Nothing here needs a process group, so that a plan can be checked before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from cospec.config import ConfigError

SINGLE_STAGE = ("GPipe", "1F1B")
TWO_STAGE = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble")
V_SHAPED = ("ZBVZeroBubble",)

_KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


class Action(NamedTuple):
    """One piece of work of one rank: F forward, B backward, I and W its halves (inputs, weights)."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}@{self.stage}"


Order = list[list[Action]]
"""For each pp rank its actions, in order."""


def num_stages(schedule: str, pp_size: int) -> int:
    return pp_size * (1 if schedule in SINGLE_STAGE else 2)


def stage_ranks(schedule: str, pp_size: int) -> tuple[int, ...]:
    """The pp rank of each stage. Loops deal stages out in turns, a V goes down and comes back."""
    count = num_stages(schedule, pp_size)
    if schedule in V_SHAPED:
        return tuple(min(stage, count - 1 - stage) for stage in range(count))
    return tuple(stage % pp_size for stage in range(count))


def action_order(schedule: str, pp_size: int, microbatches: int) -> Order:
    """What each rank computes, in order.

    Raises ConfigError naming pipeline.microbatches when the schedule does not allow that number.
    """
    if schedule in SINGLE_STAGE:
        order = [_single_stage(schedule, stage, pp_size, microbatches) for stage in range(pp_size)]
        if schedule == "1F1B" and microbatches < pp_size:
            rule = f"1F1B needs at least as many as it has stages, {pp_size}"
            raise ConfigError("pipeline.microbatches", microbatches, rule)
        return order
    ranks = stage_ranks(schedule, pp_size)
    stages = [_stand_in(stage, ranks, rank=0) for stage, rank in enumerate(ranks) if rank == 0]
    try:
        made: Any = get_schedule_class(schedule)(stages, n_microbatches=microbatches)  # type: ignore[arg-type]
    except ValueError as error:
        raise ConfigError("pipeline.microbatches", microbatches, f"{schedule} does not allow it: {error}") from None
    return [list(_expand(made.pipeline_order[rank])) for rank in range(pp_size)]


def make_schedule(schedule: str, stages: Sequence[PipelineStage], microbatches: int, loss_fn: Callable) -> Any:
    """torch's schedule over this rank's stages; losses are sums, so gradients are not scaled."""
    given: Any = stages[0] if schedule in SINGLE_STAGE else list(stages)
    return get_schedule_class(schedule)(given, n_microbatches=microbatches, loss_fn=loss_fn, scale_grads=False)


def run_schedule(
    schedule: Any, stages: Sequence[PipelineStage], inputs: list[tuple], kwargs: list[dict], targets: list
) -> None:
    """Forward and backward of microbatches that are split already.

    torch 2.14's `schedule.step` takes them; 2.13's would split a batch, so what it does
    around the splitting is done here.
    """
    if hasattr(torch.distributed, "set_timeout"):  # 2.14
        schedule.step(arg_mbs=inputs, kwarg_mbs=kwargs, target_mbs=targets, return_outputs=False)
        return
    for stage in stages:
        stage.has_backward = True
        stage.clear_runtime_states()
    schedule._step_microbatches(inputs, kwargs, targets, None, False)


def _single_stage(schedule: str, stage: int, stages: int, microbatches: int) -> list[Action]:
    # Written down here: torch's own table of 1F1B starts the last stage with microbatch 1.
    ahead = microbatches if schedule == "GPipe" else min(microbatches, stages - stage)
    actions = [Action("F", stage, m) for m in range(ahead)]
    for m in range(microbatches):
        actions.append(Action("B", stage, m))
        if m + ahead < microbatches:
            actions.append(Action("F", stage, m + ahead))
    return actions


def _expand(actions: Sequence[Any]) -> Iterator[Action]:
    for action in actions:
        if action is None:
            continue
        if action.sub_actions is not None:
            yield from _expand(action.sub_actions)
        elif action.computation_type.name in _KINDS:
            yield Action(_KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)


def _stand_in(stage: int, ranks: Sequence[int], rank: int) -> SimpleNamespace:
    """What a schedule reads of a stage while it lays out its order."""
    return SimpleNamespace(
        stage_index=stage,
        num_stages=len(ranks),
        group_size=max(ranks) + 1,
        group_rank=rank,
        is_first=stage == 0,
        is_last=stage == len(ranks) - 1,
        submod=torch.nn.Identity(),
    )
