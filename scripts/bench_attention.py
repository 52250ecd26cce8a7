"""Trunk-and-branch attention over cp ranks, forward and backward: seconds, tokens/s, peak bytes, bytes sent.

    python scripts/bench_attention.py --cp 1,2 --tokens 8192,16384 --docs 1,8 --passes 1,4

Beside it, in the same run:
    floor        plain causal flash attention (SDPA) of the same documents, no branches, in one process
    regather     our blocks, but every pass gathers all keys anew
    dense mask   SDPA with a mask over the concatenated trunk and branch keys of all ranks

efficiency = passes x floor seconds / (cp x seconds): 1 means that branches, communication and merging
are free and that the ranks share the attention perfectly. Contestants take turns within a repetition;
every ratio is a median of paired ratios, so that a busy machine disturbs both sides alike. Where others
use the cores, ranks wait for each other; "by work" is the same ratio in CPU seconds of all ranks, which
leaves waiting out.
One thread per process on CPU; a GPU per process where there are enough (NCCL), else one for all (gloo).
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from cospec.layout import PackedLayout  # noqa: E402
from cospec.ops.ring import open_trunk, trunk_branch_attention  # noqa: E402
from cospec.ops.wire import carried  # noqa: E402

NAMES = ("ring", "gather", "regather", "dense mask")


@dataclass(frozen=True)
class Case:
    tokens: int
    docs: int
    passes: int

    def lengths(self, even: bool) -> list[int]:
        """Equal documents, or of lengths from 1 to 3 units in turn."""
        shares = [1.0 if even else 1.0 + 2.0 * (i * 5 % 8) / 7 for i in range(self.docs)]
        lengths = [int(self.tokens * share / sum(shares)) for share in shares]
        lengths[0] += self.tokens - sum(lengths)
        return lengths


def main() -> None:
    args = arguments()
    for cp in args.cp:
        if cp < 1:
            raise SystemExit(f"--cp {cp}: must be >= 1")
    rows: list[dict] = []
    cases = [Case(*sizes) for sizes in product(args.tokens, args.docs, args.passes)]
    for cp in args.cp:
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(rank_main, (cp, folder, cases, args), nprocs=cp, start_method="spawn")
            rows += json.loads((Path(folder) / "rows.json").read_text())
    one_rank = {(*key_of(r), r["name"]): r["peak_bytes"] for r in rows if r["cp"] == 1}
    for row in rows:
        alone = one_rank.get((*key_of(row), "ring"))
        if row["cp"] > 1 and row["name"] == "ring" and alone:
            shard = 2 * 2 * row["tokens"] // row["cp"] * args.key_heads * args.head_dim * element_size(args)
            row["peak_ratio"] = row["peak_bytes"] / (
                alone / row["cp"] + shard
            )  # a shard in flight: kv and its gradient
    print(table(rows))
    if args.json:
        Path(args.json).write_text(json.dumps({**machine(args), "rows": rows}, indent=1) + "\n")
        print(f"written: {args.json}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def numbers(text: str) -> list[int]:
        return [int(x) for x in text.split(",")]

    parser.add_argument("--cp", type=numbers, default=[1, 2])
    parser.add_argument("--tokens", type=numbers, default=[8192, 16384])
    parser.add_argument("--docs", type=numbers, default=[1, 8])
    parser.add_argument("--passes", type=numbers, default=[1, 4])
    parser.add_argument("--branches", type=int, default=4, help="branch rows of every pass")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--key-heads", type=int, default=1)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--even", action="store_true", help="documents of equal length")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default=None, help=f"contestants, of {', '.join(NAMES)}")
    parser.add_argument("--dtype", default=None, choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--memory-limit", type=float, default=4.0, help="GiB a rank's dense mask and scores may take")
    parser.add_argument("--json", default=None, help="file for all figures")
    args = parser.parse_args()
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    return args


def rank_main(rank: int, cp: int, folder: str, cases: Sequence[Case], args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    enough = device.type == "cuda" and torch.cuda.device_count() >= cp
    dist.init_process_group(
        "nccl" if enough else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=cp
    )
    rows = [row for case in cases for row in measure(rank, cp, case, device, args)]
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def measure(rank: int, cp: int, case: Case, device: torch.device, args: argparse.Namespace) -> list[dict]:
    """One row for the floor and one for each contestant; complete on rank 0."""
    problem = Problem(rank, cp, case, device, args)
    chosen = NAMES if args.only is None else tuple(args.only.split(","))
    if cp == 1:  # nothing travels: all modes are one
        chosen = tuple(name for name in chosen if name in ("ring", "dense mask"))
    skipped = {"dense mask"} if problem.dense_bytes > args.memory_limit * 2**30 else set()
    work: dict[str, Callable[[], int]] = {"floor": problem.floor} if rank == 0 else {"floor": lambda: 0}
    work |= {name: problem.contestant(name) for name in chosen if name not in skipped}
    seconds: dict[str, list[float]] = {name: [] for name in work}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in work}
    sent = {name: once() for name, once in work.items()}  # warm
    for _ in range(args.repeats):
        for name, once in work.items():
            wall, cpu = timed(once, device)
            seconds[name].append(wall)
            cpu_seconds[name].append(cpu)
    peak = {name: peak_bytes(once, device) for name, once in work.items()}
    rows = []
    for name in ("floor", *chosen):
        row: dict[str, Any] = {"cp": cp, "tokens": case.tokens, "docs": case.docs, "passes": case.passes, "name": name}
        times = seconds.get(name)
        if times is None:
            note = f"skipped: mask and scores would take {problem.dense_bytes / 2**30:.1f} GiB on each rank"
            rows.append(row | {"seconds": None, "peak_bytes": None, "note": note})
            continue
        scale = 1 if name == "floor" else case.passes
        pairs = [scale * floor / (cp * own) for floor, own in zip(seconds["floor"], times, strict=True)]
        work_pairs = zip(cpu_seconds["floor"], cpu_seconds[name], strict=True)
        work_ratio = statistics.median(scale * floor / own for floor, own in work_pairs)
        row |= {
            "seconds": statistics.median(times),
            "tokens_per_s": scale * case.tokens / statistics.median(times),
            "efficiency": None if name == "floor" else statistics.median(pairs),
            "efficiency_range": None if name == "floor" else [min(pairs), max(pairs)],
            "cpu_efficiency": None if name == "floor" or device.type == "cuda" else work_ratio,
            "peak_bytes": peak[name],
            "bytes_sent": sent[name],
        }
        rows.append(row)
    return rows


class Problem:
    """The tensors of one rank, and what can be done with them; each returns the bytes that this rank sent."""

    def __init__(self, rank: int, cp: int, case: Case, device: torch.device, args: argparse.Namespace):
        self.rank, self.cp, self.case = rank, cp, case
        self.lengths = case.lengths(args.even)
        self.layout = PackedLayout.from_lengths(self.lengths, cp)
        self.group = dist.group.WORLD if cp > 1 else None
        generator = torch.Generator().manual_seed(0)
        dtype = getattr(torch, args.dtype)

        def whole(heads: int) -> Tensor:
            return torch.randn(case.tokens, heads, args.head_dim, generator=generator).to(device, dtype)

        def leaf(x: Tensor) -> Tensor:
            return self.layout.shard(x, rank).requires_grad_()

        q, k, v, grad = whole(args.heads), whole(args.key_heads), whole(args.key_heads), whole(args.heads)
        self.whole = [x.requires_grad_() for x in (q, k, v)]
        self.whole_grad = grad
        self.q, self.k, self.v = (leaf(x.detach()) for x in (q, k, v))
        self.k_branches = [leaf(whole(args.key_heads)) for _ in range(args.branches)]
        self.v_branches = [leaf(whole(args.key_heads)) for _ in range(args.branches)]
        self.grad = self.layout.shard(grad, rank)
        self.leaves = [self.q, self.k, self.v, *self.k_branches, *self.v_branches]
        rows = self.layout.num_local_rows
        keys = rows * (cp + args.branches)
        self.dense_bytes = rows * keys * (1 + 2 * args.heads * dtype.itemsize)  # mask, and scores kept for backward
        self.dense: Tensor | None = None

    def floor(self) -> int:
        """One pass of plain causal attention over all documents, on this process alone."""
        outs = []
        for q, k, v in zip(*(x.split(self.lengths) for x in self.whole), strict=True):
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            outs.append(out.squeeze(0).transpose(0, 1))
        torch.autograd.grad(torch.cat(outs), self.whole, self.whole_grad)
        return 0

    def contestant(self, name: str) -> Callable[[], int]:
        if name == "dense mask":
            return self.dense_mask
        if name not in NAMES:
            raise SystemExit(f"--only {name}: choose of {', '.join(NAMES)}")
        return lambda: self.ours("ring" if name == "ring" else "gather", anew=name == "regather")

    def ours(self, mode: str, anew: bool) -> int:
        trunks = []
        outs = []
        for _ in range(self.case.passes):
            if anew or not trunks:
                trunks.append(open_trunk(self.k, self.v, self.layout, cp_group=self.group, mode=mode))
            outs.append(trunk_branch_attention(self.q, trunks[-1], self.k_branches, self.v_branches))
        torch.autograd.grad(outs, self.leaves, [self.grad] * len(outs))
        return sum(trunk.traffic.sent for trunk in trunks)

    def dense_mask(self) -> int:
        if self.dense is None:
            self.dense = self._mask()
        outs, sent = [], 0
        for _ in range(self.case.passes):
            kv = torch.stack((self.k, self.v))
            if self.cp > 1:
                kv = AllGather.apply(kv)
                sent += 2 * (self.cp - 1) * self.k.numel() * 2 * self.k.element_size()  # keys there, gradients back
            k = torch.cat((kv[0], *self.k_branches)).transpose(0, 1).unsqueeze(0)
            v = torch.cat((kv[1], *self.v_branches)).transpose(0, 1).unsqueeze(0)
            q = self.q.transpose(0, 1).unsqueeze(0)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.dense, enable_gqa=True)
            outs.append(out.squeeze(0).transpose(0, 1))
        torch.autograd.grad(outs, self.leaves, [self.grad] * len(outs))
        return sent

    def _mask(self) -> Tensor:
        """bool [T, cp * T + branches * T]: same document and not later; a row's own branch keys."""
        layout, rows = self.layout, self.layout.num_local_rows
        document = torch.cat([layout.document(r) for r in range(self.cp)])
        position = torch.cat([layout.positions(r) for r in range(self.cp)])
        trunk = layout.document(self.rank)[:, None] == document
        trunk &= layout.positions(self.rank)[:, None] >= position
        own = torch.eye(rows, dtype=torch.bool)
        return torch.cat((trunk, *[own] * len(self.k_branches)), dim=1).to(self.q.device)


