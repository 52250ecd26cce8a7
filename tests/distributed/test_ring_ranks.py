"""Trunk and branch attention over cp ranks, ring and gather, against the oracle and one rank."""

import pytest
import torch
import torch.distributed as dist

from cospec.layout import PackedLayout
from cospec.ops.kernels import KERNELS
from cospec.ops.ring import open_trunk, trunk_branch_attention
from cospec.policy.attention import PackedContext
from support import varlen_emulation
from support.attention_case import TOLERANCE, assert_close, inputs, local, oracle

# lengths, pad_to in padded rows for cp 1, 2, 4 alike, K
CASES = [
    ((16, 8, 40), None, 0),
    ((13, 1, 34, 2, 7), 96, 2),
    ((1, 1, 1), None, 1),
    ((150, 3), None, 1),
]


def run_cases(rank, jobs):
    """Results of several cases in one start: the group costs more than the attention."""
    return [run_case(rank, *job) for job in jobs]


def run_case(rank, lengths, pad_to, depth, dtype, mode, kernel, window):
    layout = PackedLayout(lengths, dist.get_world_size(), pad_to)
    tensors = inputs(lengths, depth, dtype)
    options = {"mode": mode, "kernel": kernel, "window": window}
    shards = local(tensors, layout, rank=rank, group=dist.group.WORLD, **options)
    padding = ~layout.valid(rank)
    assert all((x[padding] == 0).all() for x in shards)  # False for the nan that the inputs hold there
    return shards


@pytest.mark.parametrize("world_size", [2, 4])
def test_equals_the_oracle(ranks, world_size):
    """Known failures 7, 8, 15: out and all gradients do not depend on cp, nor on ring or gather."""
    jobs = []
    for lengths, pad_to, depth in CASES:
        for mode in ("ring", "gather"):
            jobs.append((lengths, pad_to, depth, torch.float64, mode, None, None))
            jobs.append((lengths, pad_to, depth, torch.float32, mode, "math", None))
        jobs.append((lengths, pad_to, depth, torch.float32, "ring", None, None))
        jobs.append((lengths, pad_to, depth, torch.bfloat16, "ring", None, None))
        jobs.append((lengths, pad_to, depth, torch.bfloat16, "gather", None, None))
        jobs.append((lengths, pad_to, depth, torch.float64, "ring", None, 6))
    results = ranks.run(world_size, run_cases, jobs)
    for i, (lengths, pad_to, depth, dtype, _mode, _kernel, window) in enumerate(jobs):
        layout = PackedLayout(lengths, world_size, pad_to)
        whole = [layout.unshard(shards) for shards in zip(*[r[i] for r in results], strict=True)]
        tensors = inputs(lengths, depth, dtype)
        assert_close(whole, oracle(tensors, lengths, window=window), TOLERANCE[dtype])
        if dtype == torch.float64:
            one = PackedLayout(lengths)
            alone = [one.unshard([x]) for x in local(tensors, one, window=window)]
            assert_close(whole, alone, 1e-13)


def emulated_cuda(rank, lengths, depth):
    aten = torch.ops.aten
    before = aten._flash_attention_forward, aten._flash_attention_backward
    varlen_emulation.install(setattr)
    try:
        return run_case(rank, lengths, None, depth, torch.float32, "ring", KERNELS["cuda_flash"], None)
    finally:
        aten._flash_attention_forward, aten._flash_attention_backward = before


@pytest.mark.parametrize("world_size", [2, 4])
def test_cuda_kernel_arguments(ranks, world_size):
    """The CUDA kernel's calls, with their documented meaning emulated on CPU."""
    lengths, depth = (13, 1, 34, 2, 7), 1
    shards = ranks.run(world_size, emulated_cuda, lengths, depth)
    whole = [PackedLayout(lengths, world_size).unshard(x) for x in zip(*shards, strict=True)]
    assert_close(whole, oracle(inputs(lengths, depth, torch.float32), lengths), 1e-5)


