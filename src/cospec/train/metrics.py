"""What a run leaves behind and shows: metrics.jsonl, evaluations.jsonl, the console, wandb.

Rank 0 writes; the other ranks hold the same object and it does nothing there. Figures are
mesh-wide before they come here (`reduce_sums`, `Mesh.sum`): nothing is reduced twice.

Fields of a row of metrics.jsonl (null where a figure does not exist or is not finite):
    step, time_s (since the run or its resumption began), policy_version,
    policy_loss, policy_grad_norm, policy_skipped, policy_clip_fraction, policy_truncated_fraction,
    policy_kl_rollout (RL), draft_loss, draft_grad_norm, draft_skipped,
    draft_acceptance_pass_0.., draft_top1_pass_0.., draft_simulated_acceptance_length,
    reward_mean, rollout_acceptance_length, rollout_tokens_per_s,
    rollout_s, policy_s, draft_s, refit_s (seconds of the parts of the step).
"""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from cospec.config import ConfigError, RunConfig
from cospec.durable import naming
from cospec.mesh import Mesh
from cospec.records import StepStats
from cospec.train.console import Progress, short

CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
SET_ASIDE = "before-"
"""Prefix of what an earlier run left behind when a resume starts anew for want of a checkpoint."""


class MetricsLog:
    """The record of one run; a context manager around it.

    Args:
        config: `output_dir`, `train.steps`, `checkpoint.resume` and `wandb` are read.
        rank: of this process in the whole run.

    Raises:
        ConfigError: on every rank, when `output_dir` cannot be written or already holds a run
            that is not to be resumed.
    """

    def __init__(self, config: RunConfig, *, rank: int = 0):
        self.config = config
        self.folder = Path(config.output_dir)
        self.is_writer = rank == 0
        self.console = Console(quiet=not self.is_writer, highlight=False, soft_wrap=True)
        self._started = time.perf_counter()
        self.progress = Progress(self.console)
        self._wandb: Any = None
        _open_on_first_rank(config, self.is_writer)

    def __enter__(self) -> MetricsLog:
        if self.is_writer and self.config.wandb:
            self._wandb = _open_wandb(self.config)
        return self

    def __exit__(self, *exc: object) -> None:
        self.progress.stop()
        if self._wandb is not None:
            self._wandb.finish(exit_code=0 if exc[0] is None else 1)

    def note(self, text: str) -> None:
        """A line for the reader of the console."""
        self.console.print(text, markup=False)

    def step(self, step: int, row: Mapping[str, Any]) -> None:
        """Record step `step` (0-based); see the module's docstring for the fields."""
        if not self.is_writer:
            return
        elapsed = time.perf_counter() - self._started
        full = {"step": step, "time_s": round(elapsed, 3), **_finite(row)}
        _append(self.folder / METRICS, full)
        if self._wandb is not None:
            self._wandb.log({k: v for k, v in full.items() if k != "step"}, step=step)
        for who in ("policy", "draft"):
            if full.get(f"{who}_skipped"):
                self.note(f"step {step}: the {who} was not updated, its loss or gradient norm is not finite")
        parts = {
            "reward": full.get("reward_mean"),
            "acceptance length": full.get("rollout_acceptance_length"),
            "policy loss": full.get("policy_loss"),
            "draft loss": full.get("draft_loss"),
        }
        self.progress.update("step", step, self.config.train.steps, parts)

    def phase(self, name: str, step: int, total: int, **figures: Any) -> None:
        """Show the progress of work before the run proper, a warm start; nothing is recorded."""
        if self.is_writer:
            self.progress.update(name, step, total, {k.replace("_", " "): v for k, v in _finite(figures).items()})

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """Record an evaluation (evaluations.jsonl); `row` names its step."""
        if not self.is_writer:
            return
        full = _finite(row)
        _append(self.folder / EVALUATIONS, full)
        if self._wandb is not None:
            self._wandb.log({f"eval/{k}": v for k, v in full.items() if k != "step"})
        figures = "  ".join(f"{k.replace('_', ' ')} {short(v)}" for k, v in full.items() if k != "step")
        self.note(f"evaluation after {full.get('step', '?')} steps: {figures}")

    def rows(self) -> list[dict[str, Any]]:
        """The steps recorded so far, those before a resume included; on rank 0."""
        return read_rows(self.folder / METRICS)

    def evaluations(self) -> list[dict[str, Any]]:
        """The evaluations recorded so far, those before a resume included; on rank 0."""
        return read_rows(self.folder / EVALUATIONS)

    def resume(self, step: int | None) -> None:
        """Drop what was recorded from `step` on, the next to run; evaluations after `step` steps stay.

        None: the run starts anew, and what it recorded before is set aside.
        """
        if not self.is_writer:
            return
        for name in (METRICS, EVALUATIONS):
            path = self.folder / name
            rows = read_rows(path)
            if step is None:
                if rows:
                    path.replace(self.folder / (SET_ASIDE + name))
                rows = []
            elif name == METRICS:
                rows = [r for r in rows if r["step"] < step]
            else:
                rows = [r for r in rows if r.get("step", 0) <= step]
            _rewrite(path, rows)
        _write_settings(self.config)


