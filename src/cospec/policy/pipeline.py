"""A policy split over pipeline stages: the runner of `mesh.pp` > 1.

torch's schedule runs the stages; it is neither subclassed nor changed. Around each forward
of a stage the tap hooks are switched on and hand what they see to the channel at once. On
the last stage the schedule asks for the loss of a microbatch right after its forward: there
the taps are awaited, the draft does its work, and the policy's loss is formed. A run without
backward needs no schedule: the stages' forwards follow the same order.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from cospec.config import AttentionConfig, PipelineConfig
from cospec.mesh import Mesh, report_fault, reported_fault
from cospec.policy.build import head_weight
from cospec.policy.runner import OnHidden, OnTaps, make_context
from cospec.policy.schedule import Action, Order, action_order, make_schedule, run_schedule, stage_ranks
from cospec.policy.stream import WeightStream
from cospec.policy.taps import TapRecorder
from cospec.records import EMBEDDINGS, Batch, PipelineError, Taps

FAULT_WAIT_S = 1.0  # how long a rank that lost a peer waits for the peer's own words


class TapPort(Protocol):
    """What the runner asks of a channel; see channel.base.TapChannel."""

    def begin(self, wanted: Sequence[bool]) -> None: ...
    def put(self, stage: int, microbatch: int, layer: int, tap: Tensor) -> None: ...
    def sealed(self, stage: int, microbatch: int) -> None: ...
    def get(self, microbatch: int) -> Mapping[int, Tensor]: ...
    def release(self, microbatch: int) -> None: ...
    def flush(self) -> None: ...


@dataclass
class _Run:
    """One run of the schedule: its first microbatch's index in the step, and what to do with results."""

    first: int
    wanted: list[bool]
    on_hidden: OnHidden
    on_taps: OnTaps | None
    late: list[tuple[int, Tensor]] = field(default_factory=list)
    """Microbatches whose draft work is deferred, with their final hidden states."""


@dataclass(frozen=True)
class _Sink:
    port: TapPort
    stage: int
    microbatch: int

    def put(self, layer: int, tap: Tensor) -> None:
        self.port.put(self.stage, self.microbatch, layer, tap)


