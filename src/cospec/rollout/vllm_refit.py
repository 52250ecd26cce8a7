"""New weights for a running vLLM: checked, translated, and sent by its weight-transfer API.

How tensors travel is chosen once, by `choose_transfer`. All ways make the same calls of
vLLM (start, updates, finish, for the policy and then for the draft); they differ in what an
update carries: tensors of the same process, a file, a CUDA IPC handle, or only names and
shapes of what NCCL brings.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from cospec.draft.eagle3 import Eagle3Draft
from cospec.draft.vocab import check_vocab
from cospec.policy.stream import WeightStream
from cospec.policy.weights import Declared, to_hf, translate_stream
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


@dataclass(frozen=True)
class Outgoing:
    """Checkpoint tensors by Hugging Face name: what comes, and then each, once.

    passing: a tensor may be another one's memory when the next is asked for.
    """

    declared: Declared
    tensors: Iterable[tuple[str, Tensor]]
    passing: bool = False

    @property
    def largest(self) -> int:
        return max(math.prod(shape) * dtype.itemsize for _, shape, dtype in self.declared)

    def aligned(self) -> Outgoing:
        """Wide dtypes first: a packed buffer is read as views, whose offsets must be multiples of the item size."""
        if len({dtype.itemsize for *_, dtype in self.declared}) == 1:
            return self
        kept = [(name, value.clone() if self.passing else value) for name, value in self.tensors]
        return outgoing(dict(sorted(kept, key=lambda pair: -pair[1].dtype.itemsize)))


def outgoing(tensors: Mapping[str, Tensor]) -> Outgoing:
    return Outgoing([(name, tuple(x.shape), x.dtype) for name, x in tensors.items()], tensors.items())


def translate(
    policy_config: DecoderConfig, draft: Eagle3Draft | None, policy_state: State, draft_state: State | None
) -> tuple[Outgoing, Callable[[], Outgoing] | None]:
    """Checkpoint tensors of the policy, and of the draft once the policy's have been read, as vLLM loads them.

    draft: names and shapes of the running draft. Raises ValueError naming the tensor that is
    missing, unknown or misshapen, of either, before any is read. Streams are not collected.
    """
    if draft_state is not None:
        if draft is None:
            raise ValueError("draft_state: this engine was built without a draft, give None")
        check_state("draft", draft, draft_state)
        if not isinstance(draft_state, WeightStream):
            _check_map(draft, draft_state)
    if isinstance(policy_state, WeightStream):
        policy = Outgoing(*translate_stream(policy_config, policy_state), passing=True)
    else:
        policy = outgoing(to_hf(policy_config, policy_state))
    if draft is None or draft_state is None:
        return policy, None
    return policy, lambda: _draft_tensors(draft, whole_state(draft_state))


def _draft_tensors(draft: Eagle3Draft, state: Mapping[str, Tensor]) -> Outgoing:
    _check_map(draft, state)
    whole = draft.config.draft_vocab_size == draft.config.vocab_size  # vLLM has no map then
    left_out = {"t2d", "d2t"} if whole else {"t2d"}
    # vLLM keeps a reference until the tensor is loaded: the caller may change its own meanwhile.
    return outgoing({name: value.detach().clone() for name, value in state.items() if name not in left_out})


def _check_map(draft: Eagle3Draft, state: Mapping[str, Tensor]) -> None:
    check_vocab(state["d2t"], state["t2d"], draft.config.vocab_size, draft.config.draft_vocab_size)


def send_both(
    transfer: Transfer, call: Call, policy: Outgoing, draft: Callable[[], Outgoing] | None, *, speculates: bool
) -> None:
    """The policy's update and, where one is given and vLLM has one, the draft's."""
    transfer.send(call, policy, draft=False)
    if draft is not None:
        tensors = draft()  # in any case: reading a stream is collective
        if speculates:
            transfer.send(call, tensors, draft=True)


class Transfer(Protocol):
    """A way for tensors into a running vLLM."""

    backend: str
    """What vLLM must be started with, see its WeightTransferConfig."""

    def open(self, call: Call) -> None:
        """Once, when vLLM runs."""
        ...

    def send(self, call: Call, items: Outgoing, *, draft: bool) -> None:
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

    def send(self, call: Call, items: Outgoing, *, draft: bool) -> None:
        client = _Client(call, draft)
        client.start_weight_update()
        for chunk in _chunks(items, CHUNK_BYTES, lambda x: x.clone() if items.passing else x):
            client.update_weights({"tensors": list(chunk.items())})
        client.finish_weight_update()


class ByFile:
    """safetensors files in a folder that both processes see, one at a time."""

    backend = BACKEND

    def __init__(self, folder: str | Path, chunk_bytes: int = CHUNK_BYTES):
        self.path, self.chunk_bytes = Path(folder) / "weights.safetensors", chunk_bytes

    def open(self, call: Call) -> None:
        pass

    def send(self, call: Call, items: Outgoing, *, draft: bool) -> None:
        client = _Client(call, draft)
        client.start_weight_update()
        # Copies: views of one tensor (a mixture's experts) may not be in a file together.
        for chunk in _chunks(items, self.chunk_bytes, lambda x: x.detach().to("cpu", copy=True).contiguous()):
            save_file(chunk, self.path)
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

    def send(self, call: Call, items: Outgoing, *, draft: bool) -> None:
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo
        from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer

        client, uuid = _Client(call, draft), str(torch.cuda.get_device_properties(self.device).uuid)
        size = max(self.chunk_bytes, items.largest)
        client.start_weight_update()
        for chunk in packed_ipc_producer(iter(items.aligned().tensors), uuid, lambda item: item[1].detach(), size):
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
        self._sender = NCCLTrainerWeightTransferEngine.trainer_init(
            info, client=_Client(call), source=_Source(outgoing({}))
        )

    def send(self, call: Call, items: Outgoing, *, draft: bool) -> None:
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

    def __init__(self, items: Outgoing):
        self._items = items.aligned()

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, dtype, shape) for name, shape, dtype in self._items.declared]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, value.detach()) for name, value in self._items.tensors)


def _chunks(items: Outgoing, most: int, keep: Callable[[Tensor], Tensor]) -> Iterator[dict[str, Tensor]]:
    """Tensors as `keep` makes them, together up to `most` bytes."""
    chunk: dict[str, Tensor] = {}
    size = 0
    for name, value in items.tensors:
        if chunk and size + value.nbytes > most:
            yield chunk
            chunk, size = {}, 0
        chunk[name] = keep(value)
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
