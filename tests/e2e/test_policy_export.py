"""scripts/export_policy.py: the policy of a run as a folder that transformers, and another run, can start from."""

import json
import runpy
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from cospec.config import DraftConfig, PolicyConfig
from cospec.policy.build import build_policy
from cospec.train import loop
from cospec.train.loop import run_sft
from cospec.train.saved import _Tensors, find_checkpoint, read_policy
from support.tiny_runs import tiny_sft

export = runpy.run_path(str(Path(__file__).parents[2] / "scripts/export_policy.py"))["main"]


def refusal(capsys, *argv):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        export([str(a) for a in argv])
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy") / "run"
    run_sft(tiny_sft(folder, steps=2, every=1))
    return folder


def test_a_run_goes_on_from_what_another_trained(finished, tmp_path, monkeypatch, capsys):
    """One tensor is in memory at a time; the folder loads elsewhere, and its tokenizer follows it on."""
    last, read = [lambda: None], _Tensors.__getitem__

    def watched(self, name):
        assert last[0]() is None, f"the tensor before {name} is still in memory"
        tensor = read(self, name)
        last[0] = weakref.ref(tensor)
        return tensor

    with monkeypatch.context() as patch:
        patch.setattr(_Tensors, "__getitem__", watched)
        export([str(finished), str(tmp_path / "first"), "--max_shard_bytes", "20000"])
    assert len(list((tmp_path / "first").glob("*.safetensors"))) > 1
    policy_saved = read_policy(find_checkpoint(finished))
    saved = policy_saved.tensors
    assert policy_saved.start is None
    policy = build_policy(PolicyConfig(hf_path=str(tmp_path / "first")))
    assert all(torch.equal(value, saved[name]) for name, value in policy.state_dict().items() if name in saved)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first", dtype=torch.float32)
    assert torch.equal(theirs.lm_head.weight, saved["lm_head.weight"])

    (tmp_path / "first" / "tokenizer.json").write_text("{}")
    raw = json.loads((tmp_path / "first" / "config.json").read_text())
    (tmp_path / "first" / "config.json").write_text(json.dumps(raw | {"eos_token_id": 7}))
    config = replace(tiny_sft(tmp_path / "second", steps=1, every=1), draft=DraftConfig(enabled=False))
    run_sft(replace(config, policy=PolicyConfig(hf_path=str(tmp_path / "first"), vocab_size=64)))
    checkpoint = find_checkpoint(tmp_path / "second")
    export([str(checkpoint), str(tmp_path / "out"), "--dtype", "bfloat16"])
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.dtype, config.eos_token_id) == (torch.bfloat16, 7)
    assert "not empty" in refusal(capsys, checkpoint, tmp_path / "out")
    export([str(checkpoint), str(tmp_path / "out"), "--overwrite"])


def test_what_holds_no_policy_is_refused(tmp_path, capsys):
    assert "neither a run nor a checkpoint" in refusal(capsys, tmp_path, tmp_path / "out")
    run_sft(tiny_sft(tmp_path / "unsaved", steps=1, every=0))
    assert "kept no checkpoint" in refusal(capsys, tmp_path / "unsaved", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def edited(finished, folder, change):
    """The run with its newest checkpoint's manifest changed."""
    shutil.copytree(finished, folder)
    path = find_checkpoint(folder) / "checkpoint.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    return folder


def test_manifests_that_make_no_model(finished, tmp_path, capsys):
    run = edited(finished, tmp_path / "sizes", lambda m: m["definition"]["policy"].pop("rope"))
    assert "its policy is not understood: KeyError: 'rope'" in refusal(capsys, run, tmp_path / "out")
    run = edited(finished, tmp_path / "tensors", lambda m: m.update(tensors={}))
    assert "tensor policy.model.tok_embeddings.weight is missing" in refusal(capsys, run, tmp_path / "out")


def test_settings_of_another_kind_beside_a_good_checkpoint(finished, tmp_path):
    """The run's config.json only says where the tokenizer is."""
    shutil.copytree(finished, tmp_path / "run")
    for text in ("[1]", '{"policy": [1]}'):
        (tmp_path / "run" / "config.json").write_text(text)
        export([str(tmp_path / "run"), str(tmp_path / "out"), "--overwrite"])


def test_a_policy_that_diverged_is_not_exported(tmp_path, capsys, monkeypatch):
    step = loop.cotrain_step

    def poisoned(learner, *args, **options):
        stats = step(learner, *args, **options)
        learner.runner.head.data[0, 0] = float("nan")
        return stats

    monkeypatch.setattr(loop, "cotrain_step", poisoned)
    run_sft(tiny_sft(tmp_path / "run", steps=1, every=1))
    shown = refusal(capsys, tmp_path / "run", tmp_path / "out")
    assert "lm_head.weight is not finite: the run had diverged; take an earlier checkpoint" in shown
    assert not (tmp_path / "out").exists()