class PipelineRunner:
    """Runs the stages of this rank; see `runner.Runner`.

    Args:
        stages: the modules of this rank by stage index (`build_policy(stage=, num_stages=)`).
        shape: [T, D] of the hidden states of one microbatch on this rank.
        dtype: compute dtype of the policy.
        tap_layers, port: what the draft reads and where it goes; (), None without a draft.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        mesh: Mesh,
        config: PipelineConfig,
        attention: AttentionConfig,
        *,
        shape: tuple[int, int],
        dtype: torch.dtype,
        tap_layers: Sequence[int] = (),
        port: TapPort | None = None,
    ):
        self.mesh, self.config, self.attention = mesh, config, attention
        self.modules, self.tap_layers, self.port = dict(stages), tuple(tap_layers), port
        self.shape, self.dtype = shape, dtype
        self.microbatches = config.microbatches
        self.ranks = stage_ranks(config.schedule, mesh.pp_size)
        self.order: Order = action_order(config.schedule, mesh.pp_size, config.microbatches)
        group = mesh.group("pp")
        if group is None:
            raise ValueError("a mesh without pipeline stages: use SequentialRunner")
        self.group = group
        self.last_stage = self.ranks[-1] == mesh.pp_rank
        self.recorders = {s: TapRecorder(m, tap_layers) for s, m in self.modules.items()} if tap_layers else {}
        self.stages = [self._make_stage(stage, module) for stage, module in self.modules.items()]
        self.schedule = make_schedule(config.schedule, self.stages, config.microbatches, self._loss)
        self.trace: list[Action] = []
        """What the last run of the schedule did on this rank, in order."""
        self._run: _Run | None = None

    @property
    def parts(self) -> list[nn.Module]:
        return list(self.modules.values())

    @property
    def head(self) -> Tensor:
        return head_weight(self.modules[len(self.ranks) - 1])

    def full_state(self) -> dict[str, Tensor]:
        return WeightStream(self.parts, self.mesh).collect()

    def run(
        self,
        batches: Sequence[Batch],
        with_taps: Sequence[bool],
        on_hidden: OnHidden,
        on_taps: OnTaps | None = None,
        *,
        backward: bool = True,
    ) -> None:
        """See `runner.Runner`. Several runs of the schedule when there are more rows than it takes.

        Raises PipelineError naming stage, microbatch and layer when a stage, a tap or a peer fails.
        """
        count = self.microbatches
        if len(batches) % count:
            raise ValueError(f"{len(batches)} rows: must be a multiple of pipeline.microbatches={count}")
        for batch in batches:
            if batch.input_ids.numel() != self.shape[0]:
                raise ValueError(f"a row has {batch.input_ids.numel()} local tokens: all must have {self.shape[0]}")
        if any(with_taps) and self.port is None:
            raise ValueError("with_taps=True: the runner was built without tap_layers")
        for first in range(0, len(batches), count):
            run = _Run(first, list(with_taps[first : first + count]), on_hidden, on_taps)
            self._run, self.trace = run, []
            try:
                if self.port is not None:
                    self.port.begin(run.wanted)
                self._run_once(batches[first : first + count], backward)
                for microbatch, hidden_TD in run.late:
                    self._draft_work(microbatch, hidden_TD)
                if self.port is not None:
                    self.port.flush()
            except RuntimeError as error:
                raise self._explain(error) from error
            finally:
                self._run = None

    def _run_once(self, batches: Sequence[Batch], backward: bool) -> None:
        kwargs: list[dict[str, Any]] = [
            {"positions": b.positions[None], "attention_masks": make_context(b, self.mesh, self.attention)}
            for b in batches
        ]
        inputs = [(b.input_ids[None],) if 0 in self.modules else () for b in batches]
        if backward:
            run_schedule(self.schedule, self.stages, inputs, kwargs, list(range(len(batches))))
        else:
            with torch.no_grad():
                self._forward_only(inputs, kwargs)

    def _make_stage(self, index: int, module: nn.Module) -> PipelineStage:
        """torch's stage with its sizes given, so that nothing is run to find them out."""
        last = len(self.ranks) - 1
        hidden = torch.empty(1, *self.shape, dtype=self.dtype, device="meta", requires_grad=True)
        tokens = torch.empty(1, self.shape[0], dtype=torch.int64, device="meta")
        stage = PipelineStage(
            module,
            index,
            last + 1,
            self.mesh.device,
            input_args=tokens if index == 0 else hidden,
            output_args=hidden,
            group=self.group,
        )
        forward = stage.forward_one_chunk

        def traced_forward(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            with self._forward_of(index, microbatch):
                return forward(microbatch, *args, **kwargs)

        stage.forward_one_chunk = traced_forward
        for kind, name in (("B", "backward_one_chunk"), ("W", "backward_weight_one_chunk")):
            setattr(stage, name, self._traced(kind, index, getattr(stage, name)))
        return stage

    def _traced(self, kind: str, stage: int, work: Any) -> Any:
        def traced(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            split = kind == "B" and not kwargs.get("full_backward", True)
            self.trace.append(Action("I" if split else kind, stage, microbatch))
            return work(microbatch, *args, **kwargs)

        return traced

    @contextmanager
    def _forward_of(self, stage: int, microbatch: int) -> Iterator[None]:
        """Switches the hooks of a stage on for one microbatch: the only time that they see anything."""
        self.trace.append(Action("F", stage, microbatch))
        if self.port is None or self._run is None or not self._run.wanted[microbatch]:
            yield
            return
        with self.recorders[stage].into(_Sink(self.port, stage, microbatch)):
            yield
        self.port.sealed(stage, microbatch)

    def _loss(self, output_1TD: Tensor, microbatch: int) -> Tensor:
        """What the schedule calls on the last stage after each forward."""
        assert self._run is not None
        hidden_TD = output_1TD.squeeze(0)
        if self._run.wanted[microbatch]:
            if self.config.defer_draft:
                self._run.late.append((microbatch, hidden_TD.detach()))
            else:
                self._draft_work(microbatch, hidden_TD.detach())
        return self._run.on_hidden(self._run.first + microbatch, hidden_TD)

    def _draft_work(self, microbatch: int, hidden_TD: Tensor) -> None:
        run, port = self._run, self.port
        assert run is not None
        assert port is not None
        taps = port.get(microbatch)
        if run.on_taps is not None:
            hidden = tuple(taps[layer] for layer in self.tap_layers)
            with torch.enable_grad():
                run.on_taps(run.first + microbatch, Taps(hidden, taps[EMBEDDINGS], hidden_TD))
        port.release(microbatch)

    def _forward_only(self, inputs: list[tuple], kwargs: list[dict]) -> None:
        """The forwards of this rank in the schedule's order, with messages in each sender's order."""
        last, here = len(self.ranks) - 1, self.mesh.pp_rank
        sends: list[tuple[Any, Tensor]] = []
        arrivals = {rank: self._arrivals(rank) for rank in range(self.mesh.pp_size) if rank != here}
        received: dict[tuple[int, int], tuple[Any, Tensor]] = {}
        local: dict[tuple[int, int], Tensor] = {}
        for _, stage, microbatch in (a for a in self.order[here] if a.kind == "F"):
            key = (stage, microbatch)
            if stage == 0:
                args = inputs[microbatch]
            elif self.ranks[stage - 1] == here:
                args = (local.pop(key),)
            else:
                while key not in received:
                    received.update([next(arrivals[self.ranks[stage - 1]])])
                work, hidden_1TD = received.pop(key)
                work.wait(datetime.timedelta(seconds=self.mesh.timeout_s))
                args = (hidden_1TD,)
            with self._forward_of(stage, microbatch):
                output_1TD = self.modules[stage](*args, **kwargs[microbatch])
            if stage == last:
                self._loss(output_1TD, microbatch)
            elif self.ranks[stage + 1] == here:
                local[stage + 1, microbatch] = output_1TD
            else:
                output_1TD = output_1TD.contiguous()
                sends.append((dist.isend(output_1TD, self._peer(stage + 1), group=self.group), output_1TD))
        for work, _ in sends:
            work.wait(datetime.timedelta(seconds=self.mesh.timeout_s))
        for part in self.parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def _arrivals(self, source: int) -> Iterator[tuple[tuple[int, int], tuple[Any, Tensor]]]:
        """Receives of this rank from `source`, posted one at a time in the order of its sends."""
        for kind, stage, microbatch in self.order[source]:
            if kind == "F" and stage + 1 < len(self.ranks) and self.ranks[stage + 1] == self.mesh.pp_rank:
                buffer = torch.empty(1, *self.shape, dtype=self.dtype, device=self.mesh.device)
                yield (stage + 1, microbatch), (dist.irecv(buffer, self._peer(stage), group=self.group), buffer)

    def _peer(self, stage: int) -> int:
        return dist.get_global_rank(self.group, self.ranks[stage])

    def _explain(self, error: BaseException) -> PipelineError:
        """The error to end with: what went wrong here, or what another rank says went wrong there."""
        inner: BaseException | None = error
        while inner is not None:
            if isinstance(inner, PipelineError):
                report_fault(str(inner))
                return inner
            inner = inner.__cause__
        elsewhere = reported_fault(FAULT_WAIT_S)
        text = f"pipeline rank {self.mesh.pp_rank}, {self._place()}: {elsewhere or _innermost(error)}"
        if elsewhere is None:
            report_fault(text)
        return PipelineError(text)

    def _place(self) -> str:
        if not self.trace:
            return f"stage {next(iter(self.modules))}, before microbatch 0"
        kind, stage, microbatch = self.trace[-1]
        layers = ", ".join(self.modules[stage].layers) or "none"
        name = "forward" if kind == "F" else "backward"
        return f"stage {stage} (layers {layers}) in or after the {name} of microbatch {microbatch}"


def _innermost(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