def step_row(stats: StepStats) -> dict[str, Any]:
    """The fields of a row that an optimization step knows."""
    row: dict[str, Any] = {
        "policy_loss": stats.policy_loss,
        "policy_grad_norm": stats.policy_grad_norm,
        "policy_skipped": stats.policy_skipped,
        "draft_loss": stats.draft_loss,
        "draft_grad_norm": stats.draft_grad_norm,
    }
    row |= {f"draft_acceptance_pass_{k}": a for k, a in enumerate(stats.draft_acceptance)}
    row |= {f"draft_top1_pass_{k}": a for k, a in enumerate(stats.draft_top1)}
    return row | {
        "draft_simulated_acceptance_length": stats.draft_simulated_acceptance_length,
        "draft_skipped": stats.draft_skipped,
        "policy_s": stats.policy_s,
        "draft_s": stats.draft_s,
    }


def reduce_sums(values: Mapping[str, float], mesh: Mesh) -> dict[str, float]:
    """Sums of local sums over dp x cp, in float64 and in one collective; every rank gets them.

    All ranks must name the same values. Divide after it, never before: means of unequal
    shares do not average to the mean of the whole.
    """
    names = sorted(values)
    vector = torch.tensor([float(values[n]) for n in names], dtype=torch.float64, device=mesh.device)
    return dict(zip(names, mesh.sum(vector).tolist(), strict=True))


def check_run_folder(config: RunConfig) -> None:
    """Raise ConfigError where `output_dir` cannot be used, before any work is done; writes nothing.

    It must be writable (or the folder that it will be made in), and hold no run unless
    `checkpoint.resume` is on.
    """
    folder = Path(config.output_dir)
    try:
        if not config.checkpoint.resume and _holds_run(folder):
            raise ConfigError(
                "output_dir",
                config.output_dir,
                "holds a run already; name another folder, or continue that run with checkpoint.resume",
            )
        existing = next(f for f in (folder, *folder.absolute().parents) if f.exists())
        if not existing.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(existing, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError("output_dir", config.output_dir, f"cannot be written: {error.strerror}") from error


def open_run_folder(config: RunConfig) -> None:
    """Make `output_dir` and write config.json and run.json (command, versions, commit) into it.

    To continue a run changes nothing yet: see `MetricsLog.resume`. Raises as `check_run_folder`.
    """
    check_run_folder(config)
    folder = Path(config.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (METRICS, EVALUATIONS):  # a killed run may have left half a line
            _rewrite(folder / name, read_rows(folder / name))
        if not config.checkpoint.resume:
            _write_settings(config)
    except OSError as error:
        raise ConfigError("output_dir", config.output_dir, f"cannot be written: {error.strerror}") from error


def _holds_run(folder: Path) -> bool:
    metrics = folder / METRICS
    return (metrics.exists() and metrics.stat().st_size > 0) or any((folder / CHECKPOINTS).glob("step-*"))


def _write_settings(config: RunConfig) -> None:
    folder = Path(config.output_dir)
    (folder / "config.json").write_text(json.dumps(asdict(config), indent=2) + "\n")
    (folder / "run.json").write_text(json.dumps(run_info(), indent=2) + "\n")


def run_info() -> dict[str, Any]:
    """What was run, with which versions, where; for run.json."""
    versions = {"python": platform.python_version()}
    for name in ("cospec", "torch", "torchtitan", "triton", "safetensors", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpus": os.cpu_count(),
        "commit": _git_commit(),
        "versions": versions,
    }


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The whole rows of a jsonl file; a half-written last line is left out, no file is no rows."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def _append(path: Path, row: Mapping[str, Any]) -> None:
    with naming(path), open(path, "a") as f:
        f.write(json.dumps(row, allow_nan=False) + "\n")


def _rewrite(path: Path, rows: list[dict[str, Any]]) -> None:
    temporary = path.with_suffix(".writing")
    with naming(path):
        temporary.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
        temporary.replace(path)


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """JSON knows no NaN: such figures become null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def _git_commit() -> str | None:
    """Commit of the checkout that cospec runs from; None for an installed package or without git."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _open_wandb(config: RunConfig) -> Any:
    import wandb

    # Without a key wandb would ask for one, or for a login page: offline makes no network call.
    mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
    return wandb.init(project="cospec", dir=config.output_dir, config=asdict(config), mode=mode)


def _open_on_first_rank(config: RunConfig, is_first: bool) -> None:
    """`open_run_folder` on rank 0; its refusal is raised on every rank, so that none waits for a dead one."""
    error: ConfigError | None = None
    if is_first:
        try:
            open_run_folder(config)
        except ConfigError as refusal:
            error = refusal
    if dist.is_initialized():
        refused = [error is not None]
        dist.broadcast_object_list(refused)
        if refused[0] and error is None:
            error = ConfigError("output_dir", config.output_dir, "rank 0 cannot use it")
    if error is not None:
        raise error
