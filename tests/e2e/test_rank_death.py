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
RANKS = 4
FLAGS = """
    --mesh.pp 2 --mesh.cp 2 --pipeline.microbatches 2 --checkpoint.every 1 --checkpoint.keep 3
    --policy.num_hidden_layers 4 --policy.hidden_size 32 --policy.intermediate_size 64 --policy.num_attention_heads 2
    --policy.num_key_value_heads 1 --policy.head_dim 16 --draft.num_passes 2 --draft_optim.name adamw
    --warm_start.policy_steps 2 --warm_start.batch_documents 4 --warm_start.draft_steps 2
    --warm_start.draft_batch_documents 4 --rl.prompts_per_step 2 --rl.samples_per_prompt 4
    --rollout.num_draft_tokens 2 --rollout.max_new_tokens 24 --train.row_tokens 256 --train.device cpu
    --train.comm_timeout_s 60 --eval.prompts 4 --eval.speed_batch 2
""".split()  # noqa: SIM905


def start(folder, log, *, steps, restarts=0):
    flags = [*FLAGS, "--output_dir", str(folder), "--train.steps", str(steps)]
    options = ["--nproc_per_node", str(RANKS), "--max-restarts", str(restarts), "--rdzv_backend", "c10d"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--rdzv_endpoint", "localhost:0"]
    command += [str(RECIPES / "cotrain_rl.py"), *flags, *(["--checkpoint.resume"] if restarts else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


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
def test_a_random_rank_is_killed_again_and_again(tmp_path, kills):
    """Known failure 37. The run ends as an undisturbed one on the same mesh, to the bit."""
    steps = 2 * kills
    with open(tmp_path / "alone.log", "w") as log:
        assert start(tmp_path / "alone", log, steps=steps).wait(900) == 0, (tmp_path / "alone.log").read_text()
    rng, folder, log_path = random.Random(0), tmp_path / "killed", tmp_path / "killed.log"
    ended_in = []
    with open(log_path, "w") as log:
        torchrun = start(folder, log, steps=steps, restarts=kills)
        try:
            for kill in range(kills):
                begun = re.compile(r"^policy .* parameters", re.MULTILINE)
                wait_for(lambda n=kill, begun=begun: len(begun.findall(log_path.read_text())) > n, torchrun)
                if kill % 2:  # every other time it gets somewhere first
                    step = newest(folder)
                    wait_for(lambda step=step: newest(folder) > step, torchrun)
                time.sleep(rng.uniform(0.1, 2.0))
                pids, victim, before = workers(torchrun), rng.randrange(RANKS), newest(folder)
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
