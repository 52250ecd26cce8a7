"""The record of a run of many ranks."""

from cospec.config import ConfigError, MeshConfig, RunConfig
from cospec.mesh import build_mesh
from cospec.train.metrics import MetricsLog, reduce_sums


def _refused(rank, folder):
    try:
        MetricsLog(RunConfig(output_dir=folder), rank=rank)
    except ConfigError as error:
        return str(error)
    return "no error"


def test_a_folder_in_use_is_refused_on_every_rank(ranks, tmp_path):
    """Known failure 37: an error on one rank must not leave the others waiting."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    first, second = ranks.run(2, _refused, str(tmp_path))
    assert "holds a run already" in first
    assert "rank 0 cannot use it" in second


def _sums(rank):
    mesh = build_mesh(MeshConfig(pp=2, dp=2), device="cpu")
    # as dicts keep order and ranks may differ in it, only names may decide what is added to what
    values = {"tokens": 10.0 + rank, "ones": 1.0}
    return reduce_sums(values if rank % 2 else dict(reversed(values.items())), mesh)


def test_sums_are_over_dp_and_not_over_pipeline_stages(ranks):
    """Known failure 19: what every stage knows is not counted once a stage."""
    results = ranks.run(4, _sums)
    assert [r["ones"] for r in results] == [2.0] * 4
    assert [r["tokens"] for r in results] == [21.0, 21.0, 25.0, 25.0]
