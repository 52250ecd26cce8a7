"""The tap channel by itself and under faults: order, slots, back-pressure, time-outs that name what failed."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import replace

import pytest
import torch

from cospec.channel.base import ChannelError
from cospec.channel.local import LocalStream
from cospec.channel.pipeline import PipelineChannel
from cospec.config import MeshConfig, PipelineConfig
from cospec.mesh import build_mesh
from cospec.records import EMBEDDINGS, TapPlan, TapStream
from cospec.train.step import cotrain_step
from support import pool, topology

SHAPE = (5, 3)
TAP_TIMEOUT_S, COMM_TIMEOUT_S = 2.0, 5.0


def plan(slots: int = 1, queue: int = 2, dtype=torch.float32) -> TapPlan:
    first = TapStream(0, 0, (EMBEDDINGS, 1), (0, 1, 2, 3, 4, 5), queue)
    last = TapStream(1, 1, (3,), (0, 1, 2, 3, 4, 5), queue)
    return TapPlan((first, last), 1, slots, SHAPE, dtype, torch.float32)


def tap(microbatch: int, layer: int) -> torch.Tensor:
    return torch.full(SHAPE, microbatch * 10.0 + layer) + 1 / 3


def carry(rank, made: TapPlan, wanted, slow_s: float):
    """Rank 0 puts, rank 1 takes; what arrived, and both ranks' figures."""
    channel = PipelineChannel(made, build_mesh(MeshConfig(pp=2), device="cpu"), timeout_s=20.0)
    arrived = {}
    for _ in range(2):  # one run of the schedule after another
        channel.begin(wanted)
        for m in (m for m in range(6) if wanted[m]):
            for layer in made.streams[rank].layers:
                source = tap(m, layer)
                channel.put(rank, m, layer, source)
                if rank == 0:
                    source.zero_()  # put has copied
            channel.sealed(rank, m)
            if rank == 1:
                time.sleep(slow_s)
                arrived[m] = {layer: got.clone() for layer, got in channel.get(m).items()}
                channel.release(m)
    channel.flush()
    return arrived, channel.stats.take(), channel.slot_bytes


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("wanted", [[True] * 6, [False, True, True, False, False, True]])
def test_taps_arrive_in_order_and_whole(ranks, slots, wanted):
    (_, sent, _), (arrived, received, slot_bytes) = ranks.run(2, carry, plan(slots), wanted, 0.0)
    assert list(arrived) == [m for m in range(6) if wanted[m]]
    for m, taps in arrived.items():
        assert list(taps) == [EMBEDDINGS, 1, 3]
        assert all(torch.equal(got, tap(m, layer)) for layer, got in taps.items())
    assert sent["sent_bytes"] == received["received_bytes"] == 2 * sum(wanted) * 2 * 5 * 3 * 4
    assert slot_bytes == slots * 2 * 5 * 3 * 4
    assert received["in_flight"] <= slots


def test_a_slow_draft_stalls_only_a_full_queue(ranks):
    (_, sent, _), (_, received, _) = ranks.run(2, carry, plan(1, queue=2), [True] * 6, 0.05)
    assert sent["stalls"] > 0
    assert sent["in_flight"] <= 2
    assert 0.05 < sent["stall_s"] < 2
    (_, sent, _), _ = ranks.run(2, carry, plan(1, queue=12), [True] * 6, 0.05)
    assert sent["stalls"] == 0


def test_taps_can_travel_rounded(ranks):
    """The local taps are rounded like those that travel: the draft sees one dtype."""
    _, (arrived, _, _) = ranks.run(2, carry, plan(dtype=torch.bfloat16), [True] * 6, 0.0)
    for m, taps in arrived.items():
        assert all(torch.equal(got, tap(m, layer).bfloat16()) for layer, got in taps.items())


def test_local_taps_share_memory_and_are_let_go():
    stream = LocalStream(plan(), plan().streams[1])
    x = tap(2, 3)
    stream.put(2, 3, x)
    assert stream.get(2)[3].data_ptr() == x.data_ptr()
    stream.release(2)
    with pytest.raises(ChannelError, match="layer 3 of stage 1, microbatch 2: was not given"):
        stream.get(2)


