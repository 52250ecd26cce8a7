"""Tap plans from schedules: who sends what in which order, and how many slots it takes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cospec.channel.plan import least_slots, plan_taps, simulate
from cospec.config import ConfigError, MeshConfig, PipelineConfig, PolicyConfig, RunConfig, TrainConfig
from cospec.policy.schedule import SINGLE_STAGE, TWO_STAGE, action_order, num_stages, stage_ranks
from cospec.records import EMBEDDINGS
from cospec.titan import stage_layers
from cospec.train.check import check

SCHEDULES = (*SINGLE_STAGE, *TWO_STAGE)
CASES = [(name, pp) for name in SCHEDULES for pp in (2, 4)]


def plan(schedule: str, pp: int, taps=(1, 3, 6), *, layers: int = 8, microbatches: int = 8, **options):
    ranks = stage_ranks(schedule, pp)
    order = action_order(schedule, pp, microbatches)
    split = stage_layers(layers, len(ranks))
    return plan_taps(order, ranks, split, taps, shape=(6, 4), source_dtype=torch.float32, **options)


def remote(schedule: str, pp: int) -> list[int]:
    ranks = stage_ranks(schedule, pp)
    return [stage for stage, rank in enumerate(ranks) if rank != ranks[-1]]


@pytest.mark.parametrize("schedule, pp", CASES)
def test_every_stage_does_every_microbatch_once(schedule, pp):
    order, ranks = action_order(schedule, pp, 8), stage_ranks(schedule, pp)
    assert len(ranks) == num_stages(schedule, pp)
    for stage, rank in enumerate(ranks):
        mine = [(kind, m) for kind, s, m in order[rank] if s == stage]
        assert sorted(m for kind, m in mine if kind == "F") == list(range(8))
        assert sorted(m for kind, m in mine if kind in "BI") == list(range(8))
        assert all(s == stage or ranks[s] == rank for _, s, _ in order[rank])
    assert simulate(order, len(ranks), [], slots=None).completes


@pytest.mark.parametrize("schedule, pp", CASES)
def test_streams_cover_all_taps_once(schedule, pp):
    made = plan(schedule, pp)
    assert sorted(layer for stream in made.streams for layer in stream.layers) == [EMBEDDINGS, 1, 3, 6]
    assert [s.stage for s in made.streams] == sorted(s.stage for s in made.streams)
    ranks, split = stage_ranks(schedule, pp), stage_layers(8, num_stages(schedule, pp))
    assert made.home == ranks[-1]
    for stream in made.streams:
        assert stream.source == ranks[stream.stage]
        assert sorted(stream.order) == list(range(8))
        assert set(stream.layers) - {EMBEDDINGS} <= set(split[stream.stage])
    assert made.streams[0].stage == 0


def test_a_v_ends_on_the_first_rank():
    assert stage_ranks("ZBVZeroBubble", 4) == (0, 1, 2, 3, 3, 2, 1, 0)
    assert stage_ranks("Interleaved1F1B", 2) == (0, 1, 0, 1)
    assert plan("ZBVZeroBubble", 2).home == 0


@pytest.mark.parametrize("schedule, pp", CASES)
def test_one_slot_fewer_than_the_least_deadlocks_and_is_refused(schedule, pp):
    order, count = action_order(schedule, pp, 8), num_stages(schedule, pp)
    taps = tuple(range(8))
    least = plan(schedule, pp, taps).slots
    assert simulate(order, count, remote(schedule, pp), slots=least).completes
    if least > 1:
        assert not simulate(order, count, remote(schedule, pp), slots=least - 1).completes
    with pytest.raises(ConfigError, match=rf"pipeline.tap_slots={least - 1}: .* fewer than {least}"):
        plan(schedule, pp, taps, slots=least - 1)
    assert plan(schedule, pp, taps, slots=least + 1).slots == least + 1


def test_known_least_numbers():
    """GPipe and 1F1B hand taps over one by one; a breadth-first loop runs all of a stage before the next."""
    assert plan("GPipe", 4).slots == plan("1F1B", 4).slots == 1
    assert plan("LoopedBFS", 2).slots == 8
    assert plan("1F1B", 2, deferred=True).slots == 8


@given(
    schedule=st.sampled_from(SCHEDULES),
    pp=st.sampled_from([2, 3, 4]),
    rounds=st.integers(1, 3),
    deferred=st.booleans(),
)
def test_more_slots_never_hurt(schedule, pp, rounds, deferred):
    microbatches = pp * rounds
    order, count = action_order(schedule, pp, microbatches), num_stages(schedule, pp)
    completes = [
        simulate(order, count, remote(schedule, pp), slots=n, deferred=deferred).completes
        for n in range(1, microbatches + 1)
    ]
    assert completes == sorted(completes)
    assert completes[-1]
    assert completes.index(True) + 1 == least_slots(order, count, remote(schedule, pp), deferred=deferred)


def test_a_layer_that_no_stage_owns():
    with pytest.raises(ConfigError, match="draft.tap_layers=.*no pipeline stage owns layer 8"):
        plan("1F1B", 2, (1, 8))


@pytest.mark.parametrize(
    "schedule, pp, microbatches", [("1F1B", 4, 3), ("Interleaved1F1B", 4, 9), ("InterleavedZeroBubble", 4, 9)]
)
def test_microbatches_that_a_schedule_does_not_allow(schedule, pp, microbatches):
    with pytest.raises(ConfigError, match=f"pipeline.microbatches={microbatches}"):
        action_order(schedule, pp, microbatches)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"policy": PolicyConfig(num_hidden_layers=1)}, "mesh.pp=2: must be <= policy.num_hidden_layers=1"),
        ({"pipeline": PipelineConfig(microbatches=1)}, "pipeline.microbatches=1: must be >= 2"),
        ({"pipeline": PipelineConfig(tap_slots=0)}, "pipeline.tap_slots=0"),
        ({"pipeline": PipelineConfig(tap_timeout_s=0)}, "pipeline.tap_timeout_s=0"),
        ({"policy": PolicyConfig(tie_word_embeddings=True)}, "policy.tie_word_embeddings=True: must be false"),
        ({"train": TrainConfig(row_tokens=1001)}, "train.row_tokens=1001: must be a multiple of 2"),
    ],
)
def test_settings_that_do_not_fit_are_refused_at_start(changes, message):
    with pytest.raises(ConfigError, match=message):
        check(RunConfig(mesh=MeshConfig(pp=2), **changes))
