"""vLLM in a process of its own: the same engine; on the ranks of a mesh; killed."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest
import torch
from vllm_case import Language, folders, need_vllm, other_policy, prompts, random_draft, run_config, train

need_vllm()

from cospec.config import MeshConfig, RolloutConfig  # noqa: E402
from cospec.mesh import Mesh, build_mesh  # noqa: E402
from cospec.policy.build import full_state  # noqa: E402
from cospec.records import SamplingParams  # noqa: E402
from cospec.rl.tasks import Prompt  # noqa: E402
from cospec.rollout import NativeEngine, acceptance_length  # noqa: E402
from cospec.rollout.engine import EngineError  # noqa: E402
from cospec.rollout.vllm_process import VLLMProcess  # noqa: E402
from cospec.train.rollouts import build_engine, refit, roll_out, serving_ranks  # noqa: E402
from cospec.train.setup import build_learner  # noqa: E402
from cospec.train.step import cotrain_step  # noqa: E402

K, MAX_LEN, LONGEST = 3, 64, 12
GREEDY = SamplingParams(max_new_tokens=32, temperature=0)
CPU = torch.device("cpu")


def outcome(engine):
    rollouts = engine.generate(prompts(24), GREEDY)
    return [(r.token_ids, r.logp, r.proposed, r.accepted, r.policy_version) for r in rollouts]


def test_a_process_of_its_own_is_the_same_engine(tmp_path):
    """Start, proposals, refit of both there and back, refusals, and its end."""
    policy, draft = train(tmp_path, steps=30)
    path, draft_path = folders(tmp_path, policy, draft)
    options = {"num_draft_tokens": K, "max_len": MAX_LEN, "record_proposals": True}
    engine = VLLMProcess(path, policy.config, draft_path, draft.config, device=CPU, **options)
    assert engine.probe.lossless
    start = outcome(engine)
    native = NativeEngine(policy, draft, num_draft_tokens=K, max_len=MAX_LEN).generate(prompts(24), GREEDY)
    assert [(tokens, tried, kept) for tokens, _, tried, kept, _ in start] == [
        (r.token_ids, r.proposed, r.accepted) for r in native
    ]
    assert len(engine.proposals) == 24
    with engine.speculation(0):
        assert acceptance_length(engine.generate(prompts(24), GREEDY)) == 1
    with pytest.raises(ValueError, match=r"must be in 0\.\.3"), engine.speculation(9):
        pass
    good, good_draft = full_state(other_policy(policy)), full_state(random_draft(draft))
    lacking = {k: v for k, v in good_draft.items() if k != "fc.weight"}
    for policy_state, draft_state in ((good, lacking), ({**good, "norm.weight": torch.ones(3)}, good_draft)):
        with pytest.raises(ValueError, match=r"fc.weight|norm.weight has shape"):
            engine.refit(policy_state, draft_state, 9)
    with pytest.raises(ValueError, match=r"prompts\[0\]=\[\]"):
        engine.generate([[]], GREEDY)
    assert outcome(engine) == start
    engine.refit(good, good_draft, 4)
    changed = outcome(engine)
    assert {version for *_, version in changed} == {4}
    assert [x[0] for x in changed] != [x[0] for x in start]
    engine.refit(full_state(policy), full_state(draft), 0)
    assert outcome(engine) == start
    assert engine.stats()["refits"] == 2
    os.kill(engine.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"died .process \d+: killed by SIGKILL"):
        engine.generate(prompts(2), GREEDY)
    with pytest.raises(EngineError, match="died earlier"):
        engine.refit(good, good_draft, 5)
    assert time.monotonic() - began < 5


class NoTask:
    def reward(self, prompt, response):
        return 0.0


def train_and_serve(rank, config, steps):
    """Rollouts of a policy and draft that this rank's learner has trained, and of the same after one step more."""
    mesh = Mesh(CPU) if config.mesh.dp == 1 else build_mesh(config.mesh, device="cpu")
    learner, language = build_learner(config, mesh), Language()
    for step in range(steps):
        cotrain_step(learner, language.documents(), step=step)
    engine = build_engine(config, learner, max_prompt=LONGEST)
    asked = [Prompt(ids, {}) for ids in prompts(23, longest=LONGEST)]
    rollouts = []
    for version in (3, 4):
        refit(engine, learner, version)
        options = {"first_sample": 0, "serving": serving_ranks(config, mesh)}
        rollouts += roll_out(engine, NoTask(), asked, GREEDY, mesh, **options).rollouts
        cotrain_step(learner, language.documents(), step=steps)
    return [(r.token_ids, r.proposed, r.accepted, r.policy_version) for r in rollouts], type(engine).__name__


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """(config, rollouts) of one process with vLLM in it."""
    rollout = RolloutConfig(engine="vllm", num_draft_tokens=K, max_new_tokens=32)
    config = replace(run_config(tmp_path_factory.mktemp("alone")), rollout=rollout)
    rollouts, engine = train_and_serve(0, config, 30)
    assert engine == "VLLMEngine"
    assert {version for *_, version in rollouts} == {3, 4}
    assert sum(sum(kept) for _, _, kept, _ in rollouts) > 300
    return config, rollouts


@pytest.mark.parametrize("serving", [None, pytest.param((1,), marks=pytest.mark.slow)])
def test_a_mesh_with_vllm_on_its_ranks_is_one_process(ranks, alone, serving):
    """On both of two ranks, and on one of them: tokens and acceptances of one process with vLLM in it."""
    config, expected = alone
    config = replace(config, mesh=MeshConfig(dp=2), rollout=replace(config.rollout, engine_ranks=serving))
    found = ranks.run(2, train_and_serve, config, 30, timeout_s=300)
    assert [name for _, name in found] == ["Elsewhere" if serving else "VLLMProcess", "VLLMProcess"]
    assert [rollouts for rollouts, _ in found] == [expected, expected]
