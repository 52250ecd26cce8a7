"""DTensors sharded over cp take the path of plain shards: outputs, gradients, and what is refused."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from cospec.layout import PackedLayout
from cospec.ops.ring import open_trunk, trunk_branch_attention
from cospec.ops.shift import shift
from support.attention_case import assert_close, inputs, local, oracle

LENGTHS, DEPTH = (13, 1, 34), 2


def cp_mesh(name: str = "cp"):
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))


def sharded(x: torch.Tensor, mesh) -> DTensor:
    return DTensor.from_local(x, mesh, [Shard(0)], run_check=False)


def attention(rank, mode):
    layout, mesh = PackedLayout(LENGTHS, 2), cp_mesh()
    tensors = inputs(LENGTHS, DEPTH, torch.float64)
    *leaves, grad = [sharded(layout.shard(x, rank), mesh) for x in tensors]
    leaves = [x.detach().requires_grad_() for x in leaves]
    trunk = open_trunk(leaves[1], leaves[2], layout, mode=mode)
    out = trunk_branch_attention(leaves[0], trunk, leaves[3 : 3 + DEPTH], leaves[3 + DEPTH :])
    results = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    assert all(isinstance(x, DTensor) and x.placements == (Shard(0),) and x.device_mesh == mesh for x in results)
    assert out.shape == (layout.num_rows, *tensors[0].shape[1:])
    plain = local(tensors, layout, rank=rank, group=dist.group.WORLD, mode=mode, garbage=0.0)
    assert all(torch.equal(a.to_local(), b) for a, b in zip(results, plain, strict=True))
    return [x.to_local() for x in results]


@pytest.mark.parametrize("mode", ["ring", "gather"])
def test_attention(ranks, mode):
    shards = ranks.run(2, attention, mode)
    layout = PackedLayout(LENGTHS, 2)
    whole = [layout.unshard(pair) for pair in zip(*shards, strict=True)]
    assert_close(whole, oracle(inputs(LENGTHS, DEPTH, torch.float64), LENGTHS), 1e-12)


def shifts(rank):
    layout, mesh = PackedLayout(LENGTHS, 2), cp_mesh()
    x = layout.shard(torch.randn(layout.num_tokens, 3, generator=torch.Generator().manual_seed(1)), rank)
    leaf, plain = sharded(x, mesh).requires_grad_(), x.clone().requires_grad_()
    for by in (1, 3):
        out, want = shift(leaf, layout, by), shift(plain, layout, by, cp_group=dist.group.WORLD)
        assert isinstance(out, DTensor)
        assert torch.equal(out.to_local(), want)
        (grad,) = torch.autograd.grad(out, leaf, sharded(torch.full_like(x, 2.0), mesh))
        (want_grad,) = torch.autograd.grad(want, plain, torch.full_like(x, 2.0))
        assert isinstance(grad, DTensor)
        assert grad.placements == (Shard(0),)
        assert torch.equal(grad.to_local(), want_grad)
        assert want_grad.abs().sum() > 0


def test_shift(ranks):
    ranks.run(2, shifts)


def refused(rank):
    layout, mesh = PackedLayout(LENGTHS, 2), cp_mesh()
    rows = torch.zeros(layout.num_local_rows, 2, 8)
    k = sharded(rows, mesh)
    for bad, message in (
        (DTensor.from_local(rows, mesh, [Replicate()]), "must be Shard\\(0\\).*Replicate"),
        (DTensor.from_local(rows, mesh, [Shard(1)]), "must be Shard\\(0\\).*dim=1"),
        (sharded(rows, cp_mesh("dp")), "one axis 'cp'.*'dp'"),
        (rows, "a plain tensor .* beside DTensors"),
    ):
        with pytest.raises(ValueError, match=message):
            open_trunk(k, bad, layout)
        with pytest.raises(ValueError, match=message):
            trunk_branch_attention(k, open_trunk(k, k, layout), [bad], [bad])
    with pytest.raises(ValueError, match="k has 12 rows"):
        open_trunk(sharded(rows[:12], mesh), sharded(rows[:12], mesh), layout)
    alone = dist.new_group([0]), dist.new_group([1])
    with pytest.raises(ValueError, match=r"mesh has ranks \[0, 1\], cp_group has"):
        open_trunk(k, k, layout, cp_group=alone[rank])
    other = open_trunk(torch.zeros(50, 2, 8), torch.zeros(50, 2, 8), PackedLayout(LENGTHS))
    with pytest.raises(ValueError, match=r"mesh has ranks \[0, 1\], cp_group has"):
        trunk_branch_attention(k, other)


def test_other_placements_are_refused(ranks):
    ranks.run(2, refused)
