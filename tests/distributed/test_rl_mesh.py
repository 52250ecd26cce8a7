"""The RL loop on meshes: the run of one process, and engines that hold the trainer's weights."""

import random

import pytest

from cospec.config import ConfigError
from cospec.mesh import build_mesh
from cospec.records import Rollout, SamplingParams
from cospec.rl.tasks import Prompt
from cospec.train.check import check
from cospec.train.rollouts import roll_out
from support import mesh_runs
from support.tiny_runs import record

CASES = [
    pytest.param((2, 1, 2), {"engine_ranks": (3, 0)}, id="pp2-cp2-two-serve"),
    pytest.param((2, 1, 2), {}, id="pp2-cp2", marks=pytest.mark.slow),
    pytest.param((2, 2, 1), {}, id="pp2-dp2", marks=pytest.mark.slow),
    pytest.param((1, 2, 2), {"engine_ranks": (1,)}, id="dp2-cp2-one-serves", marks=pytest.mark.slow),
    pytest.param((1, 2, 1), {"engine_ranks": (1,)}, id="dp2-one-serves"),
]


@pytest.mark.parametrize("mesh, rollout", CASES)
def test_the_run_of_one_process(ranks, one_process, tmp_path, mesh, rollout):
    """Known failure 40: rewards, acceptance, losses; and after each refit every tensor of the engine, by hash."""
    world = mesh[0] * mesh[1] * mesh[2]
    compared = ranks.run(world, mesh_runs.run_rl_on, mesh_runs.rl(tmp_path, mesh, **rollout), timeout_s=300)
    serving = rollout.get("engine_ranks") or range(world)
    for rank, counts in enumerate(compared):
        assert len(counts) == 1 + 3  # before the first step and after each
        assert all(policy > 40 and draft > 10 for policy, draft in counts) or rank not in serving, counts
        assert rank in serving or all(count == (0, 0) for count in counts)
    got = record(tmp_path)
    for name, rows in one_process.items():
        for ours, theirs in zip(got[name], rows, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5, nan_ok=True), name
    for ours, theirs in zip(got["metrics.jsonl"], one_process["metrics.jsonl"], strict=True):
        assert {k: ours[k] for k in mesh_runs.SAMPLED} == {k: theirs[k] for k in mesh_runs.SAMPLED}


@pytest.mark.slow
def test_the_same_mesh_again_is_the_same_run(ranks, tmp_path):
    for name in ("first", "second"):
        ranks.run(4, mesh_runs.run_rl_on, mesh_runs.rl(tmp_path / name, (2, 1, 2)), timeout_s=300)
    assert record(tmp_path / "first") == record(tmp_path / "second")


def test_engines_in_bfloat16(ranks, tmp_path):
    """The engine's copy is the trainer's, rounded; the run goes on with its tokens."""
    config = mesh_runs.rl(tmp_path, (2, 1, 1), dtype="bfloat16")
    for counts in ranks.run(2, mesh_runs.run_rl_on, config, timeout_s=300):
        assert all(policy > 40 and draft > 10 for policy, draft in counts)
    assert len(record(tmp_path)["metrics.jsonl"]) == 3


@pytest.mark.parametrize("serving", [(), (0, 0), (4,), (-1,)])
def test_engine_ranks_that_cannot_be(tmp_path, serving):
    with pytest.raises(ConfigError, match=r"rollout.engine_ranks=.*different ranks in 0..3: mesh.pp \* mesh.dp"):
        check(mesh_runs.rl(tmp_path, (2, 1, 2), engine_ranks=serving))


class Generator:
    """Stands for an engine: as many tokens as the sample's number."""

    def generate(self, prompts, params, sample_ids):
        return [Rollout(p, [1] * i, [0.0] * i, "stop", 0) for p, i in zip(prompts, sample_ids, strict=True)]


class Moody:
    """A reward of chance, as a sandbox's that may time out."""

    def reward(self, prompt, token_ids):
        return random.random()


def score_on(rank, config):
    random.seed(rank)
    mesh = build_mesh(config.mesh, device="cpu")
    prompts = [Prompt([1], {}) for _ in range(4)]
    scored = roll_out(Generator(), Moody(), prompts, SamplingParams(), mesh, first_sample=1)
    return [len(r.token_ids) for r in scored.rollouts], scored.rewards


def test_a_reward_of_chance_is_the_same_on_every_rank(ranks, tmp_path):
    """The rows of a group lie on different ranks: their advantages must come from one set of rewards."""
    found = ranks.run(2, score_on, mesh_runs.rl(tmp_path, (1, 2, 1)))
    assert found[0] == found[1]
    assert found[0][0] == [1, 2, 3, 4]
    assert len(set(found[0][1])) == 4
