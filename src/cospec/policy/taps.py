"""Reading hidden states of a policy while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor, nn

from cospec.config import check_tap_layers
from cospec.records import EMBEDDINGS, Taps


class TapSink(Protocol):
    """Takes the taps of one forward pass as they come: detached, [T, Dt], sharing the policy's memory."""

    def put(self, layer: int, tap: Tensor) -> None:
        """layer: 0-based block, or EMBEDDINGS."""


class Recording:
    """What one forward pass left: layer outputs by id, EMBEDDINGS for the token embeddings."""

    def __init__(self, layers: tuple[int, ...]):
        self.layers = layers
        self.taps: dict[int, Tensor] = {}

    def put(self, layer: int, tap: Tensor) -> None:
        if layer in self.taps:
            raise RuntimeError(f"layer {layer} ran twice in one recording: one recording covers one forward pass")
        self.taps[layer] = tap

    def take(self, final_hidden: Tensor) -> Taps:
        """The taps of that pass: all [T, Dt] and detached. final_hidden: [1, T, Dt], its result.

        Raises RuntimeError naming what was not recorded.
        """
        missing = [i for i in self.layers if i not in self.taps]
        if missing or EMBEDDINGS not in self.taps:
            what = f"layers {missing}" if missing else "the token embeddings"
            raise RuntimeError(f"no tap of {what} was recorded: run the policy inside recording()")
        hidden = tuple(self.taps[i] for i in self.layers)
        return Taps(hidden, self.taps[EMBEDDINGS], final_hidden.detach().flatten(0, 1))


class TapRecorder:
    """Forward hooks on a policy's blocks and token embeddings, silent outside `recording()`.

    So evaluation, shape inference and the recomputation of checkpointed blocks record
    nothing. Recorded tensors are detached and share memory with the policy's own.

        with recorder.recording() as taps:
            hidden = policy(tokens, positions=positions, attention_masks=context)
        taps = taps.take(hidden)

    Args:
        policy: whole, or a pipeline stage: hooks go where it has blocks and embeddings.
        layers: 0-based blocks whose outputs (the residual stream) are read, ascending.
    """

    def __init__(self, policy: nn.Module, layers: Sequence[int]):
        self.layers = check_tap_layers(layers, len(policy.config.layers))
        self._active: TapSink | None = None
        places = {EMBEDDINGS: policy.tok_embeddings}
        places |= {i: policy.layers[str(i)] for i in self.layers if str(i) in policy.layers}
        self._handles = [m.register_forward_hook(self._hook(i)) for i, m in places.items() if m is not None]

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Record the one forward pass that runs inside."""
        recording = Recording(self.layers)
        with self.into(recording):
            yield recording

    @contextmanager
    def into(self, sink: TapSink) -> Iterator[None]:
        """Hand the taps of the one forward pass that runs inside to `sink`, each right after its block."""
        if self._active is not None:
            raise RuntimeError("recording() is already active: one recording covers one forward pass")
        self._active = sink
        try:
            yield
        finally:
            self._active = None

    def remove(self) -> None:
        """Take the hooks off the policy."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, layer: int):
        def hook(module: nn.Module, args: tuple, output: Tensor) -> None:
            if self._active is not None:
                self._active.put(layer, output.detach().flatten(0, 1))

        return hook
