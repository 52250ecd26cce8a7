"""Ranks that only serve: the run of one process, engines that hold the trainer's weights."""

from dataclasses import replace

import pytest
import torch

from cospec.config import CheckpointConfig, ConfigError, MeshConfig
from cospec.mesh import build_mesh
from cospec.train import loop
from cospec.train.check import check
from cospec.train.loop import run_sft
from support import mesh_runs, serve_runs
from support.tiny_runs import record

CASES = [
    pytest.param((1, 1, 1, 1), id="1+1"),
    pytest.param((2, 1, 1, 1), id="pp2+1"),
    pytest.param((1, 2, 1, 2), id="dp2+2", marks=pytest.mark.slow),
    pytest.param((2, 1, 2, 2), id="pp2-cp2+2", marks=pytest.mark.slow),
]


def assert_refitted(served, trained, *, dtype):
    """Each of the trainer's versions was in the engine, tensor by tensor; known failure 40."""
    key = ("policy.lm_head.weight", dtype)
    assert [version for version, _ in trained] == [0, 1, 2, 3]
    assert len({hashes[key] for _, hashes in trained}) == 4  # it trained
    for version, hashes in trained:
        # The evaluator's refits are there too: of the static draft, and back.
        engines = [got for at, got in served if at == version]
        assert any(len(got) > 50 and key in got and got.items() <= hashes.items() for got in engines), version


@pytest.mark.parametrize("mesh", CASES)
def test_the_run_of_one_process(ranks, one_process, tmp_path, mesh):
    """Known failure 40: rewards, acceptance, losses; and after each refit every tensor of each engine, by hash."""
    pp, dp, cp, serve = mesh
    trainers = pp * dp * cp
    config = mesh_runs.rl(tmp_path, mesh)
    hashes = ranks.run(trainers + serve, serve_runs.run_rl_on, config, timeout_s=300, join=False)
    for served in hashes[trainers:]:
        assert_refitted(served, hashes[0], dtype=torch.float32)
    got = record(tmp_path)
    if trainers == 1:
        assert got == one_process
    for name, rows in one_process.items():
        for ours, theirs in zip(got[name], rows, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5, nan_ok=True), name
    for ours, theirs in zip(got["metrics.jsonl"], one_process["metrics.jsonl"], strict=True):
        assert {k: ours[k] for k in mesh_runs.SAMPLED} == {k: theirs[k] for k in mesh_runs.SAMPLED}


def test_a_run_moves_to_meshes_with_another_number_of_servers(ranks, tmp_path):
    """Saved with one, resumed without, resumed with one again: the run that never moved, to the bit."""
    saved = CheckpointConfig(every=2, resume=True)
    config = mesh_runs.rl(tmp_path / "alone", (1, 1, 1))
    config = replace(config, train=replace(config.train, steps=6))
    loop.run_rl(config)
    for serve, steps in ((1, 2), (0, 4), (1, 6)):
        config = mesh_runs.rl(tmp_path / "moved", (1, 1, 1, serve))
        config = replace(config, checkpoint=saved, train=replace(config.train, steps=steps))
        if serve:
            ranks.run(2, serve_runs.run_rl_on, config, timeout_s=300, join=False)
        else:
            loop.run_rl(config)
    assert record(tmp_path / "moved") == record(tmp_path / "alone")


def test_engines_in_bfloat16(ranks, tmp_path):
    """The engine's copy is the trainer's, rounded where the engine keeps bfloat16; the run goes on with its tokens."""
    config = mesh_runs.rl(tmp_path, (1, 1, 1, 1), dtype="bfloat16")
    trained, served = ranks.run(2, serve_runs.run_rl_on, config, timeout_s=300, join=False)
    assert len(record(tmp_path)["metrics.jsonl"]) == 3
    assert_refitted(served, trained, dtype=torch.bfloat16)


def needy(folder):
    config = mesh_runs.rl(folder, (1, 1, 1, 1), engine="vllm")
    return replace(config, train=replace(config.train, steps=1), eval=replace(config.eval, static_control=False))


def test_an_engine_that_is_built_from_weights(ranks, tmp_path):
    trained, served = ranks.run(2, serve_runs.run_rl_on_needy_engines, needy(tmp_path), False, join=False)
    assert trained == served
    assert len(served[0]) > 50


def test_an_engine_that_cannot_be_built(ranks, tmp_path):
    """A refusal on all ranks, with the same words."""
    trainer, server = ranks.run(2, serve_runs.run_rl_on_needy_engines, needy(tmp_path), True, join=False)
    assert trainer == "EngineError: rank 1, which serves: self-test failed"
    assert server == "Refused: rank 1, which serves: self-test failed"


@pytest.mark.parametrize(
    "mesh, serving, message",
    [
        ((1, 1, 1, -1), None, r"mesh.serve=-1: must be >= 0"),
        ((2, 1, 2, 1), (3,), r"engine_ranks=\(3,\): must be None or all of 4: .* rank 3 trains \(pp 1, dp 0, cp 1\)"),
        ((1, 2, 1, 2), (2,), r"engine_ranks=\(2,\): must be None or all of 2, 3: with mesh.serve=2 those ranks serve"),
        ((1, 2, 1, 2), (2, 3, 4), r"must be None or all of 2, 3"),
    ],
)
def test_settings_that_cannot_be(tmp_path, mesh, serving, message):
    with pytest.raises(ConfigError, match=message):
        check(mesh_runs.rl(tmp_path, mesh, engine_ranks=serving))


def test_the_number_of_processes_is_wrong():
    with pytest.raises(ConfigError, match=r"cp 1 \+ serve 2.*product is 2 and 2 serve but 1 .*--nproc_per_node 4"):
        build_mesh(MeshConfig(dp=2, serve=2), can_serve=True)


def test_a_job_without_rollouts(tmp_path):
    with pytest.raises(ConfigError, match=r"mesh.serve=1: must be 0: there is nothing to generate"):
        run_sft(mesh_runs.on_mesh(mesh_runs.tiny_sft(tmp_path), 1, 1, 1, 1))
