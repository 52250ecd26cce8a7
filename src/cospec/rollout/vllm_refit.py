"""New weights for a running vLLM: checked, translated, and sent by its weight-transfer API.

How tensors travel is chosen once, by `choose_transfer`. All ways make the same calls of
vLLM (start, updates, finish, for the policy and then for the draft); they differ in what an
update carries: tensors of the same process, a file, a CUDA IPC handle, or only names and
shapes of what NCCL brings.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from cospec.draft.eagle3 import Eagle3Draft
from cospec.draft.vocab import check_vocab
from cospec.policy.weights import to_hf
from cospec.rollout.engine import State, check_state, whole_state
from cospec.titan import DecoderConfig

BACKEND = "cospec"
"""Name of `vllm_backend.TensorEngine` among vLLM's back ends."""
CALLS = frozenset(
    {
        "init_weight_transfer_engine",
        "start_weight_update",
        "start_draft_weight_update",
        "update_weights",
        "finish_weight_update",
    }
)
"""Methods of vLLM's LLM that a refit calls."""
CHUNK_BYTES = 2**28
"""Tensors travel together up to this many bytes, a larger one alone."""

Call = Callable[..., Any]
"""(name in CALLS, arguments): calls that method of the LLM, wherever it lives."""
Items = Mapping[str, Tensor]
"""Checkpoint tensors by Hugging Face name."""


def translate(
    policy_config: DecoderConfig, draft: Eagle3Draft | None, policy_state: State, draft_state: State | None
) -> tuple[Items, Items | None]:
    """Checkpoint tensors of policy and draft, as vLLM loads them.

    draft: names and shapes of the running draft. Raises ValueError naming the tensor that is
    missing, unknown or misshapen, of either, before anything was sent.
    """
    policy_items = to_hf(policy_config, whole_state(policy_state))
    return policy_items, None if draft_state is None else _draft_items(draft, whole_state(draft_state))


def _draft_items(draft: Eagle3Draft | None, state: Mapping[str, Tensor]) -> Items:
    if draft is None:
        raise ValueError("draft_state: this engine was built without a draft, give None")
    check_state("draft", draft, state)
    config = draft.config
    check_vocab(state["d2t"], state["t2d"], config.vocab_size, config.draft_vocab_size)
    whole = config.draft_vocab_size == config.vocab_size  # vLLM has no map then
    left_out = {"t2d", "d2t"} if whole else {"t2d"}
    # vLLM keeps a reference until the tensor is loaded: the caller may change its own meanwhile.
    return {name: value.detach().clone() for name, value in state.items() if name not in left_out}


class Transfer(Protocol):
    """A way for tensors into a running vLLM."""

    backend: str
    """What vLLM must be started with, see its WeightTransferConfig."""

    def open(self, call: Call) -> None:
        """Once, when vLLM runs."""
        ...

    def send(self, call: Call, items: Items, *, draft: bool) -> None:
        """A whole update of the policy, or of the draft."""
        ...


def choose_transfer(trainer: torch.device, engine: torch.device, folder: str | Path) -> Transfer:
    """How weights get from one process to another: the one place that decides.

    CUDA IPC when trainer and engine share a GPU, NCCL between two, files in `folder` where
    there is no GPU on one side.
    """
    if trainer.type != "cuda" or engine.type != "cuda":
        return ByFile(folder)
    return ByIpc(trainer) if _index(trainer) == _index(engine) else ByNccl()


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


class HandOver:
    """Within one process: the tensors themselves."""

    backend = BACKEND

    def open(self, call: Call) -> None:
        pass

    def send(self, call: Call, items: Items, *, draft: bool) -> None:
        client = _Client(call, draft)
        client.start_weight_update()
        client.update_weights({"tensors": list(items.items())})
        client.finish_weight_update()


