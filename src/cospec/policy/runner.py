"""Runs a policy over the microbatches of a step, forward and backward.

A runner knows where the layers live; what is done with a microbatch's result, losses and
the draft's work, are the caller's callbacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from cospec.config import AttentionConfig
from cospec.mesh import Mesh
from cospec.policy.attention import PackedContext
from cospec.policy.build import full_state, head_weight
from cospec.policy.taps import TapRecorder
from cospec.records import Batch, Taps

OnHidden = Callable[[int, Tensor], Tensor]
"""(microbatch index, normed final hidden [T, D]) -> loss to run backward from."""
OnTaps = Callable[[int, Taps], None]
"""(microbatch index, its taps): the draft's work. The taps are gone when it returns."""


class Runner(Protocol):
    """Runs a policy over the microbatches of a step."""

    @property
    def microbatches(self) -> int | None:
        """The number of rows in `run` is a multiple of it and all are of one size; None: as you like."""
        ...

    @property
    def last_stage(self) -> bool:
        """Whether this rank has the head: the callbacks are called on such ranks only."""
        ...

    @property
    def parts(self) -> list[nn.Module]:
        """The modules of the policy on this rank."""
        ...

    @property
    def head(self) -> Tensor:
        """[V, D], where `last_stage`; inside the callbacks a whole plain tensor."""
        ...

    def run(
        self,
        batches: Sequence[Batch],
        with_taps: Sequence[bool],
        on_hidden: OnHidden,
        on_taps: OnTaps | None = None,
        *,
        backward: bool = True,
    ) -> None:
        """Forward of every batch, the callbacks on its result and, with `backward`, backward of the loss."""

    def full_state(self) -> dict[str, Tensor]:
        """The whole policy as CPU tensors, on every rank. A collective call."""
        ...


class SequentialRunner:
    """One microbatch after another through a policy that lives on this rank whole (or FSDP-sharded).

    Args:
        tap_layers: layers whose outputs the draft reads; () without a draft.
    """

    microbatches: int | None = None
    last_stage = True

    def __init__(self, policy: nn.Module, mesh: Mesh, attention: AttentionConfig, tap_layers: Sequence[int] = ()):
        self.policy, self.mesh, self.attention = policy, mesh, attention
        self.recorder = TapRecorder(policy, tap_layers) if tap_layers else None

    @property
    def parts(self) -> list[nn.Module]:
        """The modules of the policy on this rank."""
        return [self.policy]

    @property
    def head(self) -> Tensor:
        """[V, D]; inside `on_hidden` a whole plain tensor."""
        return head_weight(self.policy)

    def run(
        self,
        batches: Sequence[Batch],
        with_taps: Sequence[bool],
        on_hidden: OnHidden,
        on_taps: OnTaps | None = None,
        *,
        backward: bool = True,
    ) -> None:
        for index, (batch, taps_wanted) in enumerate(zip(batches, with_taps, strict=True)):
            with torch.set_grad_enabled(backward):
                hidden_TD, taps = self._forward(batch, taps_wanted)
            if taps is not None and on_taps is not None:
                on_taps(index, taps)
            del taps
            loss = on_hidden(index, hidden_TD)
            if backward:
                loss.backward()

    def full_state(self) -> dict[str, Tensor]:
        return full_state(self.policy)

    def _forward(self, batch: Batch, taps_wanted: bool) -> tuple[Tensor, Taps | None]:
        def forward() -> Tensor:
            return self.policy(batch.input_ids[None], positions=batch.positions[None], attention_masks=context)

        context = make_context(batch, self.mesh, self.attention)
        if not taps_wanted:
            return forward().squeeze(0), None
        if self.recorder is None:
            raise ValueError("with_taps=True: the runner was built without tap_layers")
        with self.recorder.recording() as recording:
            hidden_1TD = forward()
        return hidden_1TD.squeeze(0), recording.take(hidden_1TD)


def make_context(batch: Batch, mesh: Mesh, attention: AttentionConfig) -> PackedContext:
    return PackedContext(batch.layout, mesh.cp_group, mode=attention.cp_mode, kernel=attention.kernel)