def saved_bytes(rank, lengths, depth):
    layout = PackedLayout(lengths, dist.get_world_size())
    q, k, v, *branches = (layout.shard(x, rank).requires_grad_() for x in inputs(lengths, depth, torch.float32)[:-1])
    trunk = open_trunk(k, v, layout, cp_group=dist.group.WORLD)
    storages = {}

    def count(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        trunk_branch_attention(q, trunk, branches[:depth], branches[depth:])
    return sum(storages.values())


def test_memory_kept_for_backward_shrinks_with_cp(ranks):
    """The ring keeps q, out, lse, one trunk shard and the branches: of local size, whatever cp is."""
    two, four = (ranks.run(n, saved_bytes, (64, 32), 2)[0] for n in (2, 4))
    assert two == 2 * four
    row = 4 * (2 * 4 * 16 + 4 + 2 * 2 * 16 + 4 * 2 * 16)
    assert four == row * 96 // 4


def ring_and_gather(rank, lengths, depth):
    job = (lengths, None, depth, torch.float32)
    return run_case(rank, *job, "ring", None, None), run_case(rank, *job, "gather", None, None)


def test_modes_agree(ranks):
    """The order of blocks is the same, so out and the gradients of q and branches are equal to the bit."""
    for ring, gather in ranks.run(4, ring_and_gather, (33, 6, 17), 2):
        for i, (a, b) in enumerate(zip(ring, gather, strict=True)):
            if i in (2, 3):  # trunk dk, dv: summed in another order
                torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
            else:
                assert torch.equal(a, b)


def changed_document(rank, lengths):
    layout = PackedLayout(lengths, dist.get_world_size())
    before = inputs(lengths, 2, torch.float32)
    after = [x.clone() for x in before]
    for x in after:
        x[: lengths[0]] = 3 * x[: lengths[0]].flip(0) + 1
    return [local(x, layout, rank=rank, group=dist.group.WORLD) for x in (before, after)], layout.document(rank)


def test_other_documents_are_bit_equal(ranks):
    """Known failures 4, 6."""
    for (before, after), document in ranks.run(2, changed_document, (9, 30, 4, 9)):
        for a, b in zip(before, after, strict=True):
            assert torch.equal(a[document > 0], b[document > 0])


def passes(rank, mode, lengths, num_passes):
    """All passes of one trunk: gradients of the trunk, and the bytes sent."""
    layout = PackedLayout(lengths, dist.get_world_size())
    q, k, v, *_, grad = (layout.shard(x, rank).requires_grad_() for x in inputs(lengths, 0, torch.float64))
    trunk = open_trunk(k, v, layout, cp_group=dist.group.WORLD, mode=mode)
    loss = sum((trunk_branch_attention(q * (1 + i), trunk) * grad).sum() for i in range(num_passes))
    loss.backward()
    return q.grad, k.grad, v.grad, trunk.traffic.sent


@pytest.mark.parametrize("world_size", [2, 4])
def test_many_passes_of_one_trunk(ranks, world_size):
    """Gradients add up over passes; gather sends at most 1 / K of the ring's bytes, 10 % allowed."""
    lengths, num_passes = (21, 8, 11), 4
    ring = ranks.run(world_size, passes, "ring", lengths, num_passes)
    gather = ranks.run(world_size, passes, "gather", lengths, num_passes)
    layout = PackedLayout(lengths)
    q, k, v, *_, grad = (layout.shard(x, 0).requires_grad_() for x in inputs(lengths, 0, torch.float64))
    trunk = open_trunk(k, v, layout)
    sum((trunk_branch_attention(q * (1 + i), trunk) * grad).sum() for i in range(num_passes)).backward()
    for results in (ring, gather):
        shards = PackedLayout(lengths, world_size)
        for i, x in enumerate((q, k, v)):
            whole = shards.unshard([r[i] for r in results])
            torch.testing.assert_close(whole, layout.unshard([x.grad]), rtol=1e-12, atol=1e-12)
    for (*_, ring_bytes), (*_, gather_bytes) in zip(ring, gather, strict=True):
        assert 0 < gather_bytes <= ring_bytes / num_passes * 1.1


def subgroup(rank, lengths):
    """Two rings of two ranks side by side, in one world of four."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    layout = PackedLayout(lengths, 2)
    tensors = inputs(lengths, 1, torch.float64, seed=rank % 2)
    return [local(tensors, layout, rank=dist.get_rank(group), group=group, mode=mode) for mode in ("ring", "gather")]


def test_groups_that_are_not_the_world(ranks):
    lengths = (10, 3)
    results = ranks.run(4, subgroup, lengths)
    layout = PackedLayout(lengths, 2)
    for first, second in ((0, 2), (1, 3)):
        expected = oracle(inputs(lengths, 1, torch.float64, seed=first), lengths)
        for mode in (0, 1):
            pairs = zip(results[first][mode], results[second][mode], strict=True)
            assert_close([layout.unshard(pair) for pair in pairs], expected, 1e-12)


def policy_context(rank, lengths, no_grad):
    layout = PackedLayout(lengths, dist.get_world_size())
    context = PackedContext(layout, dist.group.WORLD)
    q, k, v, *_ = (layout.shard(x, rank) for x in inputs(lengths, 0, torch.float32))
    with torch.set_grad_enabled(not no_grad):
        return context.attend(0, q, k, v, 0.25)


@pytest.mark.parametrize("no_grad", [False, True])
def test_policy_context(ranks, no_grad):
    lengths = (12, 5)
    shards = ranks.run(2, policy_context, lengths, no_grad)
    expected = oracle(inputs(lengths, 0, torch.float32), lengths, scale=0.25)[0]
    assert_close([PackedLayout(lengths, 2).unshard(shards)], [expected], 1e-5)


def wrong_group(rank):
    k = torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match="cp_group has 2 ranks, the layout has cp_size=4"):
        open_trunk(k, k, PackedLayout((16,), 4), cp_group=dist.group.WORLD)
    with pytest.raises(ValueError, match="k has 4 rows, the layout has 8"):
        open_trunk(k, k, PackedLayout((16,), 2), cp_group=dist.group.WORLD)


def test_errors(ranks):
    ranks.run(2, wrong_group)