class AllGather(torch.autograd.Function):
    """The rival's own: [2, T, M, H] of each rank joined in rows, the gradient summed at its owner."""

    @staticmethod
    def forward(ctx, kv: Tensor) -> Tensor:
        mine = carried(kv, None)
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        return torch.cat(parts, dim=1).to(kv.device)

    @staticmethod
    def backward(ctx, grad: Tensor):
        parts = carried(torch.stack(grad.chunk(dist.get_world_size(), dim=1)), None)
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts)
        return received.to(grad.device).sum(0)


def timed(once: Callable[[], int], device: torch.device) -> tuple[float, float]:
    """Seconds until the slowest rank is done, all start together; CPU seconds of all ranks."""
    synchronize(device)
    dist.barrier()
    started, worked = time.perf_counter(), time.process_time()
    once()
    synchronize(device)
    took = time.perf_counter() - started, time.process_time() - worked
    wall, cpu = (torch.tensor([x], dtype=torch.float64, device=device) for x in took)
    dist.all_reduce(wall, op=dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    return wall.item(), cpu.item()


def peak_bytes(once: Callable[[], int], device: torch.device) -> int:
    """The most that a run holds above its inputs, on the rank that holds most; branch and trunk gradients included."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        once()
        peak = torch.cuda.max_memory_allocated() - before
    else:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            once()
        assert profile.profiler is not None
        assert profile.profiler.kineto_results is not None
        events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        held = peak = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            held += event.nbytes()  # pyrefly: ignore[missing-attribute]
            peak = max(peak, held)
    most = torch.tensor([peak], dtype=torch.int64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table(rows: Sequence[dict]) -> str:
    lines = [
        "cp  tokens docs passes  name           seconds   tokens/s  efficiency (range)   by work   peak MiB"
        "  of 1/cp  sent MiB"
    ]
    for r in rows:
        head = f"{r['cp']:2} {r['tokens']:7} {r['docs']:4} {r['passes']:6}  {r['name']:10}"
        if r["seconds"] is None:
            lines.append(f"{head}  {r['note']}")
            continue
        efficiency = " " * 19
        if r["efficiency"] is not None:
            low, high = r["efficiency_range"]
            efficiency = f"{r['efficiency']:.3f} ({low:.2f}..{high:.2f})".ljust(19)
        by_work = f"{r['cpu_efficiency']:7.3f}" if r["cpu_efficiency"] is not None else " " * 7
        ratio = f"{r['peak_ratio']:7.2f}" if "peak_ratio" in r else " " * 7
        lines.append(
            f"{head}  {r['seconds']:10.3f} {r['tokens_per_s']:10.0f}  {efficiency}  {by_work}"
            f"  {r['peak_bytes'] / 2**20:9.1f}  {ratio}  {r['bytes_sent'] / 2**20:8.2f}"
        )
    return "\n".join(lines)


def key_of(row: dict) -> tuple[int, int, int]:
    return row["tokens"], row["docs"], row["passes"]


def element_size(args: argparse.Namespace) -> int:
    return getattr(torch, args.dtype).itemsize


def machine(args: argparse.Namespace) -> dict:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else cpu_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or None,
        "arguments": vars(args),
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
