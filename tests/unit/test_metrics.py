"""The record of a run: valid JSON, never overwritten, cut to the step on resume, readable without a terminal."""

import dataclasses
import json
import os
import time

import pytest

from cospec.config import CheckpointConfig, ConfigError, RunConfig, TrainConfig
from cospec.mesh import Mesh
from cospec.records import StepStats
from cospec.train import metrics
from cospec.train.metrics import MetricsLog, read_rows, reduce_sums, step_row

STATS = StepStats(
    policy_loss=0.5,
    policy_grad_norm=float("inf"),
    policy_s=1.0,
    draft_loss=float("nan"),
    draft_acceptance=(0.9, 0.7),
    draft_top1=(0.8, 0.6),
)


def _config(folder, *, resume=False, steps=4, wandb=False):
    return RunConfig(
        output_dir=str(folder),
        train=TrainConfig(steps=steps),
        checkpoint=CheckpointConfig(resume=resume),
        wandb=wandb,
    )


def _no_constants(text):
    raise AssertionError(f"{text} is not JSON")


def test_a_row_holds_the_documented_fields_and_is_strict_json(tmp_path):
    with MetricsLog(_config(tmp_path)) as log:
        log.step(0, step_row(STATS) | {"reward_mean": 0.25, "policy_version": 0})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line, parse_constant=_no_constants)
    assert row["step"] == 0
    assert row["policy_loss"] == 0.5
    assert row["policy_grad_norm"] is None
    assert row["draft_loss"] is None
    assert [row[f"draft_acceptance_pass_{k}"] for k in (0, 1)] == [0.9, 0.7]
    assert [row[f"draft_top1_pass_{k}"] for k in (0, 1)] == [0.8, 0.6]
    for name in ("draft_grad_norm", "draft_simulated_acceptance_length", "policy_s", "draft_s", "reward_mean"):
        assert name in row
    for name in row:
        base = name.rsplit("_pass_")[0]
        assert base in metrics.__doc__, f"{name} is not documented"


def test_run_info_and_config_are_written(tmp_path):
    with MetricsLog(_config(tmp_path)):
        pass
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads(
        json.dumps(dataclasses.asdict(_config(tmp_path)))
    )
    info = json.loads((tmp_path / "run.json").read_text())
    assert info["versions"]["torch"]
    assert info["command"]


def test_a_folder_that_holds_a_run_is_refused_and_left_alone(tmp_path):
    with MetricsLog(_config(tmp_path)) as log:
        log.step(0, {"policy_loss": 1.0})
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"output_dir='.*holds a run already.*checkpoint.resume"):
        MetricsLog(_config(tmp_path))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_resume_drops_half_a_line_and_everything_from_the_step_on(tmp_path):
    with MetricsLog(_config(tmp_path)) as log:
        for step in range(3):
            log.step(step, {"policy_loss": float(step)})
        log.evaluation({"step": 0, "reward_mean": 0.1})
        log.evaluation({"step": 2, "reward_mean": 0.2})
        log.evaluation({"step": 3, "reward_mean": 0.3})
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"step": 3, "poli')
    with MetricsLog(_config(tmp_path, resume=True)) as log:
        assert [r["step"] for r in log.rows()] == [0, 1, 2]
        log.resume(2)
        log.step(2, {"policy_loss": 20.0})
    assert [(r["step"], r["policy_loss"]) for r in read_rows(tmp_path / "metrics.jsonl")] == [(0, 0), (1, 1), (2, 20)]
    assert [r["step"] for r in read_rows(tmp_path / "evaluations.jsonl")] == [0, 2]


def test_an_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output_dir='.*file/run'.*cannot be written: Not a directory"):
        MetricsLog(_config(tmp_path / "file" / "run"))


def test_without_a_terminal_plain_lines_appear_at_intervals_and_at_the_end(tmp_path, capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    with MetricsLog(_config(tmp_path, steps=20)) as log:
        for step in range(20):
            clock[0] += 1.0
            log.step(step, {"reward_mean": 0.5, "rollout_acceptance_length": 2.0})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1/20", "6/20", "11/20", "16/20", "20/20"]
    assert "reward 0.500  acceptance length 2.000  1.00 s/step  0:00:14 left" in lines[1]


def test_a_phase_is_shown_and_not_recorded(tmp_path, capsys):
    with MetricsLog(_config(tmp_path)) as log:
        for step in range(3):
            log.phase("warm start", step, 3, policy_loss=0.5, length=float("nan"))
        log.step(0, {"policy_loss": 1.0})
        assert [r["step"] for r in log.rows()] == [0]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["warm start 1/3", "warm start 3/3", "step 1/4"]
    assert "policy loss 0.500" in lines[0]


def test_a_terminal_gets_a_bar(tmp_path):
    import io

    from rich.console import Console

    with MetricsLog(_config(tmp_path)) as log:
        log.console = log.progress.console = Console(file=io.StringIO(), force_terminal=True, width=150)
        log.step(0, {"policy_loss": 1.0, "reward_mean": 0.25})
        log.note("between")
        log.step(1, {"policy_loss": 1.0, "reward_mean": 0.5})
    text = log.console.file.getvalue()
    assert "2/4" in text
    assert "reward 0.500" in text
    assert "between" in text


def test_other_ranks_write_and_say_nothing(tmp_path, capsys):
    with MetricsLog(_config(tmp_path / "run"), rank=1) as log:
        log.note("hello")
        log.step(0, {"policy_loss": 1.0})
        log.evaluation({"step": 0})
        log.resume(0)
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_wandb_without_a_key_stays_offline(tmp_path, monkeypatch):
    """Any connection attempt fails the test."""
    import socket

    asked = []

    class Run:
        def log(self, *args, **kwargs):
            asked.append((args, kwargs))

        def finish(self, exit_code):
            asked.append(exit_code)

    def init(**kwargs):
        asked.append(kwargs["mode"])
        return Run()

    def refuse(*args):
        raise AssertionError("a network call")

    import wandb

    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(wandb, "init", init)
    with MetricsLog(_config(tmp_path, wandb=True)) as log:
        log.step(0, {"policy_loss": 1.0})
    assert asked[0] == "offline"
    assert asked[-1] == 0
    assert asked[1][1] == {"step": 0}


def test_sums_of_one_process_are_its_own():
    import torch

    assert reduce_sums({"tokens": 3, "reward": 0.5}, Mesh(torch.device("cpu"))) == {"tokens": 3.0, "reward": 0.5}


def test_no_step_row_of_a_fresh_process_needs_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    assert metrics.run_info()["commit"] is None
