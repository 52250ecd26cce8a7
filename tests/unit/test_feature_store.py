"""The feature store: lazy reading, atomic and restartable writing, refusals."""

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cospec.config import ConfigError
from cospec.features import store as store_module
from cospec.features.source import BadSamples, split_by_document, tokenizer_hash
from cospec.features.store import FeatureStore, StoreError, StoreWriter, shard_name
from support.feature_files import DT, P, make_feature_document, make_info, write_store


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_documents_come_back(tmp_path, dtype):
    documents = write_store(tmp_path, dtype=dtype)
    store = FeatureStore(tmp_path, open_shards=1)
    assert len(store) == 10
    assert store.info == make_info(dtype=dtype)
    for i in [9, 0, 5, 4, 9]:
        got, expected = store[i], documents[i]
        assert got.input_ids.dtype == torch.int64
        assert torch.equal(got.input_ids, expected.input_ids)
        assert torch.equal(got.loss_mask, expected.loss_mask)
        kind = getattr(torch, dtype)
        assert torch.equal(got.taps, expected.taps.to(kind))
        assert torch.equal(got.last_hidden, expected.last_hidden.to(kind))
        # A copy, not a view that keeps a whole shard mapped.
        assert got.taps.untyped_storage().nbytes() == got.taps.nbytes
        assert torch.equal(store.tokens(i).input_ids, expected.input_ids)
    with pytest.raises(IndexError, match="document 10 of 10"):
        store[10]


def test_dataset_view(tmp_path):
    documents = write_store(tmp_path)
    view = FeatureStore(tmp_path).as_dataset()
    assert len(view) == 10
    assert torch.equal(torch.as_tensor(view[7]["taps"]), documents[7].taps)
    assert [len(x) for x in view[2:4]["input_ids"]] == [len(documents[i].input_ids) for i in (2, 3)]


def test_bad_documents_are_left_out_and_listed(tmp_path):
    """Known failures 28, 29, 31: non-finite, misshapen, unsupervised samples are skipped, counted, named."""
    good = [make_feature_document(i) for i in range(6)]
    nan = good[1].taps.clone()
    nan[2, 3] = float("nan")
    bad = [
        good[0],
        replace(good[1], taps=nan),
        replace(good[2], loss_mask=torch.zeros_like(good[2].loss_mask)),
        replace(good[3], input_ids=good[3].input_ids + 1000),
        replace(good[4], last_hidden=good[4].last_hidden[:-1]),
        replace(good[5], taps=good[5].taps[:, :-DT]),
    ]
    writer = StoreWriter(tmp_path, make_info(), num_shards=1)
    writer.write_shard(0, list(enumerate(bad)), skipped=[("sample 6", "template error")])
    writer.finish()
    store = FeatureStore(tmp_path)
    assert len(store) == 1
    text = "\n".join(": ".join(s) for s in store.skipped)
    for i, reason in [(1, "non-finite"), (2, "supervises no token"), (3, "outside"), (4, "shape"), (5, "width")]:
        assert any(f"sample {i}" in line and reason in line for line in text.splitlines()), (i, text)
    assert "sample 6: template error" in text


def test_a_store_of_nothing_is_refused(tmp_path):
    document = make_feature_document(0)
    writer = StoreWriter(tmp_path, make_info(), num_shards=1)
    writer.write_shard(0, [(0, replace(document, loss_mask=torch.zeros_like(document.loss_mask)))])
    with pytest.raises(ConfigError, match="no document could be kept .*sample 0: loss_mask supervises no token"):
        writer.finish()
    with pytest.raises(ConfigError, match="must be >= 1: there is nothing to extract"):
        StoreWriter(tmp_path / "b", make_info(), num_shards=0)


def test_an_unfinished_store_shows_whole_documents_only(tmp_path):
    documents = [make_feature_document(i) for i in range(8)]
    writer = StoreWriter(tmp_path, make_info(), num_shards=2)
    writer.write_shard(1, [(i, documents[i]) for i in range(4, 8)])
    (tmp_path / f"{store_module.TEMPORARY}1-{shard_name(0)}").write_bytes(b"half")
    with pytest.raises(ConfigError, match="not finished: 1 of 2 shards"):
        FeatureStore(tmp_path)
    store = FeatureStore(tmp_path, allow_incomplete=True)
    assert [int(s) for s in store.arrays["source"]] == [4, 5, 6, 7]
    assert torch.equal(store[2].taps, documents[6].taps)
    with pytest.raises(StoreError, match="1 shards are missing, first 0"):
        writer.finish()


def test_continuing_gives_the_same_bytes_and_clears_leftovers(tmp_path):
    write_store(tmp_path / "whole")
    info = make_info()
    first = StoreWriter(tmp_path / "parts", info, num_shards=3)
    first.write_shard(2, [(i, make_feature_document(i)) for i in (8, 9)])
    with pytest.raises(StoreError, match="another extraction is writing"):
        StoreWriter(tmp_path / "parts", info, num_shards=3)
    first.close()
    (tmp_path / "parts" / f"{store_module.TEMPORARY}9-{shard_name(0)}").write_bytes(b"half")
    second = StoreWriter(tmp_path / "parts", info, num_shards=3)
    assert second.missing() == [0, 1]
    for shard in second.missing():
        second.write_shard(shard, [(i, make_feature_document(i)) for i in range(4 * shard, 4 * shard + 4)])
    second.finish()
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


