"""Whole runs on the ranks of the test pool, on a mesh of any shape."""

import hashlib
from contextlib import contextmanager
from dataclasses import replace

import torch

from cospec.config import MeshConfig, OptimConfig, PipelineConfig
from cospec.rollout.engine import Elsewhere
from cospec.train import loop, setup
from support.tiny_runs import tiny_rl, tiny_sft

SAMPLED = ("reward_mean", "rollout_acceptance_length")
"""Figures that rest on sampled tokens: equal as long as no token differs; the counter-based
random numbers see to that until rounding moves a probability across one of them."""


def on_mesh(config, pp, dp, cp, serve=0):
    """The same run on another mesh; AdamW, for Muon's bfloat16 iterations amplify the order of sums."""
    optim = OptimConfig(lr=1e-3)
    return replace(
        config,
        mesh=MeshConfig(pp=pp, dp=dp, cp=cp, serve=serve),
        pipeline=PipelineConfig(microbatches=2, tap_timeout_s=60.0),
        policy_optim=optim,
        draft_optim=optim,
        warm_start=replace(config.warm_start, policy_optim=optim, draft_optim=optim),
        train=replace(config.train, device="cpu", comm_timeout_s=90.0),
    )


def sft(folder, mesh, *, steps, resume=False, every=100):
    return on_mesh(tiny_sft(folder, resume=resume, every=every, steps=steps), *mesh)


def rl(folder, mesh, **rollout):
    config = on_mesh(tiny_rl(folder, every=0, steps=3, warm_steps=2), *mesh)
    return replace(config, rollout=replace(config.rollout, **rollout))


@contextmanager
def pool_owns_group():
    """The process group is the pool's to close, and plots say nothing here."""
    close, setup.close_mesh = setup.close_mesh, lambda mesh: None
    report, loop.write_report = loop.write_report, lambda *args, **kw: "no report"
    try:
        yield
    finally:
        setup.close_mesh, loop.write_report = close, report


def run_sft_on(rank, configs):
    with pool_owns_group():
        for config in configs:
            loop.run_sft(config)


def run_rl_on(rank, config):
    """Run, and after each refit compare every tensor of the engine with the trainer's: how many there were."""
    compared = []
    refit = loop.refit

    def refit_and_compare(engine, learner, version, **kw):
        refit(engine, learner, version, **kw)
        compared.append(compare(engine, learner))

    loop.refit = refit_and_compare
    try:
        with pool_owns_group():
            loop.run_rl(config)
    finally:
        loop.refit = refit
    return compared


def compare(engine, learner):
    """(tensors of the policy, tensors of the draft) found equal by hash; (0, 0) where no engine is."""
    pairs = [(learner.runner.full_state(), "policy"), (learner.draft.full_state(), "draft")]  # collective
    if isinstance(engine, Elsewhere):
        return 0, 0
    counts = []
    for trained, name in pairs:
        served = getattr(engine, name).state_dict()
        assert served.keys() == trained.keys()
        different = [k for k, v in served.items() if tensor_hash(v) != tensor_hash(trained[k].to(v.dtype))]
        assert not different, f"{name}: {different} differ after refit {engine.policy_version}"
        counts.append(len(served))
    return tuple(counts)


def tensor_hash(x):
    return hashlib.sha256(
        x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if x.numel() else b""
    ).hexdigest()
