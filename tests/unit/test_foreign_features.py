"""Features of SpecForge and speculators, made here from the description of their formats."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cospec.config import ConfigError, PolicyConfig
from cospec.features.foreign import open_features
from cospec.features.source import BadSample, BadSamples, split_by_document
from cospec.features.teacher import PolicyEnds, check_features_fit
from cospec.features.vocab import documents_of
from support.feature_files import DT, P, V, make_feature_document, save, write_store

LAYERS = (0, 1, 2)


def specforge_dict(i: int, form: str = "eagle3") -> dict:
    d = make_feature_document(i)
    tokens = {"input_ids": d.input_ids, "loss_mask": d.loss_mask.long()}
    if form == "eagle3":
        return {**tokens, "aux_hidden_state": d.taps[None], "hidden_state": d.last_hidden[None]}
    more = {"target_last_hidden_states": d.last_hidden[None]} if form == "dspark" else {}
    return {**tokens, "hidden_states": d.taps[None], **more}


def legacy_dict(i: int, version: int) -> dict:
    d = make_feature_document(i)
    tokens = {"input_ids": d.input_ids, "loss_mask": d.loss_mask.long()}
    if version == 0:
        return {**tokens, "hidden_state": d.taps, "target": d.last_hidden}
    return {**tokens, "hidden_states": [*d.taps.split(DT, dim=1), d.last_hidden]}


def write_speculators(folder: Path, count: int) -> None:
    from datasets import Dataset

    documents = [make_feature_document(i) for i in range(count)]
    Dataset.from_dict(
        {
            "input_ids": [d.input_ids.tolist() for d in documents],
            "loss_mask": [d.loss_mask.long().tolist() for d in documents],
            "seq_len": [len(d.input_ids) for d in documents],
        }
    ).save_to_disk(str(folder))
    (folder / "hidden_states").mkdir()
    for i, d in enumerate(documents):
        layers = torch.stack([*d.taps.split(DT, dim=1), d.last_hidden], dim=1)
        save_file({"hidden_states": layers, "token_ids": d.input_ids}, folder / f"hidden_states/hs_{i}.safetensors")


def check_equal(source, index: int, i: int, *, last: bool = True) -> None:
    got, expected = source[index], make_feature_document(i)
    assert torch.equal(got.input_ids, expected.input_ids)
    assert torch.equal(got.loss_mask, expected.loss_mask)
    assert torch.equal(got.taps, expected.taps)
    assert torch.equal(got.last_hidden, expected.last_hidden) if last else got.last_hidden is None


def judged(source) -> BadSamples:
    bad = BadSamples(1.0)
    list(documents_of(source, bad))
    return bad


@pytest.mark.parametrize("ending", ["ckpt", "ckpt.gz"])
def test_specforge_with_gaps_in_its_numbers(tmp_path, ending):
    for i in (0, 3, 10, 2005):
        save(specforge_dict(i), tmp_path / f"rows_{i // 2000 * 2000}-{i // 2000 * 2000 + 2000}" / f"data_{i}.{ending}")
    save({"d2t": torch.zeros(3)}, tmp_path / "vocab_mapping.pt")
    source = open_features(tmp_path, tap_layers=LAYERS)
    assert source.info.last_is_normed is True
    assert (source.info.hidden_size, source.info.num_taps, source.info.dtype) == (DT, P, "float32")
    assert len(source) == 4
    for index, i in enumerate((0, 3, 10, 2005)):
        check_equal(source, index, i)
    assert source.name(3) == f"rows_2000-4000/data_2005.{ending}"
    train, validation = split_by_document(source, 0.5)
    assert sorted(train + validation) == [0, 1, 2, 3]


def test_specforge_dflash_forms(tmp_path):
    for i in range(3):
        save(specforge_dict(i, "dflash"), tmp_path / "a" / "rows_0-2000" / f"data_{i}.ckpt")
        save(specforge_dict(i, "dspark"), tmp_path / "b" / "rows_0-2000" / f"data_{i}.ckpt")
    source = open_features(tmp_path / "a", tap_layers=LAYERS)
    assert source.info.last_is_normed is None
    check_equal(source, 1, 1, last=False)
    ends = PolicyEnds(PolicyConfig(), torch.zeros(1), torch.zeros(1), torch.zeros(1))
    with pytest.raises(ConfigError, match="no final hidden state"):
        check_features_fit(source.info, ends)
    source = open_features(tmp_path / "b", tap_layers=LAYERS)
    assert source.info.last_is_normed is True
    check_equal(source, 2, 2)


def test_speculators(tmp_path):
    """Known failure 27: their last hidden state lacks the final norm, and the reader says so."""
    write_speculators(tmp_path, 5)
    source = open_features(tmp_path, tap_layers=LAYERS)
    assert source.info.last_is_normed is False
    assert (len(source), source.info.num_taps, source.info.hidden_size) == (5, P, DT)
    for i in range(5):
        check_equal(source, i, i)


@pytest.mark.parametrize("version, normed", [(0, True), (1, False)])
def test_speculators_legacy(tmp_path, version, normed):
    for i in (1, 2, 7):
        save(legacy_dict(i, version), tmp_path / f"data_{i}.pt")
    source = open_features(tmp_path, tap_layers=LAYERS)
    assert source.info.last_is_normed is normed
    for index, i in enumerate((1, 2, 7)):
        check_equal(source, index, i)
    save(legacy_dict(9, 1 - version), tmp_path / "data_9.pt")
    with pytest.raises(BadSample, match="another form"):
        open_features(tmp_path, tap_layers=LAYERS)[3]


class RunsCode:
    def __reduce__(self):
        return os.system, ("touch /tmp/cospec-pickle-ran",)


def test_bad_pickles_are_skipped_counted_and_named(tmp_path):
    """Known failures 28-31, 34: nothing that a file holds is run, and no bad sample is trained on."""
    marker = Path("/tmp/cospec-pickle-ran")
    marker.unlink(missing_ok=True)
    folder = tmp_path / "rows_0-2000"
    broken = {
        1: ({"aux_hidden_state": specforge_dict(1)["aux_hidden_state"][:, :-1]}, "shape"),
        2: ({"hidden_state": specforge_dict(2)["hidden_state"] * float("nan")}, "non-finite"),
        3: ({"input_ids": specforge_dict(3)["input_ids"] + V}, "token id"),
        4: ({"loss_mask": specforge_dict(4)["loss_mask"] * 0}, "supervises no token"),
        5: ({"loss_mask": specforge_dict(5)["loss_mask"][1:]}, "loss_mask has shape"),
        6: ({"hidden_state": RunsCode()}, "refused"),
        7: ({"hidden_state": None}, "hidden_state is missing"),
    }
    for i in range(12):
        save({**specforge_dict(i), **broken.get(i, ({}, ""))[0]}, folder / f"data_{i}.ckpt")
    whole = (folder / "data_8.ckpt").read_bytes()
    (folder / "data_8.ckpt").write_bytes(whole[: len(whole) // 2])
    (folder / "data_9.ckpt.lock").touch()
    save(specforge_dict(12), folder / "data_12.ckpt.gz")
    packed = (folder / "data_12.ckpt.gz").read_bytes()
    (folder / "data_12.ckpt.gz").write_bytes(packed[:-20])
    save(specforge_dict(13), folder / "data_13.ckpt")
    source = open_features(tmp_path, tap_layers=LAYERS, vocab_size=V)
    (folder / "data_13.ckpt").unlink()
    bad = judged(source)
    expected = {i: reason for i, (_, reason) in broken.items()}
    expected |= {8: "damaged", 9: "being written", 12: "damaged or truncated", 13: "missing"}
    assert set(bad.reasons) == set(expected)
    for i, reason in expected.items():
        assert f"data_{i}.ckpt" in bad.reasons[i]
        assert reason in bad.reasons[i]
        assert bad.reasons[i] in bad.report()
    assert not marker.exists()
    bad.max_share = 0.1
    with pytest.raises(ConfigError, match=r"(?s)11 of 14 samples are bad.*data_1\.ckpt"):
        bad.check(final=True)


def test_bad_speculators_files(tmp_path):
    """Known failures 28-30: locks, token mismatch, truncation, NaN, missing files."""
    write_speculators(tmp_path, 9)
    folder = tmp_path / "hidden_states"
    file = folder / "hs_1.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    (folder / "hs_2.safetensors.lock").touch()
    (folder / "hs_3.safetensors").unlink()
    other = make_feature_document(4)
    layers = torch.stack([*other.taps.split(DT, dim=1), other.last_hidden], dim=1)
    save_file({"hidden_states": layers, "token_ids": other.input_ids + 1}, folder / "hs_4.safetensors")
    nan = layers.clone()
    nan[0, 0, 0] = float("inf")
    save_file({"hidden_states": nan, "token_ids": other.input_ids}, folder / "hs_5.safetensors")
    other = make_feature_document(6)
    layers = torch.stack([*other.taps.split(DT, dim=1), other.last_hidden], dim=1)
    save_file({"hidden_states": layers[:, 0].clone(), "token_ids": other.input_ids}, folder / "hs_6.safetensors")
    bad = judged(open_features(tmp_path, tap_layers=LAYERS))
    reasons = {1: "cannot be read", 2: "being written", 3: "is missing", 4: "token_ids", 5: "token_ids", 6: "shape"}
    assert set(bad.reasons) == set(reasons)
    for i, reason in reasons.items():
        assert f"hs_{i}.safetensors" in bad.reasons[i]
        assert reason in bad.reasons[i]
    good = make_feature_document(7)
    layers = torch.stack([*good.taps.split(DT, dim=1), good.last_hidden], dim=1)
    layers[1, 3, 0] = float("nan")
    save_file({"hidden_states": layers, "token_ids": good.input_ids}, folder / "hs_7.safetensors")
    with pytest.raises(BadSample, match=r"hs_7\.safetensors: last hidden state holds non-finite"):
        open_features(tmp_path, tap_layers=LAYERS)[7]


def test_tap_layers_must_be_said(tmp_path):
    """Known failure 26: ids are explicit, never guessed."""
    save(specforge_dict(0), tmp_path / "a" / "rows_0-2000" / "data_0.ckpt")
    with pytest.raises(ConfigError, match="do not say which layers"):
        open_features(tmp_path / "a")
    with pytest.raises(ConfigError, match="holds the outputs of 3 layers"):
        open_features(tmp_path / "a", tap_layers=(0, 1))
    write_store(tmp_path / "b")
    assert open_features(tmp_path / "b").info.tap_layers == (0, 1, 2)
    with pytest.raises(ConfigError, match=r"layers \(0, 1, 2\)"):
        open_features(tmp_path / "b", tap_layers=(0, 1, 3))


def test_a_folder_without_features_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ConfigError, match="no features in a form that is known"):
        open_features(tmp_path)
    with pytest.raises(ConfigError, match="is no folder"):
        open_features(tmp_path / "nowhere")
    save([1, 2], tmp_path / "rows_0-2000" / "data_0.ckpt")
    with pytest.raises(ConfigError, match=r"none of its first 1 samples can be read: .*holds a list, not a dict"):
        open_features(tmp_path, tap_layers=LAYERS)
