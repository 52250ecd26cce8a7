"""How a run of many ranks ends when one of them dies: together, and with one message.

Every rank leaves in the job's store what it is doing. A rank that fails, loses a peer or is told
to end (SIGTERM, torchrun's way once a worker is gone; Ctrl-C) adds how it ended. The first of
them waits a moment for the others and says the one message: which rank it was that failed or
fell silent, what it was doing, and how to resume.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from cospec.config import ConfigError, RunConfig
from cospec.features.store import StoreError
from cospec.link import ENDED, Refused
from cospec.mesh import Job, Mesh, current_job
from cospec.records import Diverged
from cospec.rl.checked import TaskError
from cospec.rollout.engine import EngineError
from cospec.train.checkpoint import CheckpointError
from cospec.train.metrics import CHECKPOINTS

REFUSALS = (ConfigError, CheckpointError, StoreError, EngineError, Refused)
"""What ends a run with one message and exit code 2; all ranks that train raise it together."""
DOING, SPEAKER = "cospec/doing", "cospec/speaker"
TOLD = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "SIGINT (Ctrl-C)"}
GRACE_S = 3.0
"""How long the others may take to say how they ended, before they count as gone."""
STORE_S = 5.0
_LOST_PEER = re.compile(r"connection|timed? ?out|reset by peer|broken pipe|\bgloo\b|\bnccl\b", re.IGNORECASE)


class RankFault(RuntimeError):
    """The run ends because of a rank.

    message: on the rank that speaks for all, None on the others.
    own: the failure is this rank's own, not the loss of another.
    """

    def __init__(self, message: str | None, *, own: bool = False):
        super().__init__(message or "the run ends: another rank says why")
        self.message, self.own = message, own


def doing(what: str) -> None:
    """Note what this rank does from now on, for the case that it is the last that is heard of it."""
    with suppress(Exception):
        if job := current_job():
            job.store.set(f"{DOING}/{job.rank}", what)


@contextmanager
def watched(config: RunConfig, mesh: Mesh) -> Iterator[None]:
    """Around a run: errors end in a RankFault, but for REFUSALS."""
    job = current_job()
    if job is None or job.size == 1:
        yield
        return
    watch = _Watch(config, mesh, job)
    with watch.until_told():
        try:
            yield
        except Exception as error:
            text = _innermost(error)
            # Of this rank alone, whatever connections or time-outs the text speaks of.
            own = isinstance(error, TaskError) or (isinstance(error, EngineError) and mesh.link is None)
            lost_peer = not own and _LOST_PEER.search(text) is not None
            refusal = isinstance(error, REFUSALS) and not lost_peer and not own
            if isinstance(error, ConfigError | Refused) or refusal:
                if mesh.link is not None:
                    mesh.link.refuse(str(error))
                raise
            raise RankFault(watch.end(text, lost_peer=lost_peer), own=not lost_peer) from error


class _Watch:
    def __init__(self, config: RunConfig, mesh: Mesh, job: Job):
        self.config, self.rank, self.size = config, job.rank, job.size
        # A connection of its own: the main thread may hold the other one in a call that waits.
        store: Any = job.store
        self.store = store.clone()
        with suppress(Exception):
            self.store.set_timeout(timedelta(seconds=STORE_S))
        place = f"pp {mesh.pp_rank}, dp {mesh.dp_rank}, cp {mesh.cp_rank}"
        role = "serves" if mesh.serves_only else place if mesh.link is None else f"trains, {place}"
        self.store.set(f"cospec/where/{self.rank}", f"{role}; pid {os.getpid()} on {socket.gethostname()}")
        self._lock = threading.Lock()
        self._ending = False

    def end(self, text: str, *, lost_peer: bool, told: bool = False) -> str | None:
        """Say how this rank ends; returns the message for all where this rank is the one to say it."""
        with self._lock:
            if self._ending:
                return None
            self._ending = True
        with suppress(Exception):
            self.store.set(f"{ENDED}/{self.rank}", json.dumps({"text": text, "lost_peer": lost_peer, "told": told}))
            if self.store.compare_set(SPEAKER, "", str(self.rank)).decode() != str(self.rank):
                return None
        return self._message(text, self._ends())

    def _ends(self) -> dict[int, dict[str, Any]]:
        ends: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + GRACE_S
        with suppress(Exception):
            while len(ends) < self.size and time.monotonic() < deadline:
                for rank in range(self.size):
                    if rank not in ends and self.store.check([f"{ENDED}/{rank}"]):
                        ends[rank] = json.loads(self.store.get(f"{ENDED}/{rank}"))
                time.sleep(0.05)
        return ends

    def _message(self, own: str, ends: dict[int, dict[str, Any]]) -> str:
        failed = [rank for rank in sorted(ends) if not ends[rank]["lost_peer"]]
        silent = [rank for rank in range(self.size) if rank not in ends]
        if failed:
            if all(ends[r]["text"] == ends[failed[0]]["text"] for r in failed):
                failed = failed[:1]  # all found the same
            what = "; ".join(f"{self._name(r)} failed in {self._doing(r)}: {ends[r]['text']}" for r in failed[:2])
            if any(ends[r]["text"].startswith(Diverged.__name__) for r in failed):
                return f"{what}. {diverged_hint(self.config)}"
        elif not ends:
            what = f"{self._name(self.rank)} lost its peers, and the job's store with them: {own}"
        elif silent:
            names = "; ".join(
                f"{self._name(r)} is gone or does not answer, last seen in {self._doing(r)}" for r in silent
            )
            what = f"{names}. {self._name(self.rank)} ended in {self._doing(self.rank)}: {own}"
        elif all(end["told"] for end in ends.values()):
            what = f"{own} in {self._doing(self.rank)}"
        else:
            first = next(r for r in sorted(ends) if not ends[r]["told"])
            what = f"{self._name(first)} lost a peer in {self._doing(first)}: {ends[first]['text']}"
        return f"{what}. {resume_hint(self.config)}"

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._read(f'cospec/where/{rank}') or 'unknown'})"

    def _doing(self, rank: int) -> str:
        return self._read(f"{DOING}/{rank}") or "its start"

    def _read(self, key: str) -> str | None:
        with suppress(Exception):
            if self.store.check([key]):
                return self.store.get(key).decode()
        return None

    @contextmanager
    def until_told(self) -> Iterator[None]:
        """When told to end, a thread says the message and ends the process: the main thread may wait for a peer."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # The interpreter writes the signal's number into the pipe at once, whatever Python is at.
        previous = {number: signal.signal(number, lambda *_: None) for number in TOLD}
        wakeup = signal.set_wakeup_fd(writer)
        thread = threading.Thread(target=self._on_signals, args=(reader,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in previous.items():
                signal.signal(number, handler or signal.SIG_DFL)
            os.write(writer, b"\0")
            thread.join(STORE_S)
            os.close(writer)
            os.close(reader)

    def _on_signals(self, reader: int) -> None:
        while True:
            numbers = os.read(reader, 1)
            if not numbers or numbers == b"\0":
                return
            if numbers[0] in TOLD and not self._ending:
                leave(RankFault(self.end(f"told to end by {TOLD[numbers[0]]}", lost_peer=True, told=True)))


def leave(fault: RankFault) -> None:
    """Say the message and end the process at once: process groups whose peers are gone may hang or abort at exit."""
    if fault.own and fault.__cause__ is not None and not isinstance(fault.__cause__, Diverged):
        traceback.print_exception(fault.__cause__)
    if fault.message is not None:
        print(f"error: {fault.message}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def resume_hint(config: RunConfig) -> str:
    """How the run can go on from what is on disk."""
    restart, most = (int(os.environ.get(f"TORCHELASTIC_{n}", 0)) for n in ("RESTART_COUNT", "MAX_RESTARTS"))
    checkpoints = sorted((Path(config.output_dir) / CHECKPOINTS).glob("step-*"))
    if not checkpoints and not config.checkpoint.every:
        return "No checkpoint was kept (checkpoint.every is 0): the run must start anew"
    whence = f"from {checkpoints[-1]}" if checkpoints else "from the beginning, for there is no checkpoint yet"
    if config.checkpoint.resume and restart < most:
        return f"torchrun starts it again (restart {restart + 1} of {most}), it goes on {whence}"
    return f"To resume, run the same command with --checkpoint.resume: it goes on {whence}"


def diverged_hint(config: RunConfig) -> str:
    """How a run can go on whose newest checkpoints may hold weights that are lost."""
    folder = Path(config.output_dir) / CHECKPOINTS
    names = [path.name for path in sorted(folder.glob("step-*"))]
    if not names:
        return "There is no checkpoint: start anew with lower learning rates"
    return (
        f"The newest checkpoints may hold lost weights: of {names[0]} to {names[-1]} in {folder} "
        f"move away those after the last good step, then resume with --checkpoint.resume and lower learning rates"
    )


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None and not str(error):
        error = error.__cause__
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
