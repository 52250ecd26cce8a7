"""What a tap channel promises: order, ownership, back-pressure, time-outs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from torch import Tensor

from cospec.records import EMBEDDINGS, PipelineError, TapPlan, TapStream


class ChannelError(PipelineError):
    """A tap that is missing, late or of the wrong kind: names stage, microbatch and layer."""

    def __init__(self, stage: int, microbatch: int, layer: int, what: str):
        super().__init__(f"tap of {tap_name(layer)} of stage {stage}, microbatch {microbatch}: {what}")


def tap_name(layer: int) -> str:
    return "the token embeddings" if layer == EMBEDDINGS else f"layer {layer}"


@dataclass
class ChannelStats:
    """Figures of one rank, added up until they are taken.

    stalls: times a full send queue held the schedule up, stall_s for how long. wait_s: how
    long the draft waited for taps. in_flight: most microbatches of one stream that were
    queued (on a source) or landed and not consumed (on the draft's rank) at once.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    stalls: int = 0
    stall_s: float = 0.0
    wait_s: float = 0.0
    in_flight: int = 0

    def take(self) -> dict[str, float]:
        """The figures since the last call."""
        figures = asdict(self)
        self.__init__()
        return figures


class TapChannel(Protocol):
    """Carries the taps of one run of the schedule after another from the stages to the draft.

    Order: the stages put their taps in the order of the plan; `get` may ask for microbatches
    in any order that the slots allow, the last stage's is one.
    Ownership: `put` copies what has to travel. What `get` returns belongs to the channel and
    is valid until `release` of that microbatch; taps of the draft's own rank share memory with
    the policy's tensors.
    Back-pressure: `put` waits only when the bounded queue of its stream is full.
    Time-outs: a tap, or room for one, that does not come in time is a ChannelError.
    """

    plan: TapPlan
    stats: ChannelStats

    def begin(self, wanted: Sequence[bool]) -> None:
        """A run of the schedule starts; `wanted` says which of its microbatches have taps."""

    def put(self, stage: int, microbatch: int, layer: int, tap: Tensor) -> None:
        """Send the tap [T, Dt] of a stage of this rank."""

    def sealed(self, stage: int, microbatch: int) -> None:
        """The stage's forward is done: raises ChannelError unless all its taps were put."""

    def get(self, microbatch: int) -> Mapping[int, Tensor]:
        """All taps of a microbatch by layer; waits for them. On the draft's rank only."""
        ...

    def release(self, microbatch: int) -> None:
        """The draft is done with the microbatch."""

    def flush(self) -> None:
        """Wait until all that was put is taken: what a sender drops before is lost."""


class PutOrder:
    """Checks on the stage's side that every tap comes once, in order, and of the right kind."""

    def __init__(self, plan: TapPlan, stream: TapStream):
        self.plan, self.stream = plan, stream
        self._put: dict[int, int] = {}

    def check(self, microbatch: int, layer: int, tap: Tensor) -> None:
        done = self._put.get(microbatch, 0)
        if done == len(self.stream.layers) or self.stream.layers[done] != layer:
            named = [tap_name(i) for i in self.stream.layers[done:]] or ["nothing more"]
            raise ChannelError(self.stream.stage, microbatch, layer, f"expected {named[0]} next")
        want, got = (self.plan.shape, self.plan.source_dtype), (tuple(tap.shape), tap.dtype)
        if want != got:
            what = f"shape {list(got[0])} and {got[1]}, the plan says {list(want[0])} and {want[1]}"
            raise ChannelError(self.stream.stage, microbatch, layer, what)
        self._put[microbatch] = done + 1

    def check_all(self, microbatch: int) -> None:
        done = self._put.pop(microbatch, 0)
        if done < len(self.stream.layers):
            raise ChannelError(self.stream.stage, microbatch, self.stream.layers[done], "was not given by its stage")
