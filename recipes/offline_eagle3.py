"""An EAGLE-3 draft from saved features: the policy is not run.

    torchrun --nproc_per_node 1 recipes/offline_eagle3.py --offline.features features/ --policy.hf_path policy/

`--policy.hf_path` may be left out for a store that scripts/extract_features.py made: it keeps
the policy's embeddings and head beside the features. `--draft.init FOLDER` goes on with a
draft, `--draft.vocab_path FILE` trains on a smaller vocabulary, `--mesh.dp` and `--mesh.cp`
use more ranks, `--checkpoint.every 100` and `--checkpoint.resume` survive interruptions.
"""

from cospec.config import CheckpointConfig, DraftConfig, EvalConfig, OptimConfig, RunConfig, TrainConfig
from cospec.train.cli import main
from cospec.train.offline import run_offline


def config() -> RunConfig:
    return RunConfig(
        output_dir="runs/offline_eagle3",
        draft=DraftConfig(num_passes=4),
        draft_optim=OptimConfig(name="muon", lr=7e-4, muon_lr=7e-3),
        train=TrainConfig(steps=500, batch_documents=16, row_tokens=1024),
        eval=EvalConfig(every=100),
        checkpoint=CheckpointConfig(every=100),
    )


if __name__ == "__main__":
    main(config(), run_offline)
