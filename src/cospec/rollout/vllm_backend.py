"""A back end of vLLM's weight-transfer API beside its CUDA IPC and NCCL: tensors of this process, or of a file.

vLLM imports this module by name when an engine starts (`vllm_refit.register_backend`);
nothing else does, so vLLM may be imported at the top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class TensorUpdate(WeightTransferUpdateInfo):
    """Checkpoint tensors of one update, one of: `tensors`, pairs of name and tensor; `path`, a safetensors file."""

    tensors: list[tuple[str, Tensor]] | None = None
    path: str | None = None

    def __post_init__(self) -> None:
        if (self.tensors is None) == (self.path is None):
            raise ValueError("give either tensors or path")

    def load(self) -> list[tuple[str, Tensor]]:
        if self.tensors is not None:
            return self.tensors
        with safe_open(self.path, framework="pt") as file:
            return [(name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118  (it is no mapping)


class TensorEngine(WeightTransferEngine[WeightTransferInitInfo, TensorUpdate]):
    """Loads what it is given into the policy or, in a draft's update, into the draft."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = TensorUpdate

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        pass

    @torch.no_grad()
    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # the base class asks for an accelerator
            torch.accelerator.synchronize()

    @torch.no_grad()
    def receive_weights(self, update_info: TensorUpdate) -> None:
        self.model.load_weights(iter(update_info.load()))

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass
