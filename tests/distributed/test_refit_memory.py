"""A refit takes the memory of one tensor at a time on ranks without an engine."""

import gc
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cospec.config import MeshConfig
from cospec.mesh import build_mesh, close_mesh
from cospec.policy.stream import IncomingStream, WeightStream
from cospec.train.setup import build_learner
from support import topology

MIB = 1 << 20
SIZES = {"vocab_size": 80_000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "head_dim": 64}


def rss(kind):
    return int(re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1)) * 1024


def peak_of(work):
    """Bytes that `work` takes at most beyond what is held before."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = rss("VmRSS")
    work()
    return rss("VmHWM") - before


def read(stream, sizes):
    for _, value in stream.items():
        sizes.append(value.nbytes)
        del value


def measure(rank, run, serving):
    learner = topology.make(run)
    streams = [learner.runner.parts, learner.draft.parts]
    for _ in WeightStream(streams[1], learner.mesh, serving).items():
        pass  # what gloo itself takes once
    sizes = []

    def refit():
        for modules in streams:
            read(WeightStream(modules, learner.mesh, serving), sizes)

    return peak_of(refit), peak_of(lambda: learner.runner.full_state()), sizes


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [MeshConfig(pp=2, dp=2), MeshConfig(dp=2, cp=2)], ids=["pp2-dp2", "dp2-cp2"])
def test_one_tensor_at_a_time(ranks, mesh):
    run = topology.config(mesh, **SIZES)
    results = ranks.run(4, measure, run, (0,), timeout_s=300)
    _, whole, sizes = results[0]
    assert sum(sizes) > 150 * MIB  # else the bound says nothing
    assert whole > 120 * MIB  # and the measure sees a whole state
    for rank, (peak, _, seen) in enumerate(results):
        print(f"rank {rank}: {peak / MIB:.0f} MiB; a whole state {results[rank][1] / MIB:.0f} MiB")
        assert peak <= max(sizes) + 64 * MIB, f"rank {rank}"
        assert bool(seen) == (rank == 0)


def collect(rank, run, serving):
    learner = topology.make(run)
    stream = WeightStream(learner.runner.parts, learner.mesh, serving)
    read = {name: value.clone() for name, value in stream.items()}
    whole = learner.runner.full_state()
    assert stream.shapes == {name: value.shape for name, value in whole.items()}
    assert all(torch.equal(value, whole[name]) for name, value in read.items())
    return len(read) / len(whole)


@pytest.mark.parametrize("mesh, world", [(MeshConfig(pp=2, dp=2), 4), (MeshConfig(dp=2), 2)])
@pytest.mark.parametrize("serving", [None, (1,)])
def test_who_wants_the_weights_gets_all_of_them(ranks, mesh, world, serving):
    got = ranks.run(world, collect, topology.config(mesh), serving)
    assert got == [float(serving is None or rank in serving) for rank in range(world)]


def measure_sending(rank, run, serve):
    """The same where engines are on ranks of their own: (peak, bytes of the weights read) of a refit."""
    run = replace(run, mesh=replace(run.mesh, serve=serve))
    mesh = build_mesh(run.mesh, device="cpu", timeout_s=90.0, can_serve=True)
    if mesh.serves_only:
        headers = [mesh.link.next_call() for _ in range(2)]
        sizes = []

        def receive():
            read(IncomingStream(headers[1], mesh.link, mesh.device), sizes)

        for _ in IncomingStream(headers[0], mesh.link, mesh.device).items():
            pass
        result = peak_of(receive), sizes
    else:
        learner = build_learner(run, mesh)
        streams = [WeightStream(m, mesh, mesh.link.serving) for m in (learner.draft.parts, learner.runner.parts)]
        for stream in streams:
            mesh.link.call(stream.headers)
        streams[0].send(mesh.link)
        result = peak_of(lambda: streams[1].send(mesh.link)), []
    close_mesh(mesh)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [MeshConfig(pp=2), MeshConfig(dp=2)], ids=["pp2+1", "dp2+1"])
def test_one_tensor_at_a_time_to_ranks_that_serve(ranks, mesh):
    results = ranks.run(3, measure_sending, topology.config(mesh, **SIZES), 1, timeout_s=300, join=False)
    sizes = results[-1][1]
    assert sum(sizes) > 120 * MIB
    for rank, (peak, _) in enumerate(results):
        print(f"rank {rank}: {peak / MIB:.0f} MiB, the largest tensor {max(sizes) / MIB:.0f} MiB")
        assert peak <= max(sizes) + 64 * MIB, f"rank {rank}"
