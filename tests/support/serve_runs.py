"""Runs with ranks that serve only, on processes that join as torchrun's do."""

from cospec.train import loop, rollouts, serving
from support.mesh_runs import tensor_hash


def run_rl_on(rank, config):
    """Run RL; after each refit the hashes of every tensor, those of the trainer or of this rank's engine."""
    hashes = []
    report, loop.write_report = loop.write_report, lambda *args, **kw: "no report"
    refit, serving_refit = loop.refit, serving._refit

    def refit_and_hash(engine, learner, version, **kw):
        refit(engine, learner, version, **kw)
        trained = {"policy": learner.runner.full_state(), "draft": learner.draft.full_state()}
        hashes.append((version, {f"{part}.{k}": tensor_hash(v) for part, s in trained.items() for k, v in s.items()}))

    def take_and_hash(engine, call, *args):
        serving_refit(engine, call, *args)
        served = {"policy": engine.policy.state_dict(), "draft": engine.draft.state_dict()}
        found = {f"{part}.{k}": tensor_hash(v) for part, s in served.items() for k, v in s.items()}
        hashes.append((call.version, found))

    loop.refit, serving._refit = refit_and_hash, take_and_hash
    try:
        loop.run_rl(config)
    finally:
        loop.refit, serving._refit, loop.write_report = refit, serving_refit, report
    return hashes
