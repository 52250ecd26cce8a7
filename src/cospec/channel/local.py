"""Taps of stages on the draft's own rank: handed over, nothing travels."""

from __future__ import annotations

from torch import Tensor

from cospec.channel.base import ChannelError, PutOrder
from cospec.records import TapPlan, TapStream


class LocalStream:
    """The taps of one stage, kept from its forward until the draft is done with them."""

    def __init__(self, plan: TapPlan, stream: TapStream):
        self.plan, self.stream = plan, stream
        self.order = PutOrder(plan, stream)
        self._taps: dict[int, dict[int, Tensor]] = {}

    def put(self, microbatch: int, layer: int, tap: Tensor) -> None:
        self.order.check(microbatch, layer, tap)
        self._taps.setdefault(microbatch, {})[layer] = tap.to(self.plan.dtype)

    def get(self, microbatch: int) -> dict[int, Tensor]:
        taps = self._taps.get(microbatch, {})
        for layer in self.stream.layers:
            if layer not in taps:
                raise ChannelError(self.stream.stage, microbatch, layer, "was not given by its stage")
        return taps

    def release(self, microbatch: int) -> None:
        del self._taps[microbatch]

    def clear(self) -> None:
        self._taps.clear()
