"""Runs with ranks that serve only, on processes that join as torchrun's do."""

import torch

from cospec import mesh
from cospec.link import Refused
from cospec.rollout.engine import EngineError
from cospec.rollout.native import NativeEngine
from cospec.train import loop, rollouts, serving
from support.mesh_runs import tensor_hash


def run_rl_on(rank, config):
    """Run RL and return, for each refit, (version, hash of every tensor by (name, dtype)).

    A rank that trains gives its own weights, in the dtypes that an engine may have; one that serves its engine's.
    """
    hashes = []
    report, loop.write_report = loop.write_report, lambda *args, **kw: "no report"
    refit, serving_refit = loop.refit, serving._refit

    def refit_and_hash(engine, learner, version, **kw):
        refit(engine, learner, version, **kw)
        trained = {"policy": learner.runner.full_state(), "draft": learner.draft.full_state()}
        hashes.append((version, {**hash_all(trained), **hash_all(trained, torch.bfloat16)}))

    def take_and_hash(engine, call, *args):
        serving_refit(engine, call, *args)
        hashes.append(
            (call.version, hash_all({"policy": engine.policy.state_dict(), "draft": engine.draft.state_dict()}))
        )

    loop.refit, serving._refit = refit_and_hash, take_and_hash
    try:
        loop.run_rl(config)
    finally:
        loop.refit, serving._refit, loop.write_report = refit, serving_refit, report
    return hashes


def hash_all(states, dtype=None):
    found = {}
    for part, state in states.items():
        for name, value in state.items():
            value = value.to(dtype) if dtype is not None and value.is_floating_point() else value
            found[f"{part}.{name}", value.dtype] = tensor_hash(value)
    return found


def run_rl_on_needy_engines(rank, config, refuses):
    """An engine that is built from weights, as vLLM is: was it given all of them? Or what the run ended with."""
    given = []

    def build(config, spec, policy_state, draft, draft_state, *, max_prompt, device, alone):
        assert not alone
        if refuses:
            raise EngineError("self-test failed")
        engine = rollouts._native_engine(config, spec, draft, torch.device("cpu"), max_prompt=max_prompt)
        assert isinstance(engine, NativeEngine)
        engine.refit(policy_state, draft_state, 0)  # checks names and shapes
        given.append(sorted(hash_all({"policy": policy_state, "draft": draft_state}).values()))
        return engine

    kept = rollouts._vllm_engine, loop.check_engine
    rollouts._vllm_engine, loop.check_engine = build, lambda config: None
    try:
        trained = run_rl_on(rank, config)
        return given or [sorted(h for (_, dtype), h in trained[0][1].items() if dtype != torch.bfloat16)]
    except (EngineError, Refused) as error:
        mesh._JOB.clear()  # this process lives on
        return f"{type(error).__name__}: {error}"
    finally:
        rollouts._vllm_engine, loop.check_engine = kept
