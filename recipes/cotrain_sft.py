"""Supervised co-training: next-token loss for the policy on jsonl documents, its draft along.

    torchrun --nproc_per_node 2 recipes/cotrain_sft.py --mesh.dp 2 --data.path documents.jsonl

Deterministic: losses and gradient norms do not depend on mesh.dp, mesh.cp or mesh.pp, which
makes it the yardstick of every equality test.
"""

from cospec.config import DraftConfig, OptimConfig, PolicyConfig, RunConfig, TrainConfig
from cospec.train.cli import main
from cospec.train.loop import run_sft


def config() -> RunConfig:
    return RunConfig(
        output_dir="runs/cotrain_sft",
        policy=PolicyConfig(num_hidden_layers=4, hidden_size=128, intermediate_size=384),
        policy_optim=OptimConfig(lr=1e-3),
        draft=DraftConfig(num_passes=4, share=1.0),
        draft_optim=OptimConfig(lr=1e-3),
        train=TrainConfig(steps=50, batch_documents=16, row_tokens=512),
    )


if __name__ == "__main__":
    main(config(), run_sft)
