"""What is said when a rank dies, and how ranks meet again after torchrun's restart."""

import os
import shutil
import signal
import threading
from dataclasses import replace

import pytest
import torch.distributed as dist

from cospec.mesh import agree_on_name
from cospec.train import checkpoint, faults, loop
from cospec.train.cli import main
from cospec.train.loop import run_sft
from support.tiny_runs import tiny_sft


class Watch(faults._Watch):
    """One of four ranks, on a store without processes."""

    def __init__(self, config, store, rank):
        self.config, self.store, self.rank, self.size = config, store, rank, 4
        self._lock, self._ending = threading.Lock(), False
        store.set(f"cospec/where/{rank}", f"pp {rank}")
        store.set(f"{faults.DOING}/{rank}", f"step {10 + rank}")


LOST = "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:1"
OWN = "ValueError: out of range"
TOLD = "told to end by SIGTERM"
DIVERGED = "Diverged: the draft's loss was not finite"


def say(tmp_path, ends, monkeypatch, **checkpoint):
    """What each rank of `ends` (text by rank, in order of time) says; the ranks not in it are silent."""
    monkeypatch.setattr(faults, "GRACE_S", 0.3)
    config = tiny_sft(tmp_path)
    config = replace(config, checkpoint=replace(config.checkpoint, **checkpoint))
    store = dist.HashStore()
    watches = [Watch(config, store, rank) for rank in range(4)]
    said = {}

    def end(rank, text):
        told = text == TOLD
        said[rank] = watches[rank].end(text, lost_peer=text not in (OWN, DIVERGED), told=told)

    threads = [threading.Thread(target=end, args=item) for item in ends.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    messages = [text for text in said.values() if text is not None]
    assert len(messages) == 1  # one speaks for all
    return messages[0]


def test_a_killed_rank_is_named(tmp_path, monkeypatch):
    """Known failure 37: which rank, what it was doing, how to resume."""
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    message = say(tmp_path, {0: LOST, 1: TOLD, 3: LOST}, monkeypatch)
    assert message.startswith("rank 2 (pp 2) is gone or does not answer, last seen in step 12. rank ")
    assert message.endswith(
        f"To resume, run the same command with --checkpoint.resume: "
        f"it goes on from {tmp_path}/checkpoints/step-00000004"
    )


def test_a_failed_rank_is_named_and_not_those_that_it_took_along(tmp_path, monkeypatch):
    message = say(tmp_path, {0: LOST, 2: LOST, 1: OWN, 3: TOLD}, monkeypatch)
    assert message.startswith(f"rank 1 (pp 1) failed in step 11: {OWN}. To resume")
    assert "rank 0" not in message


def test_a_model_that_diverged_is_not_resumed_from_its_newest_checkpoint(tmp_path, monkeypatch):
    for step in (4, 5):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    message = say(tmp_path, dict.fromkeys(range(4), DIVERGED), monkeypatch)
    assert message.startswith(
        f"rank 0 (pp 0) failed in step 10: {DIVERGED}. The newest checkpoints may hold lost weights"
    )
    assert f"of step-00000004 to step-00000005 in {tmp_path}/checkpoints move away those" in message


def test_told_to_end_from_outside(tmp_path, monkeypatch):
    message = say(tmp_path, dict.fromkeys(range(4), TOLD), monkeypatch, every=0)
    assert message.startswith("told to end by SIGTERM in step 1")
    assert message.endswith("No checkpoint was kept (checkpoint.every is 0): the run must start anew")


def test_a_record_that_cannot_be_written_any_more(tmp_path, monkeypatch, capsys):
    step = loop.cotrain_step

    def lose_the_folder(learner, *args, **options):
        if options["step"] == 1:
            shutil.rmtree(tmp_path / "run")
        return step(learner, *args, **options)

    monkeypatch.setattr(loop, "cotrain_step", lose_the_folder)
    with pytest.raises(SystemExit) as stop:
        main(tiny_sft(tmp_path / "run", steps=3, every=0), run_sft, [])
    assert stop.value.code == 1
    message = capsys.readouterr().err
    assert message.startswith("error: cannot write the run's record: ")
    assert f"'{tmp_path}/run/metrics.jsonl'. No checkpoint was kept" in message


@pytest.mark.parametrize("who", ["policy", "draft"])
def test_a_run_that_diverges_keeps_what_was_good(tmp_path, capsys, who):
    """Exit code 1, one message, and every checkpoint since the figures were finite."""
    with pytest.raises(SystemExit) as stop:
        main(tiny_sft(tmp_path, steps=20, every=1, draft_optim="adamw"), run_sft, [f"--{who}_optim.lr", "1e30"])
    assert stop.value.code == 1
    message = capsys.readouterr().err
    assert message.startswith(f"error: the {who}'s loss or gradient norm was not finite in its last 10 updates")
    assert message.count("error:") == 1
    assert "move away those after the last good step, then resume" in message
    assert (tmp_path / "checkpoints" / "step-00000001").is_dir()


@pytest.mark.parametrize("number, name", [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT (Ctrl-C)")])
def test_a_signal_ends_the_rank_with_the_message(tmp_path, monkeypatch, number, name):
    """Ctrl-C on torchrun reaches every rank: no KeyboardInterrupt in the midst of a collective."""
    said, left = [], threading.Event()
    monkeypatch.setattr(faults, "GRACE_S", 0.1)
    monkeypatch.setattr(faults, "leave", lambda fault: (said.append(fault.message), left.set()))
    watch = Watch(tiny_sft(tmp_path), dist.HashStore(), 0)
    before = signal.getsignal(number)
    with watch.until_told():
        os.kill(os.getpid(), number)
        assert left.wait(10)
    assert f"told to end by {name}. To resume" in said[0]
    assert signal.getsignal(number) is before


def test_ctrl_c_of_a_single_process(tmp_path, monkeypatch, capsys):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "collect", interrupted)  # the worst moment: a checkpoint is being written
    with pytest.raises(SystemExit) as stop:
        main(tiny_sft(tmp_path / "run", steps=2, every=1), run_sft, [])
    assert stop.value.code == 130
    assert "error: told to end by Ctrl-C. To resume, run the same command" in capsys.readouterr().err
    monkeypatch.undo()
    main(tiny_sft(tmp_path / "run", steps=2, every=1), run_sft, ["--checkpoint.resume"])
    assert not any((tmp_path / "run" / "checkpoints").glob(".writing-*"))


def test_what_torchrun_will_do(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    message = say(tmp_path, {0: LOST, 1: LOST, 2: LOST}, monkeypatch, resume=True)
    assert "torchrun starts it again (restart 2 of 3), it goes on from the beginning" in message


def test_without_a_store_a_rank_speaks_for_itself(tmp_path, monkeypatch):
    """Rank 0 or the agent held it and is gone."""

    class Gone:
        def __getattr__(self, name):
            raise RuntimeError("store is gone")

    watch = Watch(tiny_sft(tmp_path), dist.HashStore(), 1)
    watch.store = Gone()
    assert "rank 1 (unknown) lost its peers, and the job's store with them" in watch.end(LOST, lost_peer=True)


def test_ranks_meet_whatever_dead_ones_left_in_the_store():
    """A restart under torchrun: the store still has hellos, answers and names of the attempts before."""
    store = dist.HashStore()
    names = []
    for attempt in range(3):
        if attempt == 1:  # this one dies before all have come
            store.set("cospec/hello/1", "of a dead process")
            with pytest.raises(TimeoutError, match=r"rank 0: rank\(s\) \[1, 2\] did not join within 0.1 seconds"):
                agree_on_name(store, 0, 3, 0.1)
            continue
        found = {}

        def meet(rank, found=found):
            found[rank] = agree_on_name(store, rank, 3, 20.0)

        threads = [threading.Thread(target=meet, args=(rank,)) for rank in (2, 1, 0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 3
        assert len(set(found.values())) == 1
        names.append(found[0])
    assert len(set(names)) == 2


def test_a_rank_alone_says_whom_it_waits_for():
    with pytest.raises(TimeoutError, match=r"rank 2: rank\(s\) \[0\] did not join"):
        agree_on_name(dist.HashStore(), 2, 3, 0.05)
