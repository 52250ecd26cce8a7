"""Shared by all tests: one thread, repeatable hypothesis, the pool of ranks, GPU skips."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

from support.pool import Ranks

torch.set_num_threads(1)
settings.register_profile("cospec", derandomize=True, deadline=None, database=None, max_examples=50)
settings.load_profile("cospec")


@pytest.fixture(scope="session")
def ranks():
    """`ranks.run(world_size, fn, *args) -> list of per-rank results`; see support.pool.Ranks."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def one_process(tmp_path_factory):
    """The record of `mesh_runs.rl` on a single process, which runs on meshes must match."""
    from cospec.train import loop
    from support import mesh_runs
    from support.tiny_runs import record

    folder = tmp_path_factory.mktemp("alone")
    loop.run_rl(mesh_runs.rl(folder, (1, 1, 1)))
    return record(folder)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
