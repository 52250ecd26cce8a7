"""Export of a draft that is sharded over ranks: the same bytes, one tensor at a time, errors on every rank."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cospec.config import ConfigError
from cospec.export.eagle3 import load_draft, save_draft
from cospec.tensor_writer import TensorWriter
from support.ttt_cases import make_draft


def sharded(**flags):
    draft = make_draft(dtype=torch.float32, **flags)
    fully_shard(draft, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), reshard_after_forward=False)
    return draft


def export_all(rank, folder):
    """Families written by the ranks together, and how many whole tensors lived at once meanwhile."""
    draft = sharded(own_embedding=True, norm_output=True)
    assert isinstance(draft.fc.weight, DTensor)
    gather, alive, most = DTensor.full_tensor, [], 0

    def counted(self, **options):
        nonlocal most
        gc.collect()
        whole = gather(self, **options)
        alive.append(weakref.ref(whole))
        most = max(most, sum(ref() is not None for ref in alive))
        return whole

    DTensor.full_tensor = counted
    try:
        for family in ("sglang", "vllm", "speculators"):
            save_draft(draft, f"{folder}/{family}", family=family, verifier="org/policy")
        save_draft(draft, f"{folder}/many", max_shard_bytes=1000)
    finally:
        DTensor.full_tensor = gather
    assert isinstance(draft.fc.weight, DTensor)
    return most, len(alive)


@pytest.mark.parametrize("world", [2, 3])
def test_a_sharded_draft_is_written_as_if_it_were_whole(ranks, tmp_path, world):
    """Byte for byte what one process writes; a rank never holds two whole tensors."""
    results = ranks.run(world, export_all, str(tmp_path))
    draft = make_draft(dtype=torch.float32, own_embedding=True, norm_output=True)
    assert results == [(1, 4 * len(list(draft.parameters())))] * world
    for family in ("sglang", "vllm", "speculators"):
        save_draft(draft, tmp_path / "whole" / family, family=family, verifier="org/policy")
        for name in ("model.safetensors", "config.json", "README.md"):
            whole, together = tmp_path / "whole" / family / name, tmp_path / family / name
            assert together.read_bytes() == whole.read_bytes(), (family, name)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    state = load_draft(tmp_path / "many").state_dict()
    assert all(torch.equal(state[name], value) for name, value in draft.state_dict().items())


def export_in_trouble(rank, folder, trouble):
    draft = sharded()
    path = Path(folder) / "draft"
    if trouble == "infinite":
        with torch.no_grad():
            for shard in [draft.lm_head.weight.to_local()]:
                if rank == dist.get_world_size() - 1 and shard.numel():
                    shard[-1, 0] = float("inf")
    elif trouble == "full disk" and rank == 0:

        def finish(self):
            raise OSError(28, "No space left on device")

        TensorWriter.finish, kept = finish, TensorWriter.finish
    elif trouble == "in use" and rank == 0:
        path.mkdir()
        (path / "mine").write_text("x")
    dist.barrier()
    try:
        save_draft(draft, path)
    except (ConfigError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if trouble == "full disk" and rank == 0:
            TensorWriter.finish = kept
        dist.barrier()


@pytest.mark.parametrize(
    "trouble, said", [("infinite", "lm_head.weight"), ("full disk", "No space left"), ("in use", "not empty")]
)
def test_an_error_reaches_every_rank(ranks, tmp_path, trouble, said):
    """Known failure 37: no rank waits for one that has given up, and nothing half-written stays."""
    results = ranks.run(2, export_in_trouble, str(tmp_path), trouble)
    assert all(said in str(result) for result in results), results
    left = [p.name for p in tmp_path.iterdir()]
    assert left == (["draft"] if trouble == "in use" else [])
    if trouble == "in use":
        assert [p.name for p in (tmp_path / "draft").iterdir()] == ["mine"]
