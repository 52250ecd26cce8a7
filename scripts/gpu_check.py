"""Everything that needs a GPU, in one command and one table.

    python scripts/gpu_check.py              all checks (a few minutes)
    python scripts/gpu_check.py --device cpu rehearse the op checks without a GPU

Without a GPU it says what it could not check and exits 0. Where torchtitan is not
installed only cospec.ops is checked. Exit code 1 when a check failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from cospec.layout import PackedLayout  # noqa: E402
from cospec.ops import acceptance, losses, reference, ring  # noqa: E402

LENGTHS = (300, 1, 129, 64, 530)
RING_RANKS = 4
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    name = parser.parse_args().device
    checks = dict(checks_of(name))
    if name == "cuda" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no CUDA device. Not checked:")
        print("\n".join(f"  {title}" for title in checks))
        return
    device = torch.device(name)
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name() if name == 'cuda' else 'CPU'}")
    failed = 0
    for title, check in checks.items():
        started = time.perf_counter()
        try:
            verdict, detail = "ok", check(device)
        except Skip as reason:
            verdict, detail = "not checked", str(reason)
        except Exception as error:
            failed += 1
            verdict, detail = "FAILED", f"{type(error).__name__}: {error}"
        print(f"{verdict:11}  {title:54}  {time.perf_counter() - started:6.1f} s  {detail}", flush=True)
    print(f"{len(checks)} checks, {failed} failed")
    sys.exit(1 if failed else 0)


class Skip(Exception):
    """A check that this machine cannot do."""


def checks_of(device: str) -> Iterator[tuple[str, Callable[[torch.device], str]]]:
    """Every check by title; each returns its figures, or raises."""
    for dtype in TOLERANCE:
        for depth in (0, 3):
            title = f"trunk and {depth} branches against the oracle, {_name(dtype)}"
            yield title, lambda d, dtype=dtype, depth=depth: check_attention(d, dtype, depth)
    yield f"ring and gather of {RING_RANKS} processes against the oracle", check_ring
    for dtype in TOLERANCE:
        yield f"draft loss against the oracle, {_name(dtype)}", lambda d, dtype=dtype: check_draft_loss(d, dtype)
        yield f"label log-probabilities against the oracle, {_name(dtype)}", lambda d, t=dtype: check_logprobs(d, t)
    yield "lossless rule: same decisions as on the CPU", check_lossless
    yield "vLLM in its own process: refits there and back", check_vllm
    if device == "cuda":
        yield "the same on another GPU", lambda d: check_vllm(d, other_gpu=True)
    if device == "cuda":
        yield "time: attention, forward and backward", time_attention
        yield "time and memory: draft loss", time_draft_loss
        yield "pytest -m gpu", run_gpu_tests
        yield "recipes/smoke.py on CUDA", run_smoke


def check_attention(device: torch.device, dtype: torch.dtype, depth: int) -> str:
    """Output and every gradient, packed documents, grouped heads."""
    layout = PackedLayout.from_lengths(LENGTHS)
    got = _attend(layout, 0, None, "ring", device, dtype, depth)
    return _within(_attention_error([layout.unshard([x]) for x in got], dtype, depth), TOLERANCE[dtype])


def check_ring(device: torch.device, depth: int = 2) -> str:
    """The same over several processes: NCCL where each has a GPU, else all on one, through gloo."""
    layout = PackedLayout.from_lengths(LENGTHS, RING_RANKS)
    backend = "nccl" if device.type == "cuda" and torch.cuda.device_count() >= RING_RANKS else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_ring_rank, (folder, backend, device.type, depth), nprocs=RING_RANKS, start_method="spawn")
        ranks = [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in range(RING_RANKS)]
    verdicts = [backend]
    for name in ranks[0]:
        dtype = getattr(torch, name.split()[1])
        whole = [layout.unshard(shards) for shards in zip(*(rank[name] for rank in ranks), strict=True)]
        verdicts.append(f"{name} {_within(_attention_error(whole, dtype, depth), TOLERANCE[dtype])}")
    return "; ".join(verdicts)


def _ring_rank(rank: int, folder: str, backend: str, device_type: str, depth: int) -> None:
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=RING_RANKS)
    layout = PackedLayout.from_lengths(LENGTHS, RING_RANKS)
    results = {}
    for dtype in TOLERANCE:
        for mode in ("ring", "gather"):
            shards = _attend(layout, rank, dist.group.WORLD, mode, device, dtype, depth)
            results[f"{mode} {_name(dtype)}"] = [x.cpu() for x in shards]
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _attention_inputs(dtype: torch.dtype, depth: int) -> list[torch.Tensor]:
    """q, k, v, branch keys, branch values and the gradient of the output, unpadded rows on the CPU."""
    gen = torch.Generator().manual_seed(0)
    heads = [4, 2, 2, *[2] * (2 * depth), 4]
    return [torch.randn(sum(LENGTHS), n, 64, generator=gen).to(dtype) for n in heads]


def _attend(
    layout: PackedLayout, rank: int, group, mode: str, device: torch.device, dtype: torch.dtype, depth: int
) -> list[torch.Tensor]:
    """Output and gradients of one rank's rows."""
    *leaves, grad = [layout.shard(x, rank).to(device) for x in _attention_inputs(dtype, depth)]
    for x in leaves:
        x.requires_grad_()
    trunk = ring.open_trunk(leaves[1], leaves[2], layout, cp_group=group, mode=mode)
    out = ring.trunk_branch_attention(leaves[0], trunk, leaves[3 : 3 + depth], leaves[3 + depth :])
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _attention_error(got: list[torch.Tensor], dtype: torch.dtype, depth: int) -> float:
    *exact, grad = [x.double() for x in _attention_inputs(dtype, depth)]
    for x in exact:
        x.requires_grad_()
    out, _ = reference.attention(exact[0], exact[1], exact[2], LENGTHS, exact[3 : 3 + depth], exact[3 + depth :])
    want = [out, *torch.autograd.grad(out, exact, grad)]
    return max(_error(a, b) for a, b in zip(got, want, strict=True))


