"""Ranks that serve only (`mesh.serve`): what they do, and their engines as the other ranks see them.

A serving rank runs `serve`: it waits for a call, lets its engine do what the call says,
answers. The ranks that train hold a `Remote` each, whose methods are such calls; all of
them call together, and all get the answers. Training waits while they generate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from cospec.config import Eagle3Config
from cospec.link import Link
from cospec.mesh import Mesh
from cospec.policy.stream import Headers, IncomingStream, WeightStream
from cospec.records import Rollout, SamplingParams
from cospec.rollout.engine import Engine, EngineError, State
from cospec.train.faults import doing


@dataclass(frozen=True)
class Weights:
    """What follows the call: the policy's tensors, then the draft's; see `WeightStream.send`."""

    policy: Headers
    draft: Headers | None


@dataclass(frozen=True)
class Open:
    """Build an engine."""

    draft: Eagle3Config | None
    max_prompt: int
    weights: Weights | None
    """For an engine that cannot start without."""


@dataclass(frozen=True)
class Generate:
    prompts: list[list[int]]
    params: SamplingParams
    sample_ids: list[int]
    num_draft_tokens: int | None
    """None: as the engine was built."""


@dataclass(frozen=True)
class Refit:
    weights: Weights
    version: int


class Stats:
    pass


class End:
    pass


class Remote:
    """The engines of the serving ranks, as one `Engine`. Every method is collective over the ranks that train.

    Prompts go to the servers in turns; rollouts come back to every rank that trains.
    `stats` has one dict a server, by rank.

    Args:
        states: weights to build the engines with, (policy, draft); None for engines that need none.

    Raises EngineError when an engine cannot be built.
    """

    def __init__(
        self,
        link: Link,
        draft: Eagle3Config | None,
        *,
        max_prompt: int,
        states: tuple[WeightStream, WeightStream | None] | None = None,
    ):
        self.link, self.policy_version = link, 0
        self._num_draft_tokens: int | None = None
        link.call(Open(draft, max_prompt, None if states is None else _weights(*states)))
        if states is not None:
            self._send(*states)
        errors = self._answers()
        for rank, error in zip(link.serving, errors, strict=True):
            if error is not None:
                raise EngineError(f"rank {rank}, which serves: {error}")

    def generate(
        self, prompts: list[list[int]], params: SamplingParams, sample_ids: list[int] | None = None
    ) -> list[Rollout]:
        ids = list(range(len(prompts))) if sample_ids is None else list(sample_ids)
        self.link.call(Generate(list(prompts), params, ids, self._num_draft_tokens))
        shares = self._answers()
        return [shares[i % len(shares)][i // len(shares)] for i in range(len(prompts))]

    def refit(self, policy_state: State, draft_state: State | None, version: int) -> None:
        if not isinstance(policy_state, WeightStream) or not isinstance(draft_state, WeightStream | None):
            raise ValueError("the engines of other ranks take weights as streams only")
        self.link.call(Refit(_weights(policy_state, draft_state), version))
        self._send(policy_state, draft_state)
        self.policy_version = version

    @contextmanager
    def speculation(self, num_draft_tokens: int) -> Iterator[None]:
        saved, self._num_draft_tokens = self._num_draft_tokens, num_draft_tokens
        try:
            yield
        finally:
            self._num_draft_tokens = saved

    def stats(self) -> dict[str, Any]:
        self.link.call(Stats())
        return {f"rank {rank}": figures for rank, figures in zip(self.link.serving, self._answers(), strict=True)}

    def _answers(self) -> list[Any]:
        return [self.link.share(None, rank) for rank in self.link.serving]

    def _send(self, *streams: WeightStream | None) -> None:
        for stream in streams:
            if stream is not None:
                stream.send(self.link)


def end(link: Link) -> None:
    """The ranks that train are done: those that serve are too. Collective over the former."""
    link.call(End())


Build = Callable[[Open, IncomingStream | None, IncomingStream | None], Engine]


def serve(mesh: Mesh, build: Build) -> None:
    """The life of a rank that serves only: until the ranks that train are done.

    build: makes this rank's engine, given the call and, where it announces weights, the
        streams of policy and draft. What it refuses ends the run on all ranks with one message.

    Raises link.Refused when the ranks that train refuse the run.
    """
    assert mesh.link is not None
    link = mesh.link
    engine: Engine | None = None
    while True:
        doing("waiting for the ranks that train")
        call = link.next_call()
        if isinstance(call, End):
            return
        if isinstance(call, Open):
            doing("the start of the engine")
            engine = _open(call, mesh, link, build)
            continue
        assert engine is not None, f"{type(call).__name__} came before an engine was asked for"
        try:
            if isinstance(call, Generate):
                doing(f"generating with policy version {engine.policy_version}")
                _answer(link, _generate(engine, call, link))
            elif isinstance(call, Refit):
                doing(f"the refit to version {call.version}")
                _refit(engine, call, mesh, link)
            else:
                _answer(link, engine.stats())
        except EngineError as error:  # of this rank alone: no refusal, which all ranks raise together
            raise RuntimeError(f"the engine failed: {error}") from error


def _open(call: Open, mesh: Mesh, link: Link, build: Build) -> Engine | None:
    streams, engine, problem = _incoming(call.weights, mesh, link), None, None
    try:
        engine = build(call, *streams)
    except (ValueError, ImportError, EngineError) as error:
        problem = str(error)
    for stream in streams:
        if stream is not None:
            stream.drain()
    _answer(link, problem)
    return engine  # None: the next call is a refusal


def _generate(engine: Engine, call: Generate, link: Link) -> list[Rollout]:
    turn, turns = link.rank - link.trainers, len(link.serving)
    prompts, sample_ids = call.prompts[turn::turns], call.sample_ids[turn::turns]
    if not prompts:
        return []
    depth = call.num_draft_tokens
    with nullcontext() if depth is None else engine.speculation(depth):
        return engine.generate(prompts, call.params, sample_ids)


def _refit(engine: Engine, call: Refit, mesh: Mesh, link: Link) -> None:
    policy, draft = _incoming(call.weights, mesh, link)
    assert policy is not None
    engine.refit(policy, draft, call.version)
    policy.drain()
    if draft is not None:
        draft.drain()


def _answer(link: Link, answer: Any) -> None:
    for rank in link.serving:  # those of the other servers pass by
        link.share(answer, rank)


def _weights(policy: WeightStream, draft: WeightStream | None) -> Weights:
    return Weights(policy.headers, None if draft is None else draft.headers)


def _incoming(weights: Weights | None, mesh: Mesh, link: Link) -> tuple[IncomingStream | None, IncomingStream | None]:
    if weights is None:
        return None, None
    policy = IncomingStream(weights.policy, link, mesh.device)
    if weights.draft is None:
        return policy, None
    return policy, IncomingStream(weights.draft, link, mesh.device, after=policy)
