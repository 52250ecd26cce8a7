"""What a draft and its tap channel cost a pipelined step.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 scripts/bench_step.py [--pp 2] [--schedule 1F1B] ...

Four variants take turns in one run, on the same weights and rows:
    off         no draft, nothing is sent
    local       draft on, its taps are tensors that lie on its rank already
    channel     draft on, taps by the channel
    transport   taps by the channel, but the draft computes nothing
Seconds are medians of the slowest rank; a cost is the median of ratios of neighbours in
time, less one. CPU seconds are those of all ranks together, which a busy machine disturbs
less. The draft of a real run should cost what `local` costs: the channel's own
share is transport over off, and channel over local.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cospec.config import DraftConfig, MeshConfig, OptimConfig, PipelineConfig, PolicyConfig, RunConfig, TrainConfig
from cospec.policy.pipeline import PipelineRunner
from cospec.records import EMBEDDINGS, Document
from cospec.train.draft_side import DraftSide
from cospec.train.setup import build_learner, open_mesh
from cospec.train.step import cotrain_step

VARIANTS = ("off", "local", "channel", "transport")


class TapsInPlace:
    """Stands in for the channel: every microbatch has the same taps, and they are there already."""

    def __init__(self, runner: PipelineRunner):
        channel: Any = runner.port
        plan = channel.plan
        layers = (EMBEDDINGS, *runner.tap_layers)
        generator = torch.Generator().manual_seed(0)
        taps = torch.randn(len(layers), *plan.shape, generator=generator).to(runner.mesh.device, plan.dtype)
        self.taps = dict(zip(layers, taps, strict=True))

    def begin(self, wanted) -> None: ...
    def put(self, stage, microbatch, layer, tap) -> None: ...
    def sealed(self, stage, microbatch) -> None: ...
    def release(self, microbatch) -> None: ...
    def flush(self) -> None: ...

    def get(self, microbatch):
        return self.taps


class IdleDraft(DraftSide):
    def forward_backward(self, *_):
        return self.no_sums()


def main() -> None:
    args = parse()
    run = config(args)
    with open_mesh(run) as mesh:
        learner = build_learner(run, mesh)
        runner, draft = learner.runner, learner.draft
        if not isinstance(runner, PipelineRunner) or draft is None:
            raise SystemExit("error: --pp must be at least 2: without stages nothing travels")
        channel: Any = runner.port
        in_place = TapsInPlace(runner)
        idle = IdleDraft(draft.config, draft.mesh, draft.model, draft.optim, draft.home)
        generator = torch.Generator().manual_seed(1)
        shape = (args.microbatches * mesh.dp_size, args.row_tokens)
        ids = torch.randint(0, args.vocab, shape, generator=generator)
        documents = [Document(row, torch.ones(args.row_tokens, dtype=torch.bool)) for row in ids]

        def step(variant: str) -> dict:
            runner.port = in_place if variant == "local" else channel
            side = replace(learner, draft=idle if variant == "transport" else draft)
            if dist.is_initialized():
                dist.barrier()
            started, cpu_started = time.perf_counter(), time.process_time()
            cotrain_step(side, documents, step=0, train_draft=variant != "off")
            seconds, cpu_s = torch.tensor([time.perf_counter() - started]), time.process_time() - cpu_started
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            figures: list = [None] * dist.get_world_size()
            dist.all_gather_object(figures, channel.stats.take() | {"cpu_s": cpu_s})
            totals = {name: sum(f[name] for f in figures) for name in figures[0]}
            return {"seconds": seconds.item(), **totals, "wait_s": max(f["wait_s"] for f in figures)}

        rows: dict[str, list[dict]] = {variant: [] for variant in args.variants}
        order = random.Random(0)
        for turn in range(args.steps + 2):
            for variant in order.sample(args.variants, len(args.variants)):
                row = step(variant)
                if turn >= 2:
                    rows[variant].append(row)
        if mesh.world_rank == draft.home * mesh.dp_size * mesh.cp_size:
            report(args, rows, channel)


def report(args: argparse.Namespace, rows: dict[str, list[dict]], channel) -> None:
    def median(variant: str, name: str) -> float:
        return statistics.median(row[name] for row in rows[variant])

    def cost(variant: str, base: str, name: str = "seconds") -> float:
        if variant not in rows or base not in rows:
            return float("nan")
        pairs = zip(rows[variant], rows[base], strict=True)
        return statistics.median(a[name] / b[name] for a, b in pairs) - 1

    sending = "channel" if "channel" in rows else "transport"
    result = {
        "config": vars(args),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "seconds": {variant: round(median(variant, "seconds"), 3) for variant in rows},
        "cpu_seconds": {variant: round(median(variant, "cpu_s"), 3) for variant in rows},
        "cost_of_transport": cost("transport", "off"),
        "cpu_cost_of_transport": cost("transport", "off", "cpu_s"),
        "cost_of_channel_over_local": cost("channel", "local"),
        "cost_of_draft": cost("channel", "off"),
        "tap_wait_share": statistics.median(row["wait_s"] / row["seconds"] for row in rows[sending]),
        "stalls_a_step": median(sending, "stalls"),
        "stall_s_a_step": median(sending, "stall_s"),
        "sent_mib_a_step": median(sending, "sent_bytes") / 2**20,
        "slots": channel.plan.slots,
        "slot_mib": channel.slot_bytes / 2**20,
        "queue_mib_at_most": sum(
            stream.queue
            * len(stream.layers)
            * channel.plan.shape[0]
            * channel.plan.shape[1]
            * channel.plan.dtype.itemsize
            for stream in channel.plan.streams
            if stream.source != channel.plan.home
        )
        / 2**20,
    }
    for name, value in result.items():
        print(f"{name:28} {value:.4f}" if isinstance(value, float) else f"{name:28} {value}")
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1))


def config(args: argparse.Namespace) -> RunConfig:
    optim = OptimConfig(lr=1e-6)
    return RunConfig(
        mesh=MeshConfig(pp=args.pp, dp=args.dp, cp=args.cp),
        policy=PolicyConfig(
            vocab_size=args.vocab,
            hidden_size=args.hidden,
            intermediate_size=3 * args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=args.hidden // 64,
            num_key_value_heads=max(1, args.hidden // 128),
            head_dim=64,
        ),
        policy_optim=optim,
        draft_optim=optim,
        draft=DraftConfig(num_passes=args.passes, share=1.0),
        pipeline=PipelineConfig(
            schedule=args.schedule,
            microbatches=args.microbatches,
            tap_slots=args.tap_slots,
            tap_timeout_s=600,
            defer_draft=args.defer_draft,
        ),
        train=TrainConfig(row_tokens=args.row_tokens, device=args.device, comm_timeout_s=1200),
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("pp", 2),
        ("dp", 1),
        ("cp", 1),
        ("microbatches", 8),
        ("row_tokens", 512),
        ("hidden", 256),
        ("layers", 8),
        ("vocab", 1024),
        ("passes", 4),
        ("steps", 12),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--tap_slots", type=int)
    parser.add_argument("--defer_draft", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", help="file for the figures as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
