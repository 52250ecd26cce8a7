"""The pool itself: it must not let a broken rank pass, hang or spoil the next test."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from support.pool import RankError


def _sum(rank, offset):
    total = torch.tensor(float(rank + offset))
    dist.all_reduce(total)
    return total, os.getpid(), torch.get_num_threads()


def _fail_on_one(rank, culprit):
    if rank == culprit:
        raise ValueError(f"broken on purpose on {rank}")
    dist.barrier()


def _die(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _hang(rank):
    if rank == 0:
        time.sleep(600)


def _sub_groups(rank, pairs):
    """A mesh whose groups differ from call to call, used through DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", pairs, mesh_dim_names=("a", "b"))
    x = torch.arange(8.0)
    sharded = distribute_tensor(x, mesh["b"], [Shard(0)])
    return (sharded * 2).sum().full_tensor().item()


def test_results_come_in_rank_order_from_persistent_single_thread_workers(ranks):
    first = ranks.run(2, _sum, 1)
    again = ranks.run(2, _sum, 10)
    assert [r[0].item() for r in first] == [3.0, 3.0]
    assert [r[0].item() for r in again] == [21.0, 21.0]
    assert [r[1] for r in first] == [r[1] for r in again]
    assert {r[2] for r in first} == {1}


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_error_on_one_rank_is_raised_with_its_traceback(ranks, culprit):
    with pytest.raises(RankError, match=rf"(?s)rank {culprit} of 2.*_fail_on_one.*broken on purpose on {culprit}"):
        ranks.run(2, _fail_on_one, culprit)
    assert len(ranks.run(2, _sum, 0)) == 2


def test_a_killed_worker_is_noticed_and_replaced(ranks):
    with pytest.raises(RankError, match=r"rank 1 of 2\] the worker process was killed by SIGKILL"):
        ranks.run(2, _die)
    assert len(ranks.run(2, _sum, 0)) == 2


def test_a_hang_ends_with_the_stack_of_the_stuck_rank(ranks):
    start = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 0 of 2\] hung: no result within 1 s.*_hang"):
        ranks.run(2, _hang, timeout_s=1)
    assert time.monotonic() - start < 20
    assert len(ranks.run(2, _sum, 0)) == 2


def test_meshes_of_earlier_calls_do_not_leak_into_later_ones(ranks):
    for shape in [(2, 2), (1, 4), (4, 1), (2, 2)]:
        assert ranks.run(4, _sub_groups, shape) == [56.0] * 4


def test_a_function_that_workers_cannot_import_is_refused(ranks):
    with pytest.raises(ValueError, match="top-level function"):
        ranks.run(2, lambda rank: rank)
    with pytest.raises(ValueError, match="world_size"):
        ranks.run(9, _sum, 0)
