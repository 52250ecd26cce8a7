"""Time and memory of the draft loss against plain autograd, forward and backward.

    python scripts/bench_loss.py [--vocab 32000] [--draft_vocab 32000] [--tokens 1024] [--passes 4]

Both are run in turns; seconds are medians, the ratio is the median of paired ratios. The
floor is the least work there is (teacher logits once; draft logits and two gradient
products per pass) at the speed of a plain matrix product of the same shapes. Memory is
the growth of the process (CUDA: of the allocator) at its peak, above inputs and gradients.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import threading
import time
from pathlib import Path

import torch

from cospec.ops.losses import draft_loss


def plain_loss(hidden_KTD, head_UD, teacher_SD, teacher_head_VD, rows_KS, coef_K, *, vocab_map_U=None):
    """The loss as one would write it first: whole logits, autograd."""
    with torch.no_grad():
        policy_SV = (teacher_SD @ teacher_head_VD.T).float().softmax(-1)
        policy_SU = policy_SV if vocab_map_U is None else policy_SV[:, vocab_map_U]
    loss = head_UD.new_zeros((), dtype=torch.float32)
    for k, hidden_TD in enumerate(hidden_KTD):
        wanted = rows_KS[k] >= 0
        log_draft = (hidden_TD[rows_KS[k][wanted]] @ head_UD.T).float().log_softmax(-1)
        loss = loss - coef_K[k] * (policy_SU[wanted] * log_draft).sum()
    return loss


def make_inputs(args, device: torch.device, dtype: torch.dtype) -> dict:
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    rows_KS = torch.stack([torch.arange(args.tokens) - k - 1 for k in range(args.passes)]).clamp(min=-1).to(device)
    ids = None
    if args.draft_vocab < args.vocab:
        ids = torch.randperm(args.vocab, generator=torch.Generator().manual_seed(0))[: args.draft_vocab].sort().values
        ids = ids.to(device)
    return {
        "hidden_KTD": [draw(args.tokens, args.dim).requires_grad_() for _ in range(args.passes)],
        "head_UD": (draw(args.draft_vocab, args.dim) * 0.02).requires_grad_(),
        "teacher_SD": draw(args.tokens, args.dim),
        "teacher_head_VD": draw(args.vocab, args.dim) * 0.02,
        "rows_KS": rows_KS,
        "coef_K": torch.full((args.passes,), 1.0 / args.tokens, device=device),
        "vocab_map_U": ids,
    }


def leaves(inputs: dict) -> list[torch.Tensor]:
    return [*inputs["hidden_KTD"], inputs["head_UD"]]


def run_once(which: str, inputs: dict, chunk: int) -> float:
    """Forward and backward; seconds."""
    for leaf in leaves(inputs):
        leaf.grad = None
    synchronize(inputs["head_UD"].device)
    started = time.perf_counter()
    loss = draft_loss(**inputs, chunk=chunk).loss if which == "cospec" else plain_loss(**inputs)
    loss.backward()
    synchronize(inputs["head_UD"].device)
    return time.perf_counter() - started


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def added_memory(which: str, inputs: dict, chunk: int) -> int:
    """Bytes at the peak of one run above the inputs and the gradients."""
    device = inputs["head_UD"].device
    for leaf in leaves(inputs):
        leaf.grad = None
    gradients = sum(leaf.numel() * leaf.element_size() for leaf in leaves(inputs))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run_once(which, inputs, chunk)
        return torch.cuda.max_memory_allocated(device) - before - gradients
    peak, done = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, resident_bytes())

    before = resident_bytes()
    watcher = threading.Thread(target=watch)
    watcher.start()
    run_once(which, inputs, chunk)
    done.set()
    watcher.join()
    return max(peak, resident_bytes()) - before - gradients


def warm_up(inputs: dict) -> None:
    """The libraries' own buffers for matrix products are nobody's added memory."""
    x, head = inputs["hidden_KTD"][0].detach()[:256], inputs["head_UD"].detach()[:8192]
    torch.zeros_like(x).addmm_(torch.mm(x, head.T), head)


def floor_seconds(args, inputs: dict) -> float:
    """The matrix products that no implementation can leave out, at measured speed."""
    rows = min(args.tokens, 256)
    x, head = inputs["teacher_SD"][:rows], inputs["head_UD"].detach()
    out = torch.empty(rows, head.shape[0], dtype=x.dtype, device=x.device)
    times = []
    for _ in range(5):
        synchronize(x.device)
        started = time.perf_counter()
        torch.mm(x, head.T, out=out)
        synchronize(x.device)
        times.append(time.perf_counter() - started)
    flops_per_second = 2 * rows * args.dim * args.draft_vocab / min(times)
    products = args.vocab + 3 * args.passes * args.draft_vocab
    return 2 * args.tokens * args.dim * products / flops_per_second


def commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    return found.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--draft_vocab", type=int, default=None, help="default: the whole vocabulary")
    parser.add_argument("--tokens", type=int, default=512, help="teacher rows")
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--dim", type=int, default=256, help="hidden size of policy and draft")
    parser.add_argument("--chunk", type=int, default=256, help="as draft.loss_chunk")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--skip_plain", action="store_true", help="sizes at which plain autograd does not fit")
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file too")
    args = parser.parse_args()
    args.draft_vocab = args.draft_vocab or args.vocab
    if not 1 <= args.draft_vocab <= args.vocab:
        parser.error(f"--draft_vocab {args.draft_vocab} must be 1..{args.vocab}")

    inputs = make_inputs(args, torch.device(args.device), getattr(torch, args.dtype))
    kinds = ["cospec"] if args.skip_plain else ["cospec", "plain"]
    warm_up(inputs)
    # Memory first and ours before plain: an allocator that has grown hides what is asked of it.
    memory = {kind: added_memory(kind, inputs, args.chunk) for kind in kinds}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(args.repeats):
        for kind in kinds:
            seconds[kind].append(run_once(kind, inputs, args.chunk))
    median = {kind: statistics.median(seconds[kind]) for kind in kinds}
    floor = floor_seconds(args, inputs)

    print(f"{'':10}{'seconds':>10}{'x floor':>10}{'added MiB':>12}")
    for kind in kinds:
        print(f"{kind:10}{median[kind]:10.3f}{median[kind] / floor:10.2f}{memory[kind] / 2**20:12.1f}")
    print(f"{'floor':10}{floor:10.3f}")
    figures = {
        **{name: getattr(args, name) for name in ("vocab", "draft_vocab", "tokens", "passes", "dim", "chunk", "dtype")},
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "seconds": median,
        "floor_seconds": floor,
        "added_bytes": memory,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(),
    }
    if "plain" in kinds:
        ratios = [ours / plain for ours, plain in zip(seconds["cospec"], seconds["plain"], strict=True)]
        figures["ratio"] = statistics.median(ratios)
        print(f"cospec / plain: {figures['ratio']:.2f} (paired median of {args.repeats})")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    else:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