@pytest.mark.parametrize(
    "puts, message",
    [
        ([(1, tap(0, 1))], "layer 1 of stage 0, microbatch 0: expected the token embeddings next"),
        ([(-1, tap(0, -1)), (-1, tap(0, -1))], "the token embeddings of stage 0, microbatch 0: expected layer 1 next"),
        ([(-1, tap(0, -1)[:4])], r"the token embeddings of stage 0, microbatch 0: shape \[4, 3\]"),
        (
            [(-1, tap(0, -1).double())],
            r"microbatch 0: shape \[5, 3\] and torch.float64, the plan says .* torch.float32",
        ),
        ([(-1, tap(0, -1))], "layer 1 of stage 0, microbatch 0: was not given by its stage"),
    ],
)
def test_a_wrong_tap_is_found_at_its_source(puts, message):
    """Known failure 38, before anything is sent."""
    with pytest.raises(ChannelError, match=message):
        give(LocalStream(plan(), plan().streams[0]), puts)


def give(stream, puts):
    for layer, x in puts:
        stream.put(0, layer, x)
    stream.order.check_all(0)


# Faults in the middle of a step: stage 0 fails at microbatch 3 of the second step.


def break_down(rank, run, kind: str):
    learner = topology.make(run)
    cotrain_step(learner, topology.batch(0), step=0)
    if learner.mesh.pp_rank == 0:
        port = learner.runner.port
        put, sealed = port.put, port.sealed

        def broken(stage, microbatch, layer, x):
            if microbatch < 3 or (layer == EMBEDDINGS and kind != "never sends"):
                put(stage, microbatch, layer, x)
            elif kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif kind == "shape":
                put(stage, microbatch, layer, x[1:])
            elif kind == "dtype":
                put(stage, microbatch, layer, x.double())

        port.put = broken
        if kind == "never sends":  # and does not notice
            port.sealed = lambda stage, microbatch: None if microbatch >= 3 else sealed(stage, microbatch)
    cotrain_step(learner, topology.batch(1), step=1)


KINDS = ["never sends", "never gives", "killed", "shape", "dtype"]
IN_CI = [("never sends", 4), ("never gives", 2), ("killed", 4), ("shape", 2), ("dtype", 2)]
FAULTS = [
    pytest.param(kind, pp, marks=[] if (kind, pp) in IN_CI else pytest.mark.slow) for kind in KINDS for pp in (2, 4)
]


@pytest.mark.parametrize("kind, pp", FAULTS)
def test_every_surviving_rank_ends_with_an_error_that_names_the_place(ranks, monkeypatch, kind, pp):
    """Known failures 37 and 38: within the time-outs, with stage, microbatch and layer."""
    monkeypatch.setattr(pool, "GRACE_S", 3 * COMM_TIMEOUT_S)  # the time the ranks get to end by themselves
    settings = PipelineConfig(schedule="1F1B", microbatches=8, tap_timeout_s=TAP_TIMEOUT_S)
    run = topology.config(MeshConfig(pp=pp), pipeline=settings)
    run = replace(run, train=replace(run.train, comm_timeout_s=COMM_TIMEOUT_S))
    started = time.monotonic()
    with pytest.raises(pool.RankError) as found:
        ranks.run(pp, break_down, run, kind)
    assert time.monotonic() - started < 2 * COMM_TIMEOUT_S + 15  # with the start of workers
    reports = re.split(r"\[rank (\d+) of \d+\] ", str(found.value))[1:]
    texts = dict(zip(map(int, reports[::2]), reports[1::2], strict=True))
    assert sorted(texts) == list(range(pp))
    for rank, text in texts.items():
        last = text.strip().splitlines()[-1]
        if kind == "killed" and rank == 0:
            assert "killed by SIGKILL" in last
            continue
        assert re.match(r"cospec\.(records\.PipelineError|channel\.base\.ChannelError): ", last), text
        assert re.search(r"stage \d", last), last
        assert re.search(r"microbatch \d", last), last
        assert re.search(r"layers? \d|the token embeddings", last), last
        if kind != "killed":
            named = "the token embeddings" if kind == "never sends" else "layer 1"
            assert f"{named} of stage 0, microbatch 3" in last, last