@pytest.mark.parametrize("name, value", [("tap_layers", (0, 1, 3)), ("dtype", "bfloat16"), ("hidden_size", 16)])
def test_another_definition_is_refused(tmp_path, name, value):
    """Known failure 36: settings that define the store changed in silence."""
    write_store(tmp_path)
    with pytest.raises(ConfigError, match=name):
        StoreWriter(tmp_path, make_info(**{name: value}), num_shards=3)


def test_a_folder_of_something_else_is_not_touched(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="holds thesis.tex"):
        StoreWriter(tmp_path, make_info(), num_shards=3)
    assert list(tmp_path.iterdir()) == [tmp_path / "thesis.tex"]
    with pytest.raises(ConfigError, match=r"no store\.json"):
        FeatureStore(tmp_path)


def test_a_full_disk_leaves_nothing_half_written(tmp_path):
    """A file size limit stands in for a full disk: an error, the shards before it stay, no temporary file."""
    writer = StoreWriter(tmp_path, make_info(), num_shards=2)
    writer.write_shard(0, [(0, make_feature_document(0))])
    before = contents(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(StoreError, match=r"cannot write .*shard-00001.*complete before is still there"):
            writer.write_shard(1, [(1, make_feature_document(1, 400))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert contents(tmp_path) == before
    writer.write_shard(1, [(1, make_feature_document(1, 400))])
    writer.finish()
    assert len(FeatureStore(tmp_path)) == 2


def test_damage_is_named(tmp_path):
    write_store(tmp_path)
    path = tmp_path / shard_name(1)
    path.write_bytes(path.read_bytes()[:-5])
    store = FeatureStore(tmp_path)
    store[0]
    with pytest.raises(StoreError, match=r"shard-00001.* bytes, the index says"):
        store[4]
    description = json.loads((tmp_path / "store.json").read_text())
    (tmp_path / "store.json").write_text(json.dumps({**description, "format_version": 99}))
    with pytest.raises(ConfigError, match="format version 99, this cospec reads up to 1"):
        FeatureStore(tmp_path)


def test_split_by_document_keeps_equal_documents_together(tmp_path):
    """Known failure 33: no leak between training and validation, whatever the order."""
    twin = make_feature_document(3)
    documents = [make_feature_document(i) for i in range(40)] + [replace(twin, name="twin")]
    writer = StoreWriter(tmp_path, make_info(), num_shards=1)
    writer.write_shard(0, list(enumerate(documents)))
    writer.finish()
    train, validation = split_by_document(FeatureStore(tmp_path), 0.3)
    assert sorted(train + validation) == list(range(41))
    assert 0 < len(validation) < 25
    assert (3 in validation) == (40 in validation)
    with pytest.raises(ConfigError, match="validation_share"):
        split_by_document(FeatureStore(tmp_path), 1.0)


def test_too_many_bad_samples_are_an_error():
    bad = BadSamples(0.1)
    for i in range(30):
        bad.add(i, f"file {i}: truncated" if i == 7 else None)
    bad.check(final=True)
    assert "file 7: truncated" in bad.report()
    for i in range(30, 60):
        bad.add(i, f"file {i}: truncated")
    with pytest.raises(ConfigError, match="31 of 60 samples are bad"):
        bad.check()


def test_tokenizer_hash_tells_tokenizers_apart():
    assert tokenizer_hash({"a": 0, "b": 1}) == tokenizer_hash({"b": 1, "a": 0})
    assert tokenizer_hash({"a": 0, "b": 1}) != tokenizer_hash({"a": 1, "b": 0})


LARGE = """
import resource, sys, time
from cospec.features.store import FeatureStore
begun = time.perf_counter()
store = FeatureStore(sys.argv[1])
opened = time.perf_counter() - begun
import random
rng = random.Random(0)
def resident():
    return int(open('/proc/self/statm').read().split()[1]) * resource.getpagesize() // 2**20
for i in range(200):
    store[rng.randrange(len(store))]
before = resident()
begun = time.perf_counter()
for i in range(4000):
    store[rng.randrange(len(store))]
print(len(store), opened, before, resident(), 4000 / (time.perf_counter() - begun))
"""


def test_a_hundred_thousand_documents_open_at_once(tmp_path):
    """Known failure 32: opening reads an index; memory stays flat while documents are read at random."""
    per_shard, shards = 1000, 100
    length = 4
    writer = StoreWriter(tmp_path, make_info(dtype="bfloat16"), num_shards=shards)
    ids = torch.randint(50, (per_shard, length))
    mask = torch.ones(length, dtype=torch.bool)
    taps, last = torch.randn(per_shard, length, P * DT), torch.randn(per_shard, length, DT)
    example = make_feature_document(0, length)
    documents = [
        replace(example, input_ids=ids[i], loss_mask=mask, taps=taps[i], last_hidden=last[i]) for i in range(per_shard)
    ]
    for shard in range(shards):
        if shard < 1:
            writer.write_shard(shard, list(enumerate(documents)))
            template = store_module.safe_open(str(tmp_path / shard_name(0)), framework="pt")
            tensors = {n: template.get_tensor(n).clone() for n in template.keys()}  # noqa: SIM118
        else:
            about = {"shard": shard, "store": writer.description["id"], "skipped": []}
            store_module.write_tensors(tmp_path / shard_name(shard), tensors, about)
    writer.finish()
    result = subprocess.run(
        [sys.executable, "-c", LARGE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    print(result.stdout)
    count, opened, before, after, _rate = map(float, result.stdout.split())
    assert count == 100_000
    assert opened < 1
    assert before < 300
    assert after - before < 10
