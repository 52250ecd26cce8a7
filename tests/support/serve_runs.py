"""Runs with ranks that serve only, on processes that join as torchrun's do."""

import torch

from cospec.train import loop, serving
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
