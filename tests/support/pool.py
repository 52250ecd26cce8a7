"""One pool of worker processes for all tests of many ranks.

Importing torch and torchtitan costs seconds and hundreds of megabytes a process, so the
workers live as long as the test session, and are forked from a server that has imported
both already (plain `fork` of the test process hangs once OpenMP has run).
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

MAX_RANKS = 8
GRACE_S = 1.0  # how long the peers of a failed rank may still take to report their own error


class RankError(AssertionError):
    """A rank failed, died or hung; the message holds rank and traceback."""


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    stacks: Path  # where faulthandler writes the worker's stack on SIGUSR1


class Ranks:
    """`run(world_size, fn, *args)`: call `fn(rank, *args)` on every rank of a fresh gloo group."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="cospec-ranks-")
        self._context: Any = None

    def run(
        self, world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0, join: bool = True
    ) -> list[Any]:
        """Run `fn(rank, *args)` on `world_size` ranks and return the results in rank order.

        `fn` is a top-level function of a module that the worker can import by name (a test
        module is). Arguments and results are pickled.

        join: make the process group; False leaves it to `fn`, as torchrun would, with the environment's address.

        Raises:
            RankError: a rank raised (with its traceback), its process died, or the call took
                longer than `timeout_s` (with the stacks of the ranks that hang). The workers
                are replaced, so that the next call starts clean.
        """
        if not 1 <= world_size <= MAX_RANKS:
            raise ValueError(f"world_size must be in 1..{MAX_RANKS}, got {world_size}")
        if "<locals>" in fn.__qualname__ or fn.__name__ == "<lambda>":
            raise ValueError(f"{fn.__qualname__} must be a top-level function: workers import it by name")
        self._ensure(world_size)
        workers = self._workers[:world_size]
        with tempfile.TemporaryDirectory(dir=self._folder.name) as store:
            job = {
                "sys_path": list(sys.path),
                "cwd": os.getcwd(),
                "module": fn.__module__,
                "function": fn.__qualname__,
                "args": pickle.dumps(args),
                "world_size": world_size,
                "init_method": f"file://{store}/store",
                "timeout_s": timeout_s,
                "port": None if join else free_port(),
            }
            for rank, worker in enumerate(workers):
                worker.pipe.send_bytes(pickle.dumps({**job, "rank": rank}))
            results, problems = self._collect(workers, timeout_s)
        if problems:
            self._stop(workers)  # their process groups are in an unknown state
            name = f"{fn.__module__}.{fn.__qualname__}"
            text = "\n".join(f"[rank {rank} of {world_size}] {problems[rank]}" for rank in sorted(problems))
            raise RankError(f"{name} failed:\n{text}")
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        self._stop(self._workers)
        self._folder.cleanup()

    def _collect(self, workers: list[_Worker], timeout_s: float) -> tuple[dict[int, Any], dict[int, str]]:
        results: dict[int, Any] = {}
        problems: dict[int, str] = {}
        start = time.monotonic()
        deadline = start + timeout_s
        while len(results) + len(problems) < len(workers):
            waiting = {r: w for r, w in enumerate(workers) if r not in results and r not in problems}
            left = deadline - time.monotonic()
            handles = [w.pipe for w in waiting.values()] + [w.process.sentinel for w in waiting.values()]
            ready = wait(handles, timeout=max(left, 0))
            for rank, worker in waiting.items():
                if worker.pipe in ready:
                    try:
                        ok, value = pickle.loads(worker.pipe.recv_bytes())
                    except EOFError:
                        problems[rank] = _describe_exit(worker)
                        continue
                    (results if ok else problems)[rank] = value
                elif worker.process.sentinel in ready:
                    problems[rank] = _describe_exit(worker)
            if problems:
                deadline = min(deadline, time.monotonic() + GRACE_S)
            if not ready and left <= 0:
                if not problems:  # a hang; after an error the peers' waiting says nothing new
                    for rank, worker in waiting.items():
                        problems[rank] = f"hung: no result within {timeout_s:g} s\n{_stack(worker)}"
                break
        return results, problems

    def _ensure(self, count: int) -> None:
        for i, worker in enumerate(self._workers):
            if not worker.process.is_alive():
                self._stop([worker])
                self._workers[i] = self._start()
        while len(self._workers) < count:
            self._workers.append(self._start())

    def _start(self) -> _Worker:
        with _worker_environment():
            if self._context is None:
                self._context = multiprocessing.get_context("forkserver")
                self._context.set_forkserver_preload(["support.preload"])
            pipe, theirs = self._context.Pipe()
            handle, stacks = tempfile.mkstemp(dir=self._folder.name, suffix=".stack")
            os.close(handle)
            process = self._context.Process(target=_serve, args=(theirs, stacks), daemon=True)
            process.start()
            theirs.close()
        return _Worker(process, pipe, Path(stacks))

    def _stop(self, workers: list[_Worker]) -> None:
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join()
            worker.pipe.close()


@contextmanager
def _worker_environment():
    """What the fork server and the workers inherit: the test paths, one thread, loopback."""
    changes = {
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _describe_exit(worker: _Worker) -> str:
    worker.process.join(5)
    code = worker.process.exitcode
    if code is not None and code < 0:
        return f"the worker process was killed by {signal.Signals(-code).name}"
    return f"the worker process ended with exit code {code}"


def _stack(worker: _Worker) -> str:
    if worker.process.pid is None or not worker.process.is_alive():
        return _describe_exit(worker)
    os.kill(worker.process.pid, signal.SIGUSR1)
    time.sleep(0.3)
    return worker.stacks.read_text()


def _serve(pipe: Connection, stacks: str) -> None:
    """The life of a worker: one job after the other until the pipe closes."""
    import torch

    torch.set_num_threads(1)
    stack_file = open(stacks, "w")  # noqa: SIM115  (open as long as the process lives)
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    while True:
        try:
            job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = pickle.dumps((True, _run(job)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)


def _run(job: dict[str, Any]) -> Any:
    import torch
    import torch.distributed as dist

    sys.path[:] = job["sys_path"]
    os.chdir(job["cwd"])
    _reset(job["rank"], job["world_size"])
    function: Any = importlib.import_module(job["module"])
    for name in job["function"].split("."):
        function = getattr(function, name)
    args = pickle.loads(job["args"])
    if job["port"] is not None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job["port"]))
        return function(job["rank"], *args)
    dist.init_process_group(
        "gloo",
        init_method=job["init_method"],
        rank=job["rank"],
        world_size=job["world_size"],
        timeout=timedelta(seconds=job["timeout_s"]),
    )
    torch.manual_seed(0)
    result = function(job["rank"], *args)
    # A rank that leaves while a peer still talks to it aborts the peer.
    dist.barrier()
    dist.destroy_process_group()
    return result


def _reset(rank: int, world_size: int) -> None:
    """Undo what an earlier job may have left in this process."""
    import torch
    from torch.distributed.tensor import DTensor

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    # Cached sharding decisions hold the meshes, and so the process groups, of earlier jobs.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()
