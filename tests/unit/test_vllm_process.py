"""The life of vLLM's own process, without vLLM in it (with it: tests/vllm)."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from cospec.rollout.engine import EngineError
from cospec.rollout.vllm_process import VLLMProcess, child_environment
from support.toy_lm import tiny_policy

PARENT = """
import os, subprocess, sys, tempfile, time
from pathlib import Path
import torch
from cospec.rollout.vllm_process import _start

folder = tempfile.mkdtemp(dir=sys.argv[1])
process, connection = _start(folder, Path(folder) / "log", torch.device("cpu"))
connection.send(("stats", (), {}))
error, text = connection.recv()
# A process that outlives this one holds its end of the connection: no end of file tells the engine.
holder = subprocess.Popen(["sleep", "60"], pass_fds=[connection.fileno()])
print(process.pid, holder.pid, error, flush=True)
time.sleep(60)
"""


def test_a_killed_trainer_leaves_nothing_behind(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    child, holder, error = parent.stdout.readline().split()
    try:
        assert error == "EngineError"  # it answers: nothing is open yet
        assert alive(child)
        assert len(list(tmp_path.iterdir())) == 1
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and (alive(child) or list(tmp_path.iterdir())):
            time.sleep(0.05)
        assert not alive(child)
        assert list(tmp_path.iterdir()) == []
    finally:
        os.kill(int(holder), signal.SIGKILL)
        parent.stdout.close()


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_process_that_ends_is_an_error_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    call = VLLMProcess._call

    def kill_first(self, method, *args, **kwargs):
        os.kill(self.pid, signal.SIGKILL)
        return call(self, method, *args, **kwargs)

    monkeypatch.setattr(VLLMProcess, "_call", kill_first)
    with pytest.raises(EngineError, match=r"engine died .process \d+: killed by SIGKILL.; the trained weights"):
        VLLMProcess("policy", tiny_policy().config, device=torch.device("cpu"), max_len=64)
    assert list(tmp_path.iterdir()) == []


def test_the_process_does_not_take_part_in_the_job(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "ROLE_RANK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    own = child_environment(torch.device("cpu"))
    assert not [name for name in own if name.endswith("RANK") or name.startswith(("MASTER", "TORCHELASTIC"))]
    assert "WORLD_SIZE" not in own
    assert own["OMP_NUM_THREADS"] == "1"
    assert Path(own["PYTHONPATH"].split(os.pathsep)[0], "cospec").is_dir()


@pytest.mark.parametrize("visible, expected", [(None, "2"), ("4, 5,6", "6"), ("GPU-a,GPU-b,GPU-c", "GPU-c")])
def test_the_process_sees_the_engines_gpu_only(monkeypatch, visible, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert child_environment(torch.device("cuda", 2))["CUDA_VISIBLE_DEVICES"] == expected


def test_settings_are_checked_before_a_process_starts():
    with pytest.raises(ValueError, match="max_len=1000: must be in 2..128"):
        VLLMProcess("policy", tiny_policy().config, device=torch.device("cpu"), max_len=1000)
