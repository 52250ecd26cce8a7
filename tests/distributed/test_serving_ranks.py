"""Ranks that only serve: the run of one process, engines that hold the trainer's weights."""

import pytest

from cospec.train import loop
from support import mesh_runs, serve_runs
from support.tiny_runs import record

SAMPLED = ("reward_mean", "rollout_acceptance_length")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    loop.run_rl(mesh_runs.rl(folder, (1, 1, 1)))
    return record(folder)


CASES = [
    pytest.param((1, 1, 1, 1), id="1+1"),
    pytest.param((2, 1, 1, 1), id="pp2+1"),
    pytest.param((1, 2, 1, 2), id="dp2+2", marks=pytest.mark.slow),
    pytest.param((2, 1, 2, 2), id="pp2-cp2+2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("mesh", CASES)
def test_the_run_of_one_process(ranks, one_process, tmp_path, mesh):
    """Known failure 40: rewards, acceptance, losses; and after each refit every tensor of each engine, by hash."""
    pp, dp, cp, serve = mesh
    trainers = pp * dp * cp
    config = mesh_runs.rl(tmp_path, mesh)
    hashes = ranks.run(trainers + serve, serve_runs.run_rl_on, config, timeout_s=300, join=False)
    first = hashes[0]
    assert [version for version, _ in first] == [0, 1, 2, 3]
    assert all(len(found) > 50 for _, found in first)
    assert len({found["policy.lm_head.weight"] for _, found in first}) == 4  # it trained
    for served in hashes[trainers:]:
        # The evaluator's refits are there too: of the static draft, and back.
        assert all(any(want == got for got in served) for want in first)
    got = record(tmp_path)
    if trainers == 1:
        assert got == one_process
    for name, rows in one_process.items():
        for ours, theirs in zip(got[name], rows, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5, nan_ok=True), name
    for ours, theirs in zip(got["metrics.jsonl"], one_process["metrics.jsonl"], strict=True):
        assert {k: ours[k] for k in SAMPLED} == {k: theirs[k] for k in SAMPLED}
