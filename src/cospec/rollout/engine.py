"""What every rollout engine does, and the helpers that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cospec.policy.stream import WeightStream
from cospec.records import Rollout, SamplingParams

State = Mapping[str, Tensor] | WeightStream
"""Whole tensors by state-dict name, all at once or one after the other."""


class EngineError(RuntimeError):
    """The engine cannot be used: it died, or samples from a wrong distribution. Training state is not touched."""


class Engine(Protocol):
    """Generates from the newest weights that it was given."""

    policy_version: int

    def generate(
        self, prompts: list[list[int]], params: SamplingParams, sample_ids: list[int] | None = None
    ) -> list[Rollout]:
        """One rollout per prompt, in order. `sample_ids` (default 0, 1, ..) select the random numbers."""
        ...

    def refit(self, policy_state: State, draft_state: State | None, version: int) -> None:
        """Take over new weights; rollouts carry `version` from now on."""
        ...

    def speculation(self, num_draft_tokens: int) -> AbstractContextManager[None]:
        """Generate with another k inside, for comparisons; 0 switches speculation off."""
        ...

    def stats(self) -> dict[str, Any]:
        """Figures since the engine was built."""
        ...


def whole_state(state: State) -> dict[str, Tensor]:
    """Everything at once, for an engine that takes it so; a stream's tensors as copies."""
    if isinstance(state, WeightStream):
        return {name: value.clone() for name, value in state.items()}
    return dict(state)


class Elsewhere:
    """Stands for the engine on a rank that does not serve: takes part in refits, generates nothing."""

    policy_version = 0

    def generate(
        self, prompts: list[list[int]], params: SamplingParams, sample_ids: list[int] | None = None
    ) -> list[Rollout]:
        return []

    def refit(self, policy_state: State, draft_state: State | None, version: int) -> None:
        for state in (policy_state, draft_state):
            if isinstance(state, WeightStream):
                state.drain()
        self.policy_version = version

    def speculation(self, num_draft_tokens: int) -> AbstractContextManager[None]:
        return nullcontext()

    def stats(self) -> dict[str, Any]:
        return {}


def acceptance_length(rollouts: Sequence[Rollout]) -> float:
    """Tokens per verification, the bonus token counted: `1 + accepted / verify steps`; nan without any."""
    steps = sum(r.verify_steps for r in rollouts)
    return 1 + sum(sum(r.accepted) for r in rollouts) / steps if steps else float("nan")


def acceptance_by_position(rollouts: Sequence[Rollout]) -> list[float]:
    """Share of the tokens proposed at draft position 0, 1, .. that were accepted there."""
    width = max((len(r.proposed) for r in rollouts), default=0)
    rates = []
    for j in range(width):
        proposed = sum(r.proposed[j] for r in rollouts if j < len(r.proposed))
        accepted = sum(r.accepted[j] for r in rollouts if j < len(r.accepted))
        rates.append(accepted / proposed if proposed else float("nan"))
    return rates


def check_request(
    prompts: Sequence[Sequence[int]], sample_ids: Sequence[int] | None, *, max_len: int, vocab_size: int
) -> None:
    """Raises ValueError naming field, value and rule for what cannot be generated from."""
    if len(prompts) == 0:
        raise ValueError("prompts=[]: must hold at least one prompt")
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompts[{i}]=[]: must hold at least one token")
        if len(prompt) + 1 > max_len:
            raise ValueError(
                f"prompts[{i}] has {len(prompt)} tokens: prompt and one new token must fit max_len={max_len}"
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            bad = next(t for t in prompt if not 0 <= t < vocab_size)
            raise ValueError(f"prompts[{i}] holds token {bad}: ids must be in 0..{vocab_size - 1}")
    if sample_ids is not None and len(sample_ids) != len(prompts):
        raise ValueError(f"sample_ids has {len(sample_ids)} entries: must be one per prompt ({len(prompts)})")


def check_state(owner: str, module: nn.Module, state: State) -> None:
    """Raises ValueError unless `state` has exactly the module's names, each with its shape."""
    own = module.state_dict()
    given = state.shapes if isinstance(state, WeightStream) else {name: value.shape for name, value in state.items()}
    missing, unknown = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    if missing or unknown:
        raise ValueError(f"{owner}_state: missing {missing}, unknown {unknown}: names must be those of the {owner}")
    for name, value in own.items():
        if given[name] != value.shape:
            raise ValueError(
                f"{owner}_state[{name!r}] has shape {tuple(given[name])}: the {owner} has {tuple(value.shape)}"
            )


@torch.no_grad()
def load_state(module: nn.Module, state: State) -> None:
    """Copy checked full tensors into a module, casting to its dtypes."""
    own = module.state_dict()
    for name, value in state.items():
        own[name].copy_(value)
        del value  # else a stream's tensor would still be here while the next one comes
