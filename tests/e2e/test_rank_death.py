"""kill -9 of a rank of a run under torchrun: one message, all end, the restart goes on by itself."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.tiny_runs import record

RECIPES = Path(__file__).parents[2] / "recipes"
FLAGS = """
    --pipeline.microbatches 2 --checkpoint.every 1 --checkpoint.keep 3
    --policy.num_hidden_layers 4 --policy.hidden_size 32 --policy.intermediate_size 64 --policy.num_attention_heads 2
    --policy.num_key_value_heads 1 --policy.head_dim 16 --draft.num_passes 2 --draft_optim.name adamw
    --warm_start.policy_steps 2 --warm_start.batch_documents 4 --warm_start.draft_steps 2
    --warm_start.draft_batch_documents 4 --rl.prompts_per_step 2 --rl.samples_per_prompt 4
    --rollout.num_draft_tokens 2 --rollout.max_new_tokens 24 --train.row_tokens 256 --train.device cpu
    --eval.prompts 4 --eval.speed_batch 2
""".split()  # noqa: SIM905


def start(folder, log, *, mesh, steps, restarts=0, timeout_s=60):
    """mesh: sizes by axis, and `serve`."""
    axes = [text for axis, size in mesh.items() for text in (f"--mesh.{axis}", str(size))]
    flags = [*FLAGS, *axes, "--output_dir", str(folder), "--train.steps", str(steps)]
    flags += ["--train.comm_timeout_s", str(timeout_s)]
    options = [
        "--nproc_per_node",
        str(number_of_ranks(mesh)),
        "--max-restarts",
        str(restarts),
        "--rdzv_backend",
        "c10d",
    ]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--rdzv_endpoint", "localhost:0"]
    command += [str(RECIPES / "cotrain_rl.py"), *flags, *(["--checkpoint.resume"] if restarts else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def number_of_ranks(mesh):
    return mesh.get("pp", 1) * mesh.get("dp", 1) * mesh.get("cp", 1) + mesh.get("serve", 0)


def workers(torchrun):
    """Process ids of the ranks, in rank order."""
    return sorted(int(p) for p in Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split())


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, torchrun, seconds=180):
    deadline = time.monotonic() + seconds
    while not condition():
        assert torchrun.poll() is None, "torchrun has ended"
        assert time.monotonic() < deadline, "nothing happened for too long"
        time.sleep(0.02)


def newest(folder):
    return max((int(p.name[5:]) for p in (folder / "checkpoints").glob("step-*")), default=0)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [20])
@pytest.mark.parametrize("mesh", [{"pp": 2, "cp": 2}, {"pp": 2, "serve": 2}], ids=["pp2-cp2", "pp2+2"])
def test_a_random_rank_is_killed_again_and_again(tmp_path, mesh, kills):
    """Known failure 37. The run ends as an undisturbed one on the same mesh, to the bit."""
    steps, size = 2 * kills, number_of_ranks(mesh)
    with open(tmp_path / "alone.log", "w") as log:
        assert start(tmp_path / "alone", log, mesh=mesh, steps=steps).wait(900) == 0, (
            tmp_path / "alone.log"
        ).read_text()
    rng, folder, log_path = random.Random(0), tmp_path / "killed", tmp_path / "killed.log"
    ended_in = []
    with open(log_path, "w") as log:
        torchrun = start(folder, log, mesh=mesh, steps=steps, restarts=kills)
        try:
            for kill in range(kills):
                begun = re.compile(r"^policy .* parameters", re.MULTILINE)
                wait_for(lambda n=kill, begun=begun: len(begun.findall(log_path.read_text())) > n, torchrun)
                if kill % 2:  # every other time it gets somewhere first
                    step = newest(folder)
                    wait_for(lambda step=step: newest(folder) > step, torchrun)
                time.sleep(rng.uniform(0.1, 2.0))
                pids, victim, before = workers(torchrun), rng.randrange(size), newest(folder)
                os.kill(pids[victim], signal.SIGKILL)
                killed_at = time.monotonic()
                wait_for(lambda pids=pids: not any(alive(pid) for pid in pids), torchrun, seconds=60)
                ended_in.append(time.monotonic() - killed_at)
                assert newest(folder) >= before
                messages = re.findall(r"^error: .*", log_path.read_text(), re.MULTILINE)
                assert len(messages) == kill + 1, messages
                assert re.match(rf"error: rank {victim} \(.*\) is gone or does not answer, last seen in", messages[-1])
                assert f"torchrun starts it again (restart {kill + 1} of {kills}), it goes on from" in messages[-1]
            assert torchrun.wait(900) == 0, log_path.read_text()
        finally:
            torchrun.terminate()  # it ends its ranks; after a kill they would run on
            torchrun.wait(60)
    assert record(folder) == record(tmp_path / "alone")
    assert not any((folder / "checkpoints").glob(".writing-*"))
    print(f"killed {kills} times, all ranks gone after {max(ended_in):.1f} s at most")


TRAINS, SERVES = (0, "trains, pp 0, dp 0, cp 0"), (1, "serves")


@pytest.mark.parametrize(
    "victim, role, how",
    [
        (*SERVES, signal.SIGKILL),
        pytest.param(*TRAINS, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(*SERVES, signal.SIGSTOP, marks=pytest.mark.slow),  # nothing closes: the time-out must end it
        pytest.param(*TRAINS, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_a_rank_of_a_run_with_a_serving_rank_is_lost(tmp_path, victim, role, how):
    """Known failure 37. One message with the rank's role, and nobody is left."""
    log_path = tmp_path / "log"
    with open(log_path, "w") as log:
        torchrun = start(tmp_path / "run", log, mesh={"serve": 1}, steps=1000, timeout_s=10)
        try:
            wait_for(lambda: newest(tmp_path / "run") > 5, torchrun)  # past the warm start
            pids = workers(torchrun)
            os.kill(pids[victim], how)
            assert torchrun.wait(90) == 1  # torchrun gives a frozen process 30 seconds
        finally:
            torchrun.terminate()
            torchrun.wait(60)
    assert not any(alive(pid) for pid in pids)
    messages = re.findall(r"^error: .*", log_path.read_text(), re.MULTILINE)
    assert len(messages) == 1, messages
    assert re.match(rf"error: rank {victim} \({role}; pid {pids[victim]} on .*\) is gone or does not", messages[0])
    assert "To resume, run the same command with --checkpoint.resume: it goes on from" in messages[0]


def test_bad_input_that_the_training_ranks_find(tmp_path):
    """One message, exit code 2: the rank that serves does not mistake it for a death."""
    log_path = tmp_path / "log"
    with open(log_path, "w") as log:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
        assert start(tmp_path / "run", log, mesh={"serve": 1}, steps=2).wait(60) == 1
    text = log_path.read_text()
    messages = re.findall(r"^error: .*", text, re.MULTILINE)
    assert len(messages) == 1, text
    assert messages[0].startswith("error: output_dir="), messages
    assert re.search(r"exitcode +: 2 ", text), text  # torchrun may end the last one itself
