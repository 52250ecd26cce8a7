"""vLLM's weight-transfer API as refits use it: what each way sends, and that vLLM's own code can take it.

No GPU here: CUDA is stood in for where a handle, a stream or a broadcast would need it; the
packing, the unpacking and the classes of requests are vLLM's. Known failure 40.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from vllm_case import need_vllm

need_vllm()

from cospec.rollout.vllm_refit import (  # noqa: E402
    CALLS,
    ByFile,
    ByIpc,
    ByNccl,
    HandOver,
    Outgoing,
    choose_transfer,
    outgoing,
    register_backend,
)
from cospec.rollout.vllm_start import import_vllm  # noqa: E402

import_vllm()
register_backend()
from safetensors.torch import load_file  # noqa: E402
from vllm.config import WeightTransferConfig  # noqa: E402
from vllm.distributed.weight_transfer import ipc_engine, nccl_engine, packed_tensor  # noqa: E402
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # noqa: E402
from vllm.entrypoints.llm import LLM  # noqa: E402

from cospec.rollout.vllm_backend import TensorUpdate  # noqa: E402

GPU = torch.device("cuda", 1)
UUID = "GPU-1"


def tensors(seed=0):
    """Dtypes in an order that packs badly, odd sizes, a view, a transposed one."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator).to(dtype)

    whole = normal(4, 6)
    return {
        "model.norm.weight": normal(3, dtype=torch.bfloat16),
        "model.layers.0.up_proj.weight": normal(5, 7),
        "d2t": torch.arange(5),
        "experts.0": whole[:2],
        "experts.1": whole[2:],
        "turned": normal(3, 2).T,
    }


class Recorder:
    """Stands for vLLM: notes the calls, and reads at once what an update carries."""

    def __init__(self, read=lambda info: {}):
        self.calls, self.got, self.sizes, self._read = [], {}, [], read

    def __call__(self, name, *args):
        assert name in CALLS
        assert callable(getattr(LLM, name))
        self.calls.append(name)
        if name == "init_weight_transfer_engine":
            self.init = args[0]["init_info"]
        if name == "update_weights":
            read = self._read(args[0]["update_info"])
            self.sizes.append(sum(value.nbytes for value in read.values()))
            self.got |= {key: value.clone() for key, value in read.items()}


def assert_arrived(recorder, sent, draft, updates):
    start = "start_draft_weight_update" if draft else "start_weight_update"
    assert recorder.calls == [start, *["update_weights"] * updates, "finish_weight_update"]
    assert recorder.got.keys() == sent.keys()
    for name, value in sent.items():
        assert recorder.got[name].dtype == value.dtype
        assert torch.equal(recorder.got[name], value), name


@pytest.mark.parametrize("draft", [False, True])
def test_within_a_process_the_tensors_themselves_go(draft):
    recorder, sent = Recorder(lambda info: dict(TensorUpdate(**info).load())), tensors()
    HandOver().send(recorder, outgoing(sent), draft=draft)
    assert_arrived(recorder, sent, draft, updates=1)


@pytest.mark.parametrize("chunk, updates", [(1, 6), (200, 2), (10**6, 1)])
def test_files_come_one_at_a_time_and_go(tmp_path, chunk, updates):
    recorder, sent = Recorder(lambda info: dict(TensorUpdate(**info).load())), tensors()
    ByFile(tmp_path, chunk).send(recorder, outgoing(sent), draft=True)
    assert_arrived(recorder, sent, True, updates)
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_an_update_that_failed_does_not_matter_to_the_next(tmp_path):
    def refuse(name, *args):
        if name == "update_weights":
            assert load_file(args[0]["update_info"]["path"])
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        ByFile(tmp_path).send(refuse, outgoing(tensors()), draft=False)
    recorder, sent = Recorder(lambda info: dict(TensorUpdate(**info).load())), tensors(1)
    ByFile(tmp_path).send(recorder, outgoing(sent), draft=False)
    assert_arrived(recorder, sent, False, 1)


def test_an_update_has_tensors_or_a_file():
    with pytest.raises(ValueError, match="either"):
        TensorUpdate()
    with pytest.raises(ValueError, match="either"):
        TensorUpdate(tensors=[], path="x")


def test_the_way_is_chosen_by_the_devices(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.current_device", lambda: 1)
    cpu = torch.device("cpu")
    for trainer, engine, expected in (
        (cpu, cpu, ByFile),
        (GPU, cpu, ByFile),
        (GPU, GPU, ByIpc),
        (GPU, torch.device("cuda"), ByIpc),
        (GPU, torch.device("cuda", 0), ByNccl),
    ):
        transfer = choose_transfer(trainer, engine, tmp_path)
        assert type(transfer) is expected
        assert WeightTransferConfig(backend=transfer.backend).backend in WeightTransferEngineFactory._registry


@pytest.fixture
def fake_cuda(monkeypatch):
    """vLLM's code for CUDA on CPU tensors: streams do nothing, a handle is the tensor's place in a list."""
    exported, opened = [], []
    nothing = SimpleNamespace(synchronize=lambda: None)

    def reduce_tensor(tensor):
        exported.append(tensor)
        return None, ("class", "size", "stride", "offset", "storage", "dtype", "device", len(exported) - 1)

    def rebuild(*args):
        assert args[6] == 0  # the worker's own index for the device
        opened.append(args[7])
        return exported[args[7]]

    real_empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, device=None, **kw: real_empty(*a, **kw))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *a: nothing)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(packed_tensor, "reduce_tensor", reduce_tensor)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda index, count: (nothing,) * count)
    monkeypatch.setattr("torch.multiprocessing.reductions.rebuild_cuda_tensor", rebuild)
    return SimpleNamespace(exported=exported, opened=opened)


