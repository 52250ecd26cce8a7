"""Many tiny co-training steps: does memory or the number of open files grow?

    python scripts/soak.py [--steps 2000] [--rl]

Runs recipes' own loop (supervised, or with --rl rollouts, refit and evaluation too) on a tiny
model with a checkpoint now and then, and fits a line through the process's resident memory
after the first quarter (allocators and caches fill up first). Exit code 1 when memory grows
by more than --allowed_kib a step or a file stays open.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from cospec.config import (  # noqa: E402
    CheckpointConfig,
    DraftConfig,
    EvalConfig,
    PolicyConfig,
    RLConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
    WarmStartConfig,
)
from cospec.train import loop  # noqa: E402


def tiny(folder: str, steps: int) -> RunConfig:
    return RunConfig(
        output_dir=folder,
        policy=PolicyConfig(
            vocab_size=64,
            num_hidden_layers=4,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
        ),
        draft=DraftConfig(num_passes=2, share=0.5),
        warm_start=WarmStartConfig(policy_steps=0, draft_steps=0),
        rl=RLConfig(prompts_per_step=2, samples_per_prompt=2),
        rollout=RolloutConfig(num_draft_tokens=2, max_new_tokens=12),
        eval=EvalConfig(prompts=2, speed_batch=2, every=max(1, steps // 20)),
        train=TrainConfig(steps=steps, batch_documents=4, row_tokens=128),
        checkpoint=CheckpointConfig(every=max(1, steps // 20)),
    )


def soak(config: RunConfig, run) -> dict[str, float]:
    """Run it; KiB of resident memory and open files after every step, summed up."""
    resident, files = [], []
    step = loop.cotrain_step

    def watched(*args, **options):
        stats = step(*args, **options)
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024)
        files.append(len(os.listdir("/proc/self/fd")))
        return stats

    loop.cotrain_step = watched
    started = time.perf_counter()
    try:
        run(config)
    finally:
        loop.cotrain_step = step
    settled = len(resident) // 4
    steps = np.arange(settled, len(resident))
    slope, start = np.polyfit(steps, resident[settled:], 1)
    noise = float(np.std(np.asarray(resident[settled:]) - (slope * steps + start)))
    return {
        "steps": len(resident),
        "seconds": round(time.perf_counter() - started, 1),
        "resident_mib_settled": round(resident[settled] / 1024, 1),
        "resident_mib_end": round(resident[-1] / 1024, 1),
        "slope_kib_per_step": round(float(slope), 4),
        "noise_kib": round(noise, 1),
        "open_files_settled": files[settled],
        "open_files_end": files[-1],
        "open_files_most": max(files[settled:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rl", action="store_true", help="rollouts, refit and evaluation too")
    parser.add_argument("--allowed_kib", type=float, default=1.0, help="largest slope, KiB a step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = tiny(folder, args.steps)
        if not args.rl:
            config = replace(config, draft=replace(config.draft, share=1.0))
        figures = soak(config, loop.run_rl if args.rl else loop.run_sft)
    print(json.dumps(figures))
    grows = figures["slope_kib_per_step"] > args.allowed_kib
    sys.exit(int(grows or figures["open_files_end"] > figures["open_files_settled"]))


if __name__ == "__main__":
    main()
