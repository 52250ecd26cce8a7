"""Between the ranks that train and those that only serve: calls, objects, tensors.

The two live in worlds of their own: the default process group, and with it all that torch
builds on it, is that of the ranks that train; a rank that serves has none. What joins them
are the groups made here. Ranks of the job are numbered through: 0..trainers-1 train, the rest serve.
"""

from __future__ import annotations

import datetime
import pickle
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ENDED = "cospec/ended"
"""Store key, `/rank` follows: how a rank of the job ended; see train.faults."""
_CALL, _BEAT = "cospec/call", "cospec/beat"
_POLL_S = 0.01


class Refused(RuntimeError):
    """The ranks that train have refused the run: the message is theirs."""


class Link:
    """All ranks of a job that has serving ranks make one, and make its calls in the same order.

    Args:
        store: common to the job.
        stages: pipeline stages; the first rank of each sends its weights.
        device: where weights are sent from and received.
        timeout_s: seconds that an operation waits for a peer, and that rank 0 may show no sign of life.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        *,
        trainers: int,
        servers: int,
        stages: int,
        device: torch.device,
        timeout_s: float,
    ):
        self.rank, self.trainers, self.timeout_s = rank, trainers, timeout_s
        self.size = trainers + servers
        self.serving: Sequence[int] = range(trainers, self.size)
        self.leaders = [stage * trainers // stages for stage in range(stages)]
        self._store, self._calls = store, 0
        self._everyone = self._group("everyone", range(self.size), torch.device("cpu"))
        self._weights: dict[int, Any] = {}
        for stage, leader in enumerate(self.leaders):
            members = [leader, *self.serving]
            if rank in members:
                self._weights[stage] = self._group(f"stage-{stage}", members, device)
        self._closed = threading.Event()
        own: Any = store
        # Its own connection to the store: the main thread may hold the other one.
        self._heart = threading.Thread(target=self._beat, args=(own.clone(),), daemon=True)
        if rank == 0:
            self._heart.start()

    @property
    def serves(self) -> bool:
        return self.rank >= self.trainers

    def call(self, message: Any) -> None:
        """All ranks that train: hand the serving ranks what rank 0 has to say."""
        self._announce("call")
        self.share(message, 0)

    def refuse(self, text: str) -> None:
        """Instead of a call: the run does not begin, or go on, because of bad input. Rank 0's word counts."""
        with suppress(Exception):
            self._announce(text)
        self._stop()

    def _announce(self, text: str) -> None:
        if self.rank == 0:
            if self._calls:  # everyone has seen the one before
                self._store.delete_key(f"{_CALL}/{self._calls - 1}")
            self._store.set(f"{_CALL}/{self._calls}", text)
        self._calls += 1

    def next_call(self) -> Any:
        """A rank that serves: wait for the next call, however long the others train.

        Raises Refused, or ConnectionError when a rank that trains has ended or rank 0 is silent for `timeout_s`.
        """
        key, beat, seen_at, looked_at = f"{_CALL}/{self._calls}", b"", time.monotonic(), 0.0
        while not self._store.check([key]):
            now = time.monotonic()
            if now > looked_at + 0.5:
                looked_at = now
                for rank in range(self.trainers):
                    if self._store.check([f"{ENDED}/{rank}"]):
                        raise ConnectionError(f"connection lost: rank {rank}, which trains, has ended")
                if (newest := self._last_beat()) != beat:
                    beat, seen_at = newest, now
                if now > seen_at + self.timeout_s:
                    raise ConnectionError(f"timed out: no sign of rank 0 for {self.timeout_s:g} seconds")
            time.sleep(_POLL_S)
        text = self._store.get(key).decode()
        if text != "call":
            raise Refused(text)
        self._calls += 1
        return self.share(None, 0)

    def share(self, value: Any, source: int) -> Any:
        """The object that rank `source` has, on every rank of the job."""
        mine = source == self.rank
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8) if mine else torch.empty(0)
        length = torch.tensor([data.numel()])
        self._everyone.broadcast(length, source).wait()
        if not mine:
            data = torch.empty(int(length), dtype=torch.uint8)
        self._everyone.broadcast(data, source).wait()
        return value if mine else pickle.loads(data.numpy().tobytes())

    def send(self, stage: int, weights: Tensor) -> None:
        """The first rank of a stage: a tensor to all that serve."""
        self._weights[stage].broadcast(weights, 0).wait()

    def receive(self, stage: int, room: Tensor) -> None:
        """A rank that serves: fill `room` with what the stage's first rank sends."""
        self._weights[stage].broadcast(room, 0).wait()

    def close(self) -> None:
        """Leave together."""
        self._stop()
        self._everyone.barrier().wait()

    def _stop(self) -> None:
        self._closed.set()
        if self._heart.is_alive():
            self._heart.join()

    def _group(self, name: str, members: Sequence[int], device: torch.device) -> Any:
        store = dist.PrefixStore(f"cospec/link/{name}", self._store)
        rank, size, timeout = members.index(self.rank), len(members), datetime.timedelta(seconds=self.timeout_s)
        if device.type != "cuda":
            return dist.ProcessGroupGloo(store, rank, size, timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)

    def _beat(self, store: Any) -> None:
        with suppress(Exception):
            while not self._closed.wait(min(2.0, self.timeout_s / 4)):
                store.set(_BEAT, str(time.time()))

    def _last_beat(self) -> bytes:
        return self._store.get(_BEAT) if self._store.check([_BEAT]) else b""