class ByFile:
    """safetensors files in a folder that both processes see, one at a time."""

    backend = BACKEND

    def __init__(self, folder: str | Path, chunk_bytes: int = CHUNK_BYTES):
        self.path, self.chunk_bytes = Path(folder) / "weights.safetensors", chunk_bytes

    def open(self, call: Call) -> None:
        pass

    def send(self, call: Call, items: Items, *, draft: bool) -> None:
        client = _Client(call, draft)
        client.start_weight_update()
        for chunk in _chunks(items, self.chunk_bytes):
            # Copies: views of one tensor (a mixture's experts) may not be in a file together.
            save_file({name: value.to("cpu", copy=True).contiguous() for name, value in chunk.items()}, self.path)
            client.update_weights({"path": str(self.path)})
            self.path.unlink()  # vLLM keeps what it mapped of it
        client.finish_weight_update()


class ByIpc:
    """CUDA IPC on one GPU: tensors are packed into a buffer whose handle goes to vLLM, and refilled when it has read.

    vLLM's own trainer side is not used: it gathers handles over the default process group,
    in which here only some ranks may have an engine.
    """

    backend = "ipc"

    def __init__(self, device: torch.device, chunk_bytes: int = CHUNK_BYTES):
        self.device, self.chunk_bytes = device, chunk_bytes

    def open(self, call: Call) -> None:
        _Client(call).init_weight_transfer_engine({"packed": True})

    def send(self, call: Call, items: Items, *, draft: bool) -> None:
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo
        from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer

        client, uuid = _Client(call, draft), str(torch.cuda.get_device_properties(self.device).uuid)
        ordered = _aligned(items)
        size = max(self.chunk_bytes, max(value.nbytes for _, value in ordered))
        client.start_weight_update()
        for chunk in packed_ipc_producer(iter(ordered), uuid, lambda item: item[1].detach(), size):
            update = IPCWeightTransferUpdateInfo(
                names=chunk.names,
                dtype_names=chunk.dtype_names,
                shapes=chunk.shapes,
                ipc_handles=chunk.ipc_handle,
                tensor_sizes=chunk.tensor_sizes,
            )
            client.update_weights(asdict(update))  # returns when the buffer has been read
        client.finish_weight_update()
        torch.cuda.ipc_collect()


class ByNccl:
    """NCCL between two GPUs, by vLLM's own trainer side: this process is rank 0 of a group of two, vLLM is rank 1."""

    backend = "nccl"

    def __init__(self, chunk_bytes: int = CHUNK_BYTES):
        self.chunk_bytes = chunk_bytes
        self._sender: Any = None

    def open(self, call: Call) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        info = NCCLTrainerInitInfo(
            master_address="127.0.0.1",
            master_port=_free_port(),
            world_size=2,
            packed=True,
            packed_buffer_size_bytes=self.chunk_bytes,
            rank=0,
        )
        self._sender = NCCLTrainerWeightTransferEngine.trainer_init(info, client=_Client(call), source=_Source({}))

    def send(self, call: Call, items: Items, *, draft: bool) -> None:
        self._sender.client, self._sender.source = _Client(call, draft), _Source(items)
        self._sender.send_weights()


class _Client:
    """vLLM's `VLLMWeightSyncClient`, for updates of the policy or of the draft."""

    def __init__(self, call: Call, draft: bool = False):
        self._call, self._draft = call, draft

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._call("start_draft_weight_update" if self._draft else "start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update")


class _Source:
    """vLLM's `WeightSource`: what is sent, declared and in order."""

    def __init__(self, items: Items):
        self._items = _aligned(items)

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, value.dtype, tuple(value.shape)) for name, value in self._items]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, value.detach()) for name, value in self._items)


def _aligned(items: Items) -> list[tuple[str, Tensor]]:
    """Wide dtypes first: a packed buffer is read as views, whose offsets must be multiples of the item size."""
    return sorted(items.items(), key=lambda item: -item[1].dtype.itemsize)


def _chunks(items: Items, most: int) -> Iterator[dict[str, Tensor]]:
    chunk: dict[str, Tensor] = {}
    size = 0
    for name, value in items.items():
        if chunk and size + value.nbytes > most:
            yield chunk
            chunk, size = {}, 0
        chunk[name] = value
        size += value.nbytes
    if chunk:
        yield chunk


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def register_backend() -> None:
    """Make `BACKEND` known to the vLLM of this process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    if BACKEND not in Factory._registry:
        Factory.register_engine(BACKEND, "cospec.rollout.vllm_backend", "TensorEngine")
