"""vLLM as rollout engine in a process of its own.

vLLM makes itself the default process group of its process, so a rank of a torch.distributed
job cannot hold it; and on a GPU CUDA IPC needs two processes. `VLLMProcess` starts one and
speaks with it over a socket pair that nobody else has. Weights do not go over it, see
`vllm_refit.choose_transfer`. Either process ends when the other one does, whatever ends it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from cospec.config import Eagle3Config
from cospec.records import Diverged, Rollout, SamplingParams
from cospec.rollout.engine import EngineError, State
from cospec.rollout.vllm import VLLMEngine
from cospec.rollout.vllm_refit import choose_transfer, send_both, translate
from cospec.rollout.vllm_start import check_settings
from cospec.titan import DecoderConfig

JOB_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
JOB_PREFIXES = ("MASTER_", "TORCHELASTIC_", "ROLE_")
ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (EngineError, Diverged, ValueError, ImportError, RuntimeError)
}
"""What an engine raises, the first that fits; anything else has ended it."""


class VLLMProcess:
    """A `VLLMEngine` in a process of its own; the `Engine` protocol, and the same options.

    Args:
        device: of the weights that refits bring.
        engine_device: where vLLM runs; None means on `device`.

    Raises what `VLLMEngine` raises. A process that ends is an EngineError at once, and at
    every later call.
    """

    def __init__(
        self,
        policy_folder: str | Path,
        policy_config: DecoderConfig,
        draft_folder: str | Path | None = None,
        draft_config: Eagle3Config | None = None,
        *,
        device: torch.device,
        engine_device: torch.device | None = None,
        max_len: int,
        num_draft_tokens: int = 5,
        max_batch: int = 64,
        **options: Any,
    ):
        sizes = {"num_draft_tokens": num_draft_tokens, "max_batch": max_batch, "max_len": max_len}
        self._draft = check_settings(policy_config, draft_folder, draft_config, **sizes)
        self.policy_config = policy_config
        self.num_draft_tokens = self._most_draft_tokens = num_draft_tokens if self._draft is not None else 0
        self.policy_version = 0
        self.proposals: list[list[tuple[int, list[int]]]] = []
        self._dead: str | None = None
        engine_device = device if engine_device is None else engine_device
        folder = tempfile.mkdtemp(prefix="cospec-vllm-")
        self._transfer = choose_transfer(device, engine_device, folder)
        self._log = Path(folder) / "log"
        self._process, self._connection = _start(folder, self._log, engine_device)
        self.close = weakref.finalize(self, _close, self._process, self._connection, folder)
        """End the process; also when this object, or the interpreter, ends."""
        try:
            folders = (str(policy_folder), policy_config, None if draft_folder is None else str(draft_folder))
            options |= sizes | {"backend": self._transfer.backend}
            self.can_sleep, self.probe, self.repaired = self._call("open", *folders, draft_config, **options)
            self._transfer.open(self._weights_call)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def generate(
        self, prompts: list[list[int]], params: SamplingParams, sample_ids: list[int] | None = None
    ) -> list[Rollout]:
        rollouts, self.proposals = self._call("generate", prompts, params, sample_ids)
        return rollouts

    def refit(self, policy_state: State, draft_state: State | None, version: int) -> None:
        """See `VLLMEngine.refit`: both are checked before any weight changes."""
        policy, draft = translate(self.policy_config, self._draft, policy_state, draft_state)
        try:
            send_both(self._transfer, self._weights_call, policy, draft, speculates=self._most_draft_tokens > 0)
            self._call("refitted", version)
        except BaseException as error:
            self._dead = self._dead or f"its refit broke off: {type(error).__name__}: {error}"
            raise
        self.policy_version = version

    @contextmanager
    def speculation(self, num_draft_tokens: int) -> Iterator[None]:
        """See `VLLMEngine.speculation`."""
        saved = self.num_draft_tokens
        self._call("set_chain", num_draft_tokens)
        self.num_draft_tokens = num_draft_tokens
        try:
            yield
        finally:
            self._call("set_chain", saved)
            self.num_draft_tokens = saved

    def stats(self) -> dict[str, Any]:
        return self._call("stats")

    def sleep(self) -> bool:
        return self._call("sleep")

    def wake_up(self) -> None:
        self._call("wake_up")

    def _weights_call(self, name: str, *args: Any) -> None:
        self._call("transfer_call", name, *args)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._dead is not None:
            raise EngineError(f"the vLLM engine died earlier ({self._dead}): build a new one")
        try:
            self._connection.send((method, args, kwargs))
            error, value = self._connection.recv()
        except (EOFError, OSError):
            self._dead = self._how_it_ended()
            self.close()
            rule = "the trained weights are untouched, build a new engine"
            raise EngineError(f"the vLLM engine died ({self._dead}); {rule}") from None
        except BaseException:
            self._dead = "a call was interrupted"  # its answer would be taken for the next one's
            raise
        if error is not None:
            raise ERRORS[error](value)
        return value

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return f"process {self.pid} no longer answers"
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if code == -signal.SIGKILL:  # it had no time to say why
            return f"process {self.pid}: {how}"
        last = ""
        with suppress(OSError):
            last = " ".join(self._log.read_text(errors="replace").split("\n")[-4:]).strip()[-300:]
        return f"process {self.pid}: {how}" + (f"; its last words: {last}" if last else "")


def child_environment(engine_device: torch.device) -> dict[str, str]:
    """This process's environment without its place in a job, with only the engine's GPU to be seen."""
    own = {k: v for k, v in os.environ.items() if k not in JOB_VARIABLES and not k.startswith(JOB_PREFIXES)}
    source = str(Path(__file__).resolve().parents[2])
    own["PYTHONPATH"] = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    if engine_device.type == "cuda":
        index = torch.cuda.current_device() if engine_device.index is None else engine_device.index
        visible = own.get("CUDA_VISIBLE_DEVICES")
        own["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index].strip() if visible else str(index)
    return own


def _start(folder: str, log: Path, engine_device: torch.device) -> tuple[subprocess.Popen, Connection]:
    ours, theirs = socket.socketpair()
    with log.open("wb") as output, theirs:
        process = subprocess.Popen(
            # -P: a folder of vLLM's name where this runs is not vLLM.
            [sys.executable, "-P", "-m", "cospec.rollout.vllm_process", str(theirs.fileno()), str(os.getpid()), folder],
            env=child_environment(engine_device),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # signals to the job are for its ranks, with which this process ends
        )
    return process, Connection(ours.detach())


def _close(process: subprocess.Popen, connection: Connection, folder: str) -> None:
    connection.close()  # the process sees it and ends, unless it is busy
    try:
        process.wait(1)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)


class _Host:
    """What the other process may call."""

    def __init__(self) -> None:
        self._engine: Any = None

    def open(self, *args: Any, **options: Any) -> tuple[Any, ...]:
        self._engine = VLLMEngine(*args, **options)
        return self._engine.can_sleep, self._engine.probe, self._engine.repaired

    def generate(self, *args: Any) -> tuple[Any, ...]:
        return self._engine.generate(*args), self._engine.proposals

    def answer(self, method: str, args: tuple, kwargs: dict[str, Any]) -> tuple[str | None, Any]:
        """(name of the error, or None; its text, or the result)."""
        try:
            own = method in ("open", "generate")
            return None, getattr(self if own else self._engine, method)(*args, **kwargs)
        except Exception as error:
            for name, kind in ERRORS.items():
                if isinstance(error, kind):
                    return name, str(error)
            return "EngineError", f"the vLLM engine died ({type(error).__name__}: {error})"


def _watch(parent: int, folder: str) -> None:
    """End with the parent, also in the middle of a call; what it cannot tidy up is tidied up here."""
    while os.getppid() == parent:
        time.sleep(0.3)
    _leave(folder)


def _leave(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # without vLLM's own ways of ending, which may wait


def main() -> None:
    descriptor, parent, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    threading.Thread(target=_watch, args=(parent, folder), daemon=True).start()
    connection, host = Connection(descriptor), _Host()
    with suppress(EOFError, OSError):
        while True:
            connection.send(host.answer(*connection.recv()))
    _leave(folder)


if __name__ == "__main__":
    main()