def check_draft_loss(device: torch.device, dtype: torch.dtype) -> str:
    """Loss, metrics and gradients of three passes over a draft vocabulary smaller than the policy's."""
    case = _loss_case(device, dtype, passes=3, rows=48, width=64, vocab=512, draft_vocab=200)
    got = losses.draft_loss(**case, chunk=16)
    leaves = [*case["hidden_KTD"], case["head_UD"]]
    grads = torch.autograd.grad(got.loss, leaves)

    exact = {name: _exact(value) for name, value in case.items()}
    want = reference.draft_loss(**exact)
    want_grads = torch.autograd.grad(want["loss"], [*exact["hidden_KTD"], exact["head_UD"]])
    pairs = [(got.loss, want["loss"]), (got.alpha_sum, want["alpha_sum"]), *zip(grads, want_grads, strict=True)]
    return _within(max(_error(a, b) for a, b in pairs), TOLERANCE[dtype])


def check_logprobs(device: torch.device, dtype: torch.dtype) -> str:
    gen = torch.Generator().manual_seed(0)
    hidden = torch.randn(100, 64, generator=gen).to(device, dtype).requires_grad_()
    head = (torch.randn(1000, 64, generator=gen) / 8).to(device, dtype).requires_grad_()
    labels = torch.randint(1000, (100,), generator=gen).to(device)
    got = losses.token_logprobs(hidden, head, labels, temperature=0.7, chunk=32)
    grads = torch.autograd.grad(got.sum(), (hidden, head))
    exact = [_exact(hidden), _exact(head)]
    want = reference.token_logprobs(exact[0], exact[1], labels.cpu(), temperature=0.7)
    want_grads = torch.autograd.grad(want.sum(), exact)
    return _within(max(_error(a, b) for a, b in zip((got, *grads), (want, *want_grads), strict=True)), TOLERANCE[dtype])


def check_lossless(device: torch.device) -> str:
    gen = torch.Generator().manual_seed(0)
    policy, draft = (torch.randn(512, 300, generator=gen).softmax(-1) for _ in range(2))
    uniform = [torch.rand(512, generator=gen) for _ in range(3)]
    proposed = acceptance.sample(draft, uniform[0])
    inputs = (policy, draft, proposed, uniform[1], uniform[2])
    on_cpu = acceptance.accept_or_resample(*inputs)
    on_device = acceptance.accept_or_resample(*(x.to(device) for x in inputs))
    differ = sum(int((a != b.cpu()).sum()) for a, b in zip(on_cpu, on_device, strict=True))
    if differ:
        raise AssertionError(f"{differ} of 1024 decisions differ")
    return f"accepted {on_cpu[0].float().mean():.0%}"


