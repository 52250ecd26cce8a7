"""From a schedule to a tap plan: which taps leave which stage, in which order, into how many slots.

An order is, for each pp rank, its actions (kind, stage, microbatch): F forward, B backward,
I and W the halves of a backward, with respect to inputs and to weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from cospec.config import require
from cospec.records import EMBEDDINGS, TapPlan, TapStream

Actions = Sequence[Sequence[tuple[str, int, int]]]


def plan_taps(
    order: Actions,
    ranks: Sequence[int],
    layers: Sequence[Sequence[int]],
    tap_layers: Sequence[int],
    *,
    shape: tuple[int, int],
    source_dtype: torch.dtype,
    dtype: torch.dtype | None = None,
    slots: int | None = None,
    deferred: bool = False,
) -> TapPlan:
    """The plan of one run of a schedule.

    Args:
        order: actions of each pp rank.
        ranks: pp rank of each stage. layers: layers of each stage.
        tap_layers: layers the draft reads; the token embeddings are read besides.
        shape: [T, Dt] of a tap on one rank.
        slots: as configured; None takes the least.
        deferred: the draft consumes taps only when the schedule is through.

    Raises ConfigError for a tap layer that no stage owns, and for fewer slots than the
    schedule can live with.
    """
    owned = {layer for stage in layers for layer in stage}
    for layer in tap_layers:
        require(layer in owned, "draft.tap_layers", tuple(tap_layers), f"no pipeline stage owns layer {layer}")
    home = ranks[-1]
    tapped = [tuple(i for i in stage if i in set(tap_layers)) for stage in layers]
    tapped[0] = (EMBEDDINGS, *tapped[0])
    remote = [stage for stage, taps in enumerate(tapped) if taps and ranks[stage] != home]
    free = simulate(order, len(ranks), remote, slots=None, deferred=deferred)
    streams = []
    for stage, taps in enumerate(tapped):
        if taps:
            forwards = tuple(m for kind, s, m in order[ranks[stage]] if kind == "F" and s == stage)
            streams.append(TapStream(stage, ranks[stage], taps, forwards, max(1, free.ahead.get(stage, 1))))
    least = least_slots(order, len(ranks), remote, deferred=deferred)
    if slots is not None:
        require(slots >= least, "pipeline.tap_slots", slots, f"this schedule deadlocks with fewer than {least}")
    chosen = least if slots is None else slots
    return TapPlan(tuple(streams), home, chosen, shape, dtype or source_dtype, source_dtype)


def least_slots(order: Actions, num_stages: int, remote: Sequence[int], *, deferred: bool = False) -> int:
    """The least number of landing slots for each remote stream with which the schedule gets through."""
    microbatches = 1 + max(m for actions in order for _, _, m in actions)
    for slots in range(1, microbatches):
        if simulate(order, num_stages, remote, slots=slots, deferred=deferred).completes:
            return slots
    return microbatches


@dataclass
class Simulation:
    """completes: False is a deadlock. ahead: microbatches that each remote stage was ahead of the draft at most."""

    completes: bool = True
    ahead: dict[int, int] = field(default_factory=dict)


def simulate(
    order: Actions, num_stages: int, remote: Sequence[int], *, slots: int | None, deferred: bool = False
) -> Simulation:
    """Play a schedule in rounds; in each, every rank does its next action if it can.

    A forward of a remote stage needs a free slot of its stream: the strictest sender, one
    without a queue. A slot is freed when the draft has done the microbatch, right after the
    last stage's forward, or never when the draft's work is deferred. None: no such limit.
    More slots never hurt, for every rank does the same actions in the same order.
    """
    done: set[tuple[str, int, int]] = set()
    position = [0] * len(order)
    sent, consumed = dict.fromkeys(remote, 0), 0
    result = Simulation(ahead=dict.fromkeys(remote, 0))
    last = num_stages - 1

    def ready(kind: str, stage: int, microbatch: int) -> bool:
        if kind == "F":
            has_slot = slots is None or stage not in sent or sent[stage] - consumed < slots
            return has_slot and (stage == 0 or ("F", stage - 1, microbatch) in done)
        if kind == "W":
            return ("B", stage, microbatch) in done
        return ("F", stage, microbatch) in done and (stage == last or ("B", stage + 1, microbatch) in done)

    while any(position[rank] < len(actions) for rank, actions in enumerate(order)):
        now = [
            (rank, actions[position[rank]])
            for rank, actions in enumerate(order)
            if position[rank] < len(actions) and ready(*actions[position[rank]])
        ]
        if not now:
            result.completes = False
            return result
        for rank, (kind, stage, microbatch) in now:
            position[rank] += 1
            done.add(("B" if kind == "I" else kind, stage, microbatch))
            if kind == "F" and stage in sent:
                sent[stage] += 1
                result.ahead[stage] = max(result.ahead[stage], sent[stage] - consumed)
            if kind == "F" and stage == last and not deferred:
                consumed += 1
    return result
