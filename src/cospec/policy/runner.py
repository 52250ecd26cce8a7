"""Runs a policy over the microbatches of a step, forward and backward.

A runner knows where the layers live; what is done with a microbatch's result, the losses
and the draft's work, is the caller's `on_hidden`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from cospec.config import AttentionConfig
from cospec.mesh import Mesh
from cospec.policy.attention import PackedContext
from cospec.policy.build import head_weight
from cospec.policy.taps import TapRecorder
from cospec.records import Batch, Taps

OnHidden = Callable[[int, Tensor, Taps | None], Tensor]
"""(microbatch index, normed final hidden [T, D], its taps or None) -> loss to run backward from."""


class SequentialRunner:
    """One microbatch after another through a policy that lives on this rank whole (or FSDP-sharded).

    Args:
        tap_layers: layers whose outputs the draft reads; () without a draft.
    """

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
        self, batches: Sequence[Batch], with_taps: Sequence[bool], on_hidden: OnHidden, *, backward: bool = True
    ) -> None:
        """Forward of every batch, `on_hidden` on its result and, with `backward`, backward of the loss it gives."""
        for index, (batch, taps_wanted) in enumerate(zip(batches, with_taps, strict=True)):
            with torch.set_grad_enabled(backward):
                hidden_TD, taps = self._forward(batch, taps_wanted)
            loss = on_hidden(index, hidden_TD, taps)
            del taps
            if backward:
                loss.backward()

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
    kernel = None if attention.kernel == "auto" else attention.kernel
    return PackedContext(batch.layout, mesh.cp_group, mode=attention.cp_mode, kernel=kernel)
