"""The main job in small: every part once, in under 90 seconds on two CPU cores.

torchrun --nproc_per_node 1 recipes/smoke.py
"""

from cospec.config import (
    DraftConfig,
    EvalConfig,
    OptimConfig,
    PolicyConfig,
    RLConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
    WarmStartConfig,
)
from cospec.train.cli import main
from cospec.train.loop import run_rl


def config() -> RunConfig:
    return RunConfig(
        output_dir="runs/smoke",
        policy=PolicyConfig(num_hidden_layers=4, hidden_size=128, intermediate_size=384),
        policy_optim=OptimConfig(lr=2.5e-4),
        draft=DraftConfig(num_passes=3),
        warm_start=WarmStartConfig(policy_steps=80, draft_steps=40),
        rl=RLConfig(prompts_per_step=4, samples_per_prompt=8),
        rollout=RolloutConfig(num_draft_tokens=4, max_new_tokens=96),
        train=TrainConfig(steps=6, row_tokens=1024),
        eval=EvalConfig(prompts=32),
    )


if __name__ == "__main__":
    main(config(), run_rl)
