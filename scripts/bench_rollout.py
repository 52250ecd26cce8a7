"""Seconds a generated token of the native engine, without and with speculation, against the policy's bare forward.

    python scripts/bench_rollout.py [--batches 8,16,32] [--depths 2,3,4,5] [--layers 12]

The policy and its draft are warmed up on the count_bits task first, so that acceptance is that
of a real pair. Every sequence runs to --tokens (no stop token), on the CPU's or the GPU's
default number of threads. In each repeat plain decoding, every k and every floor are timed in
turns. The floor of a setting is the policy's forward of k + 1 tokens for each sequence over a
half-filled cache and its head, for the tokens that such a pass yields (the acceptance
length): `x floor` holds all that proposing, verifying and bookkeeping add. Speed-up and
`x floor` are medians of paired ratios.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from cospec.config import (  # noqa: E402
    DraftConfig,
    PolicyConfig,
    RLConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
    WarmStartConfig,
)
from cospec.records import SamplingParams  # noqa: E402
from cospec.rl.tasks import Task, make_task  # noqa: E402
from cospec.rollout.engine import acceptance_length  # noqa: E402
from cospec.rollout.native import NativeEngine  # noqa: E402
from cospec.titan import head_weight  # noqa: E402
from cospec.train.loop import RUN, WARM_DRAFT, WARM_POLICY, warm_start  # noqa: E402
from cospec.train.rollouts import build_engine, refit  # noqa: E402
from cospec.train.setup import open_mesh, open_run  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="8,16,32")
    parser.add_argument("--depths", default="2,3,4,5", help="values of k, draft tokens a step")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64, help="of each response")
    parser.add_argument("--policy_steps", type=int, default=150, help="of the warm start")
    parser.add_argument("--draft_steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file too")
    args = parser.parse_args()
    batches, depths = ([int(x) for x in text.split(",")] for text in (args.batches, args.depths))

    task = make_task("count_bits")
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(
            output_dir=folder,
            policy=PolicyConfig(
                vocab_size=task.vocab_size,
                num_hidden_layers=args.layers,
                hidden_size=args.hidden,
                intermediate_size=3 * args.hidden,
            ),
            draft=DraftConfig(num_passes=4),
            warm_start=WarmStartConfig(policy_steps=args.policy_steps, draft_steps=args.draft_steps),
            rl=RLConfig(prompts_per_step=max(batches), samples_per_prompt=2),
            rollout=RolloutConfig(num_draft_tokens=max(depths), max_new_tokens=args.tokens),
            train=TrainConfig(device=args.device),
        )
        with (
            open_mesh(config) as mesh,
            open_run(config, mesh, data={}, phases=(WARM_POLICY, WARM_DRAFT, RUN)) as (learner, saves, log),
        ):
            warm_start(learner, task, log, saves)
            engine = build_engine(config, learner, max_prompt=task.max_prompt_tokens)
            refit(engine, learner, version=0)
    assert isinstance(engine, NativeEngine)

    header = ("batch", "k", "acceptance length", "us/token", "floor", "x floor", "speed-up")
    print("".join(f"{name:>{width}}" for name, width in zip(header, (5, 4, 19, 10, 9, 9, 10), strict=True)))
    rows = []
    for batch in batches:
        for row in measure(engine, task, batch, [0, *depths], args.tokens, args.repeats):
            rows.append(row)
            print(
                f"{row['batch']:5}{row['num_draft_tokens']:4}{row['acceptance_length']:19.2f}"
                f"{1e6 * row['s_per_token']:10.1f}{1e6 * row['floor_s_per_token']:9.1f}{row['times_floor']:9.2f}"
                f"{row['speed_up']:10.2f}",
                flush=True,
            )
    figures = {"rows": rows, **{k: v for k, v in vars(args).items() if k != "json"}, **versions(engine.device)}
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    else:
        print(json.dumps(figures))


def measure(
    engine: NativeEngine, task: Task, batch: int, depths: list[int], tokens: int, repeats: int
) -> list[dict[str, Any]]:
    """A row for each number of draft tokens; 0, plain decoding, comes first."""
    held_out = task.eval_prompts(batch)
    prompts = [prompt.token_ids for prompt in held_out]
    middle = len(prompts[0]) + tokens // 2
    params = SamplingParams(max_new_tokens=tokens)
    seconds: dict[int, list[float]] = {k: [] for k in depths}
    floors: dict[int, list[float]] = {k: [] for k in depths}
    lengths: dict[int, float] = {}
    for repeat in range(repeats + 1):  # the first warms up
        for k in depths:
            with engine.speculation(k):
                taken, rollouts = timed(engine.device, lambda: engine.generate(prompts, params))
            lengths[k] = acceptance_length(rollouts)
            produced = sum(len(r.token_ids) for r in rollouts)
            bare = bare_forward(engine, batch, k + 1, middle)
            if repeat:
                seconds[k].append(taken / produced)
                floors[k].append(bare / (batch * lengths[k]))
    return [
        {
            "batch": batch,
            "num_draft_tokens": k,
            "acceptance_length": lengths[k],
            "s_per_token": statistics.median(seconds[k]),
            "floor_s_per_token": statistics.median(floors[k]),
            "times_floor": statistics.median(a / b for a, b in zip(seconds[k], floors[k], strict=True)),
            "speed_up": statistics.median(a / b for a, b in zip(seconds[0], seconds[k], strict=True)),
        }
        for k in depths
    ]


@torch.inference_mode()
def bare_forward(engine: NativeEngine, batch: int, width: int, position: int, times: int = 8) -> float:
    """Seconds of the policy's forward and head over `width` tokens a sequence, nothing else; median."""
    device = engine.device
    positions = position + torch.arange(width, device=device).expand(batch, width)
    tokens = torch.zeros(1, batch * width, dtype=torch.int64, device=device)

    def forward() -> torch.Tensor:
        view = engine.cache.view(0, positions, position + width)
        hidden = engine.policy(tokens, positions=positions.reshape(1, -1), attention_masks=view)
        return F.linear(hidden, head_weight(engine.policy))

    return statistics.median(timed(device, forward)[0] for _ in range(times))


def timed(device: torch.device, work) -> tuple[float, Any]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, result


def versions(device: torch.device) -> dict[str, Any]:
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False).stdout.strip()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device_name": name,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit or "unknown",
    }


if __name__ == "__main__":
    main()
