"""The training-time test on many ranks: shifts, trunk and normalisers cross cp shards, FSDP2 sums the gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from cospec.config import DraftConfig, MeshConfig
from cospec.draft.attach import attach_draft
from cospec.draft.ttt import pairs
from cospec.mesh import build_mesh
from cospec.ops.losses import draft_loss
from cospec.ops.shift import with_halo
from support.ttt_cases import D, V, make_documents, make_draft, pack

LENGTHS = [1, 2, 3, 4, 5, 6, 17]
PASSES = 4


class FakePolicy:
    """What attach_draft reads of a policy whose draft is `make_draft()`."""

    def __init__(self):
        self.config = type("Config", (), {"dim": D, "vocab_size": V, "layers": [None] * 4})


def loss_and_gradients(rank: int, world_size: int, flags: dict, mode: str, checkpoint: bool):
    """Summed loss, pair counts, gathered hidden rows and full gradients."""
    mesh = build_mesh(MeshConfig(cp=world_size), device="cpu") if world_size > 1 else None
    group = mesh.cp_group if mesh is not None else None
    draft = attach_draft(
        FakePolicy(),
        DraftConfig(init="tests", num_passes=PASSES),
        mesh=mesh,
        checkpoint=make_draft(**flags),
        dtype=torch.float64,
    )
    taps, batch = pack(make_documents(LENGTHS), cp_size=world_size, cp_rank=rank)
    rows_KS = pairs(batch, num_passes=PASSES, cp_group=group, t2d=draft.t2d)
    counts = (rows_KS >= 0).sum(1)
    if group is not None:
        dist.all_reduce(counts, group=group)
    coef = 0.8 ** torch.arange(PASSES, dtype=torch.float64) / counts.clamp(min=1)
    hidden = draft(taps, batch, num_passes=PASSES, cp_group=group, mode=mode, checkpoint=checkpoint)
    result = draft_loss(
        hidden,
        draft.lm_head.weight,
        with_halo(taps.final_hidden, batch.layout, PASSES, cp_group=group),
        torch.randn(V, D, dtype=torch.float64, generator=torch.Generator().manual_seed(5)),
        rows_KS,
        coef,
        vocab_map_U=draft.policy_ids,
        chunk=3,
    )
    result.loss.backward()
    loss = result.loss.detach().clone()
    if group is not None:
        dist.all_reduce(loss, group=group)
    gradients = {n: p.grad.full_tensor() if mesh is not None else p.grad for n, p in draft.named_parameters()}
    sums = torch.stack([result.alpha_sum, result.top1_sum])
    if group is not None:
        dist.all_reduce(sums, group=group)
        dist.barrier()
    return loss, counts, sums, torch.stack(hidden).detach(), gradients, batch.layout


@pytest.mark.parametrize(
    "flags, mode, checkpoint",
    [
        ({}, "ring", False),
        ({"own_embedding": True, "norm_output": True}, "gather", False),
        ({"sliding_window": 4, "qk_norm": True}, "ring", True),
    ],
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_many_ranks_equal_one(ranks, world_size, flags, mode, checkpoint):
    """Known failures 4, 13-16 and 44: loss, counts, states and every gradient of one rank, also with idle ranks."""
    loss, counts, sums, hidden, gradients, layout = loss_and_gradients(0, 1, flags, "ring", False)
    whole = layout.unshard([hidden], dim=1)
    results = ranks.run(world_size, loss_and_gradients, world_size, flags, mode, checkpoint)
    shards = [r[3] for r in results]
    got = results[0][5].unshard(shards, dim=1)
    torch.testing.assert_close(got, whole, rtol=1e-10, atol=1e-11)
    for result in results:
        torch.testing.assert_close(result[0], loss, rtol=1e-11, atol=1e-12)
        assert torch.equal(result[1], counts)
        torch.testing.assert_close(result[2], sums, rtol=1e-11, atol=1e-12)
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                result[4][name], gradient, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
            )
