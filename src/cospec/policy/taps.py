"""Reading hidden states of a policy while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from cospec.config import check_tap_layers
from cospec.records import Taps


class Recording:
    """What one forward pass left: layer outputs by id, and the token embeddings."""

    def __init__(self, layers: tuple[int, ...]):
        self.layers = layers
        self.hidden: dict[int, Tensor] = {}
        self.embeddings: Tensor | None = None

    def take(self, final_hidden: Tensor) -> Taps:
        """The taps of that pass: all [T, Dt] and detached. final_hidden: [1, T, Dt], its result.

        Raises RuntimeError naming what was not recorded.
        """
        missing = [i for i in self.layers if i not in self.hidden]
        if missing or self.embeddings is None:
            what = f"layers {missing}" if missing else "the token embeddings"
            raise RuntimeError(f"no tap of {what} was recorded: run the policy inside recording()")
        hidden = tuple(self.hidden[i].flatten(0, 1) for i in self.layers)
        return Taps(hidden, self.embeddings.flatten(0, 1), final_hidden.detach().flatten(0, 1))


class TapRecorder:
    """Forward hooks on a policy's blocks and token embeddings, silent outside `recording()`.

    So evaluation, shape inference and the recomputation of checkpointed blocks record
    nothing. Recorded tensors are detached and share memory with the policy's own.

        with recorder.recording() as taps:
            hidden = policy(tokens, positions=positions, attention_masks=context)
        taps = taps.take(hidden)

    Args:
        layers: 0-based blocks whose outputs (the residual stream) are read, ascending.
    """

    def __init__(self, policy: nn.Module, layers: Sequence[int]):
        self.layers = check_tap_layers(layers, len(policy.config.layers))
        self._active: Recording | None = None
        self._handles = [policy.tok_embeddings.register_forward_hook(self._keep_embeddings)]
        for i in self.layers:
            self._handles.append(policy.layers[str(i)].register_forward_hook(self._keep_layer(i)))

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Record the one forward pass that runs inside."""
        if self._active is not None:
            raise RuntimeError("recording() is already active: one recording covers one forward pass")
        self._active = Recording(self.layers)
        try:
            yield self._active
        finally:
            self._active = None

    def remove(self) -> None:
        """Take the hooks off the policy."""
        for handle in self._handles:
            handle.remove()

    def _keep_layer(self, layer: int):
        def hook(module: nn.Module, args: tuple, output: Tensor) -> None:
            if self._active is None:
                return
            if layer in self._active.hidden:
                raise RuntimeError(f"layer {layer} ran twice in one recording: one recording covers one forward pass")
            self._active.hidden[layer] = output.detach()

        return hook

    def _keep_embeddings(self, module: nn.Module, args: tuple, output: Tensor) -> None:
        if self._active is not None:
            self._active.embeddings = output.detach()