def parameters(engine_class):
    """vLLM's receiving side around a recording model."""
    config = SimpleNamespace(parallel_config=None, model_config=None)
    engine = engine_class(None, config, torch.device("cuda", 0), SimpleNamespace(loaded={}))
    engine.model.load_weights = lambda pairs: engine.model.loaded.update({k: v.clone() for k, v in pairs})
    return engine


@pytest.mark.parametrize("chunk, updates, buffer", [(1, 3, 140), (150, 3, 150), (10**4, 1, 10**4)])
@pytest.mark.parametrize("draft", [False, True])
def test_ipc_handles_are_packed_as_vllm_unpacks_them(fake_cuda, chunk, updates, buffer, draft):
    worker = parameters(ipc_engine.IPCWeightTransferEngine)

    def read(info):
        """What the worker's `update_weights` does, less the synchronisation of a device."""
        worker.model.loaded = {}
        update = worker.parse_update_info(info)
        assert sum(update.tensor_sizes) <= buffer
        assert update.ipc_handles.keys() == {UUID}
        worker.receive_weights(update)
        return worker.model.loaded

    recorder, sent = Recorder(read), tensors()
    transfer = ByIpc(GPU, chunk)
    transfer.open(recorder)
    worker.init_transfer_engine(worker.parse_init_info(recorder.init))
    assert worker.packed
    recorder.calls.clear()
    transfer.send(recorder, outgoing(sent), draft=draft)
    assert_arrived(recorder, sent, draft, updates)
    assert [tensor.nbytes for tensor in fake_cuda.exported] == [buffer]  # one, whatever the model's size
    assert fake_cuda.opened == [0]
    transfer.send(recorder, outgoing(tensors(1)), draft=draft)
    assert all(torch.equal(recorder.got[name], value) for name, value in tensors(1).items())


def passing(tensors):
    """As a stream gives them: each in the memory of the one before."""
    memory = torch.empty(max(value.nbytes for value in tensors.values()), dtype=torch.uint8)

    def one_by_one():
        for name, value in tensors.items():
            place = memory[: value.nbytes].view(value.dtype).view(value.shape)
            yield name, place.copy_(value)
        memory.fill_(0)

    return Outgoing(outgoing(tensors).declared, one_by_one(), passing=True)


def test_tensors_that_pass_are_kept_as_long_as_vllm_needs_them(fake_cuda, tmp_path):
    def read_file_or_tensors(info):
        held.append(TensorUpdate(**info).load())
        return {}

    worker = parameters(ipc_engine.IPCWeightTransferEngine)
    worker.packed = True

    def read_handle(info):
        worker.model.load_weights = lambda pairs: held.append(list(pairs))
        worker.receive_weights(worker.parse_update_info(info))
        return {}

    sent = tensors() | {"more": torch.ones(3, dtype=torch.float64)}
    for transfer, read in (
        (HandOver(), read_file_or_tensors),
        (ByFile(tmp_path, 60), read_file_or_tensors),
        (ByIpc(GPU, 10), read_handle),
    ):
        for wanted in (sent, {name: value for name, value in sent.items() if value.dtype == torch.float32}):
            held = []
            transfer.send(Recorder(read), passing(wanted), draft=False)
            got = dict(pair for pairs in held for pair in pairs)
            assert got.keys() == wanted.keys()
            assert all(torch.equal(got[name], value) for name, value in wanted.items()), type(transfer)


class Broadcasts:
    """A group of two: what the sender broadcasts the receiver gets, buffer by buffer, of the same size."""

    def __init__(self):
        self.sent = []

    def broadcast(self, tensor, src, stream=None):
        assert src == 0
        self.sent.append(tensor.clone())


class Receives:
    def __init__(self, sent):
        self.sent = list(sent)

    def broadcast(self, tensor, src):
        given = self.sent.pop(0)
        assert given.shape == tensor.shape
        tensor.copy_(given)


@pytest.mark.filterwarnings("ignore:Tensor")
@pytest.mark.parametrize("chunk", [1, 150, 10**4])
@pytest.mark.parametrize("draft", [False, True])
def test_nccl_buffers_are_cut_as_vllm_cuts_them(fake_cuda, monkeypatch, chunk, draft):
    group, worker = Broadcasts(), parameters(nccl_engine.NCCLWeightTransferEngine)
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: group)
    monkeypatch.setattr(
        nccl_engine, "worker_init_process_group", lambda info, parallel: (info.rank_offset, info.world_size)
    )
    updates = []
    recorder, sent, transfer = Recorder(lambda info: updates.append(info) or {}), tensors(), ByNccl(chunk)
    transfer.open(recorder)
    worker.init_transfer_engine(worker.parse_init_info(recorder.init))
    assert worker.model_update_group == (1, 2)
    assert (worker.packed, worker.packed_buffer_size_bytes) == (True, chunk)
    recorder.calls.clear()
    transfer.send(recorder, outgoing(sent), draft=draft)
    worker.model_update_group = Receives(group.sent)
    worker.receive_weights(worker.parse_update_info(updates[0]))
    assert worker.model_update_group.sent == []
    recorder.got = worker.model.loaded
    assert_arrived(recorder, sent, draft, updates=1)