def time_attention(device: torch.device) -> str:
    """A 16k row of 2k documents, 32 query and 8 key heads of 128, bfloat16, beside flash attention of the same."""
    docs, length, heads, key_heads, width = 8, 2048, 32, 8, 128
    layout = PackedLayout.from_lengths([length] * docs)
    flops = 3.5 * 4 * docs * length**2 / 2 * heads * width  # forward 2 products, backward 5; half is masked

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, width, device=device, dtype=torch.bfloat16, requires_grad=True)

    def ours(depth: int) -> float:
        rows = layout.num_rows
        q, k, v = leaf(rows, heads), leaf(rows, key_heads), leaf(rows, key_heads)
        keys, values = ([leaf(rows, key_heads) for _ in range(depth)] for _ in range(2))
        grad = torch.randn_like(q)

        def once() -> None:
            ring.trunk_branch_attention(q, ring.open_trunk(k, v, layout), keys, values).backward(grad)

        return _milliseconds(once)

    def flash() -> float:
        q, k, v = leaf(docs, heads, length), leaf(docs, key_heads, length), leaf(docs, key_heads, length)
        grad = torch.randn_like(q)
        return _milliseconds(
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).backward(grad)
        )

    times = {"flash": flash(), "ours": ours(0), "with 4 branches": ours(4)}
    return ", ".join(f"{name} {ms:.2f} ms = {flops / ms / 1e9:.0f} TFLOP/s" for name, ms in times.items())


def time_draft_loss(device: torch.device) -> str:
    """4 passes over 8192 rows, width 2048, a vocabulary of 151936 and 32000 of it for the draft."""
    case = _loss_case(device, torch.bfloat16, passes=4, rows=8192, width=2048, vocab=151936, draft_vocab=32000)

    def once() -> None:
        losses.draft_loss(**case, chunk=1024).loss.backward()

    took = _milliseconds(once, repeats=3)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    once()
    return f"{took:.0f} ms, {(torch.cuda.max_memory_allocated() - before) / 2**20:.0f} MiB above inputs and gradients"


def check_vllm(device: torch.device, *, other_gpu: bool = False) -> str:
    """Weights by CUDA IPC, or NCCL to another GPU (files on a CPU): policy A, B, A and a draft with each, greedy."""
    if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("torchtitan") is None:
        raise Skip("vllm or torchtitan is not installed")
    if other_gpu and torch.cuda.device_count() < 2:
        raise Skip("there is one GPU")
    from cospec.config import DraftConfig, PolicyConfig
    from cospec.draft.attach import attach_draft
    from cospec.export.eagle3 import save_draft
    from cospec.policy.build import build_policy, full_state
    from cospec.policy.weights import save_hf
    from cospec.records import SamplingParams
    from cospec.rollout.native import NativeEngine
    from cospec.rollout.vllm_process import VLLMProcess

    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    shape = PolicyConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    policies = [build_policy(shape, seed=seed, device=device) for seed in (1, 2)]
    drafts = [attach_draft(policy, DraftConfig(), seed=3) for policy in policies]
    with torch.no_grad():
        for parameter in (parameter for draft in drafts for parameter in draft.parameters()):
            parameter.add_(0.02 * torch.randn_like(parameter))  # an export refuses initial values
    prompts, params = [[i, i + 1, i + 2] for i in range(32)], SamplingParams(max_new_tokens=24, temperature=0)
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    here = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
    there = torch.device("cuda", (torch.cuda.current_device() + 1) % torch.cuda.device_count()) if other_gpu else here
    with tempfile.TemporaryDirectory() as folder:
        save_hf(policies[0].config, full_state(policies[0]), f"{folder}/policy")
        save_draft(drafts[0], f"{folder}/draft", family="vllm")
        places = (f"{folder}/policy", policies[0].config, f"{folder}/draft", drafts[0].config)
        engine = VLLMProcess(*places, device=here, engine_device=there, max_len=64, num_draft_tokens=3, dtype=dtype)
    try:
        found, seconds = [engine.generate(prompts, params)], []
        for version, (policy, draft) in enumerate(zip(policies[::-1], drafts[::-1], strict=True), 1):
            started = time.perf_counter()
            engine.refit(full_state(policy), full_state(draft), version)
            seconds.append(time.perf_counter() - started)
            found.append(engine.generate(prompts, params))
    finally:
        engine.close()
    tokens = [[r.token_ids for r in rollouts] for rollouts in found]
    if tokens[0] != tokens[2]:
        raise AssertionError("policy A, B, A: the output of A did not come back")
    native = NativeEngine(policies[1], max_len=64).generate(prompts, params)
    gap = max(abs(a.logp[0] - b.logp[0]) for a, b in zip(found[1], native, strict=True))
    if not gap < 0.1:
        raise AssertionError(f"log-probabilities of B differ from the native engine's by {gap:.2g}")
    return f"{type(engine._transfer).__name__}, refit {min(seconds):.3f} s, {_within(gap, 0.1)}"


