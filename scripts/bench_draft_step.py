"""Time and memory of one EAGLE-3 draft step (passes, loss, backward) against its floor, on the CPU.

    python scripts/bench_draft_step.py [--settings 32000/8000/2048,...] [--malloc reuse]

One thread, float32, one document, synthetic features; hidden 512, 8 heads and 2 of keys of 64,
ffn 1536, 4 passes. Every setting runs in a process of its own. The floor is timed in turns
with the step: SDPA's flash attention of the same trunk, forward and backward, once a pass,
plus the matrix products that cannot be left out at the speed of a plain product (the faster
of two shapes). `x floor` is the median of the paired ratios. Seconds are CPU time of the one
thread, the system's share included: what else runs on the machine distorts them less. Memory
is the peak growth of the process in its first step, gradients of the parameters included.

--malloc reuse lets glibc keep and reuse freed memory (MALLOC_MMAP_THRESHOLD_ 32 MiB,
MALLOC_TRIM_THRESHOLD_ off); default returns every large tensor to the system and pays for
its pages again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

SETTINGS = "32000/8000/512,32000/8000/2048,32000/8000/4096,32000/8000/8192,151936/32000/2048"
DIM, HEADS, KEY_HEADS, HEAD_DIM, FFN, PASSES, TAPS = 512, 8, 2, 64, 1536, 4, 3
# anchors: what a plain PyTorch step reaches, MiB, with a frozen and with a trained head
REACHABLE_MIB = {
    (32000, 512): (203, 214),
    (32000, 2048): (606, 627),
    (32000, 4096): (1215, 1216),
    (32000, 8192): (2062, 2083),
    (151936, 2048): (625, 697),
}
MALLOC = {
    "default": {},
    "reuse": {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default=SETTINGS, help="policy vocabulary/draft vocabulary/tokens, ...")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--malloc", choices=tuple(MALLOC), default="reuse")
    parser.add_argument("--frozen_head", action="store_true", help="do not train the draft's head")
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file too")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        vocab, draft_vocab, tokens = map(int, args.child.split("/"))
        print(json.dumps(measure(vocab, draft_vocab, tokens, args.repeats, args.frozen_head)))
        return
    print(f"{'vocabularies':>16}{'tokens':>8}{'seconds':>9}{'floor':>8}{'x floor':>9}{'MiB':>7}{'reachable':>11}")
    rows = []
    for setting in args.settings.split(","):
        command = [sys.executable, __file__, "--child", setting, "--repeats", str(args.repeats)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **MALLOC[args.malloc]}
        done = subprocess.run(
            command + ["--frozen_head"] * args.frozen_head, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"{setting}: {done.stderr}")
        row = json.loads(done.stdout)
        rows.append(row)
        reachable = REACHABLE_MIB.get((row["vocab"], row["tokens"]), ("-", "-"))[not args.frozen_head]
        print(
            f"{row['vocab']:>8} /{row['draft_vocab']:>6}{row['tokens']:>8}{row['seconds']:9.2f}{row['floor_s']:8.2f}"
            f"{row['ratio']:9.2f}{row['added_mib']:7.0f}{reachable:>11}",
            flush=True,
        )
    figures = {"rows": rows, "malloc": args.malloc, "head": "frozen" if args.frozen_head else "trained", **versions()}
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    else:
        print(json.dumps(figures))


def measure(vocab: int, draft_vocab: int, tokens: int, repeats: int, frozen_head: bool) -> dict[str, Any]:
    """One setting, in this process."""
    import torch

    torch.set_num_threads(1)
    step, floor = build_step(vocab, draft_vocab, tokens, frozen_head), Floor(vocab, draft_vocab, tokens, frozen_head)
    floor.warm_up()
    before = resident_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    step()
    added = resident_mib("VmHWM") - before
    seconds, floors, parts = [], [], []
    for _ in range(repeats):
        parts.append(floor.seconds())
        floors.append(sum(parts[-1].values()))
        started = time.process_time()
        step()
        seconds.append(time.process_time() - started)
    return {
        "vocab": vocab,
        "draft_vocab": draft_vocab,
        "tokens": tokens,
        "seconds": statistics.median(seconds),
        "floor_s": statistics.median(floors),
        "ratio": statistics.median(s / f for s, f in zip(seconds, floors, strict=True)),
        "floor_parts_s": {k: statistics.median(p[k] for p in parts) for k in parts[0]},
        "gflop_per_s": floor.flops / statistics.median(p["products"] for p in parts) / 1e9,
        "added_mib": added,
    }


def build_step(vocab: int, draft_vocab: int, tokens: int, frozen_head: bool):
    """A function that runs one step on the same inputs."""
    import torch

    from cospec.config import Eagle3Config
    from cospec.draft.eagle3 import Eagle3Draft, init_draft
    from cospec.draft.ttt import pairs
    from cospec.draft.vocab import vocab_maps
    from cospec.layout import PackedLayout
    from cospec.ops.losses import draft_loss
    from cospec.ops.shift import with_halo
    from cospec.records import Batch, Taps

    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).mul_(scale)

    draft = Eagle3Draft(
        Eagle3Config(
            hidden_size=DIM,
            target_hidden_size=DIM,
            intermediate_size=FFN,
            num_attention_heads=HEADS,
            num_key_value_heads=KEY_HEADS,
            head_dim=HEAD_DIM,
            vocab_size=vocab,
            draft_vocab_size=draft_vocab,
            tap_layers=tuple(range(TAPS)),
            max_position_embeddings=tokens,
        )
    )
    init_draft(draft, seed=0)
    draft.lm_head.weight.requires_grad_(not frozen_head)
    d2t, t2d = vocab_maps(torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values, vocab)
    draft.d2t.copy_(d2t)
    draft.t2d.copy_(t2d)
    layout = PackedLayout.from_lengths([tokens], 1)
    batch = Batch(
        layout=layout,
        cp_rank=0,
        input_ids=torch.randint(vocab, (tokens,), generator=generator),
        positions=layout.positions(0),
        loss_mask=torch.ones(tokens, dtype=torch.bool),
        advantages=torch.zeros(tokens),
        rollout_logp=torch.zeros(tokens),
    )
    taps = Taps(tuple(draw(tokens, DIM) for _ in range(TAPS)), draw(tokens, DIM), draw(tokens, DIM))
    head_VD = draw(vocab, DIM, scale=0.02)
    pairs_KS = pairs(batch, num_passes=PASSES)
    coef_K = torch.full((PASSES,), 1.0 / tokens)

    def step() -> None:
        draft.zero_grad(set_to_none=True)
        hidden_KTD = draft(taps, batch, num_passes=PASSES)
        teacher_SD = with_halo(taps.final_hidden, layout, PASSES)
        loss = draft_loss(
            hidden_KTD, draft.lm_head.weight, teacher_SD, head_VD, pairs_KS, coef_K, vocab_map_U=draft.policy_ids
        ).loss
        del hidden_KTD
        loss.backward()

    return step


class Floor:
    """The work that no step can leave out, timed."""

    def __init__(self, vocab: int, draft_vocab: int, tokens: int, frozen_head: bool):
        import torch

        layer = 2 * DIM * (HEADS + 2 * KEY_HEADS) * HEAD_DIM + HEADS * HEAD_DIM * DIM + 3 * DIM * FFN
        fuse = 2 * TAPS * DIM * DIM  # forward and the weight's gradient: the taps need none
        head = PASSES * (2 if frozen_head else 3) * DIM * draft_vocab
        self.flops = 2 * tokens * (PASSES * 3 * layer + fuse + head + DIM * vocab)
        self.q = torch.randn(1, HEADS, tokens, HEAD_DIM, requires_grad=True)
        self.k, self.v = (torch.randn(1, KEY_HEADS, tokens, HEAD_DIM, requires_grad=True) for _ in range(2))
        self.grad = torch.randn(1, HEADS, tokens, HEAD_DIM)
        rows = min(tokens, 512)
        self.x = torch.randn(rows, DIM)
        self.weights = [torch.randn(FFN, DIM), torch.randn(min(draft_vocab, 8192), DIM)]
        self.outs = [torch.empty(rows, len(w)) for w in self.weights]

    def seconds(self) -> dict[str, float]:
        import torch
        import torch.nn.functional as F
        from torch.nn.attention import SDPBackend, sdpa_kernel

        started = time.process_time()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(self.q, self.k, self.v, is_causal=True, enable_gqa=True)
        torch.autograd.grad(out, (self.q, self.k, self.v), self.grad)
        attention = PASSES * (time.process_time() - started)
        speeds = []
        for weight, out in zip(self.weights, self.outs, strict=True):
            times = []
            for _ in range(8):
                started = time.process_time()
                torch.mm(self.x, weight.T, out=out)
                times.append(time.process_time() - started)
            speeds.append(2 * self.x.numel() * len(weight) / statistics.median(times))
        return {"attention": attention, "products": self.flops / max(speeds)}

    def warm_up(self) -> None:
        """The libraries' own buffers are nobody's added memory."""
        import torch

        self.seconds()
        for weight, out in zip(self.weights, self.outs, strict=True):
            torch.zeros_like(self.x).addmm_(out, weight)
            torch.zeros_like(weight).addmm_(out.T, self.x)


def resident_mib(field: str) -> float:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) / 1024


def versions() -> dict[str, Any]:
    import torch

    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False).stdout.strip()
    return {
        "device": platform.processor() or platform.machine(),
        "threads": 1,
        "dtype": "float32",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit or "unknown",
    }


if __name__ == "__main__":
    main()