def run_gpu_tests(device: torch.device) -> str:
    if importlib.util.find_spec("pytest") is None or importlib.util.find_spec("hypothesis") is None:
        raise Skip("pytest or hypothesis is not installed")
    code, output = _run([sys.executable, "-m", "pytest", "-q", "-m", "gpu", *_gpu_test_paths()])
    lines = output.strip().splitlines()
    if code == 5:
        raise Skip("no test is marked gpu")
    if code:
        raise AssertionError("\n" + "\n".join(lines[-40:]))
    return lines[-1]


def run_smoke(device: torch.device) -> str:
    if importlib.util.find_spec("torchtitan") is None:
        raise Skip("torchtitan is not installed")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "recipes/smoke.py", "--train.device", "cuda", "--output_dir", f"{folder}/run"]
        code, output = _run(command)
        if code:
            raise AssertionError("\n" + "\n".join(output.strip().splitlines()[-40:]))
        return f"{len((Path(folder) / 'run' / 'metrics.jsonl').read_text().splitlines())} steps"


def _gpu_test_paths() -> list[str]:
    """All tests, or those of cospec.ops alone where torchtitan is missing (collection would fail)."""
    if importlib.util.find_spec("torchtitan") is not None:
        return ["tests"]
    return ["tests/numerics/test_kernels.py", "tests/numerics/test_losses.py", "tests/numerics/test_branch.py"]


def _run(command: list[str]) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    return done.returncode, done.stdout + done.stderr


def _loss_case(device: torch.device, dtype: torch.dtype, *, passes, rows, width, vocab, draft_vocab) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=gen) * scale).to(device, dtype)

    pairs = torch.stack([torch.arange(rows) - k for k in range(passes)])  # pass k's row of teacher row s is s - k
    return {
        "hidden_KTD": [normal(rows, width).requires_grad_() for _ in range(passes)],
        "head_UD": normal(draft_vocab, width, scale=width**-0.5).requires_grad_(),
        "teacher_SD": normal(rows, width),
        "teacher_head_VD": normal(vocab, width, scale=width**-0.5),
        "rows_KS": pairs.clamp(min=-1).to(device),
        "coef_K": torch.tensor([0.8**k for k in range(passes)], device=device),
        "vocab_map_U": torch.randperm(vocab, generator=gen)[:draft_vocab].sort().values.to(device),
    }


def _exact(value: Any) -> Any:
    """The same numbers in float64 on the CPU, as fresh leaves."""
    if isinstance(value, list):
        return [_exact(v) for v in value]
    value = value.detach().cpu()
    return value.double().requires_grad_() if value.is_floating_point() else value


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest error relative to max(1, |reference|)."""
    want = want.detach()
    error = (got.detach().double().cpu() - want).abs() / want.abs().clamp(min=1)
    return float(error.max()) if torch.isfinite(error).all() else float("inf")


def _within(error: float, tolerance: float) -> str:
    if not error <= tolerance:
        raise AssertionError(f"error {error:.1e} is above {tolerance:.0e}")
    return f"error {error:.1e} (tolerance {tolerance:.0e})"


def _milliseconds(once: Callable[[], None], repeats: int = 7) -> float:
    """Median of warm runs."""
    once()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        once()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
