"""Samples to extract features of, and the scripts around saved features."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from cospec.config import ConfigError
from cospec.features.extract import read_shard
from cospec.features.samples import encode_chat, open_samples
from cospec.features.source import BadSample
from cospec.features.store import StoreError, write_tensors
from cospec.features.teacher import folder_tokenizer_hash
from cospec.features.vocab import load_vocab
from support.feature_files import V, write_store

KEEPS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As many reasoning models do: thinking is dropped from all turns but the last.
DROPS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(template: str):
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(i) for i in range(32, 127)] + ["\n"]
    special = ["<user>", "<assistant>", "<system>", "<end>", "<think>", "</think>"]
    vocab = {c: i for i, c in enumerate(characters + special)}
    raw = Tokenizer(models.WordLevel(vocab, unk_token=" "))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    raw.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>")
    tokenizer.chat_template = template
    return tokenizer


def text(tokenizer, ids) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(ids))


CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "<think>hm</think>yo"},
    {"role": "user", "content": "why"},
    {"role": "assistant", "content": "<think>ha</think>so"},
]


def test_chat_turns_share_one_document_where_the_template_lets_them():
    """Known failure 1: the mask sits on the assistant's tokens, thinking and end token included."""
    tokenizer = make_tokenizer(KEEPS)
    [(ids, mask)] = encode_chat(tokenizer, CHAT)
    assert text(tokenizer, ids) == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert text(tokenizer, [i for i, m in zip(ids, mask, strict=True) if m]) == (
        "<think>hm</think>yo<end><think>ha</think>so<end>"
    )


def test_a_template_that_drops_thinking_gives_a_document_per_turn():
    tokenizer = make_tokenizer(DROPS)
    found = encode_chat(tokenizer, CHAT)
    supervised = [text(tokenizer, [i for i, m in zip(ids, mask, strict=True) if m]) for ids, mask in found]
    assert supervised == ["<think>hm</think>yo<end>", "<think>ha</think>so<end>"]
    # The second document is what serving saw: the earlier turn without its thinking.
    assert text(tokenizer, found[1][0]).startswith("<user>hi<end>\n<assistant>yo<end>\n<user>why")


def test_bad_samples_are_named_and_the_rest_goes_on(tmp_path):
    raises = KEEPS.replace(
        "{% for", "{% if messages[0].content == 'bad' %}{{ raise_exception('no bad') }}{% endif %}{% for"
    )
    tokenizer = make_tokenizer(raises)
    lines = [
        json.dumps({"messages": CHAT}),
        json.dumps({"messages": [{"role": "user", "content": "bad"}, {"role": "assistant", "content": "x"}]}),
        "",
        json.dumps({"messages": [{"role": "user", "content": "alone"}]}),
        json.dumps({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}),
        "{not json",
        json.dumps({"text": "plain text"}),
        json.dumps({"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}),
        json.dumps({"input_ids": [1, 2, 999]}),
        json.dumps({"input_ids": [1] * 70}),
        "[1]",
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(lines))
    samples = open_samples(path, tokenizer=tokenizer)
    items, skipped = read_shard(samples, range(len(samples)), len(tokenizer), 64)
    assert [item.sample for item in items] == [0, 3, 5]
    reasons = {name.rsplit(":", 1)[1]: reason for name, reason in skipped}
    assert set(reasons) == {"2", "4", "6", "8", "9", "10", "11"}
    assert "no bad" in reasons["2"]
    assert "no assistant turn" in reasons["4"]
    assert "supervises no token" in reasons["8"]
    assert "outside 0.." in reasons["9"]
    assert "at most 64 fit" in reasons["10"]
    with pytest.raises(BadSample, match="JSON object"):
        samples.documents(9)


def test_other_sources(tmp_path):
    from datasets import Dataset, DatasetDict

    tokenizer = make_tokenizer(KEEPS)
    (tmp_path / "a.txt").write_text("first paragraph\n\nsecond")
    assert [len(open_samples(tmp_path / "a.txt", tokenizer=tokenizer, max_tokens=10))] == [3]
    table = Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5]]})
    DatasetDict({"train": table}).save_to_disk(str(tmp_path / "d"))
    samples = open_samples(tmp_path / "d", split="train")
    assert samples.documents(1)[0].input_ids.tolist() == [4, 5]
    with pytest.raises(ConfigError, match="split"):
        open_samples(tmp_path / "d")
    with pytest.raises(ConfigError, match="does not exist"):
        open_samples(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="tokenizer"):
        open_samples(tmp_path / "a.txt")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="no samples"):
        open_samples(tmp_path / "empty.jsonl")


def script(name: str):
    path = Path(__file__).parents[2] / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_inspect_says_sound_or_what_is_wrong(tmp_path, capsys):
    inspect = script("inspect_features")
    write_store(tmp_path / "store")
    assert inspect.run(inspect.InspectConfig(folder=str(tmp_path / "store"))) == 0
    out = capsys.readouterr().out
    assert "after the final norm" in out
    assert "sound" in out
    shard = tmp_path / "store" / "shard-00001.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-4])
    assert inspect.run(inspect.InspectConfig(folder=str(tmp_path / "store"))) == 1
    assert "another size" in capsys.readouterr().out
    shard.unlink()
    assert inspect.run(inspect.InspectConfig(folder=str(tmp_path / "store"))) == 1
    (tmp_path / "store" / "index.safetensors").unlink()
    assert inspect.run(inspect.InspectConfig(folder=str(tmp_path / "store"))) == 1
    assert "not finished: 2 of 3" in capsys.readouterr().out
    assert inspect.run(inspect.InspectConfig(folder=str(tmp_path))) == 1


def test_build_vocab_script(tmp_path, capsys):
    build = script("build_draft_vocab")
    documents = write_store(tmp_path / "store")
    path = str(tmp_path / "v.safetensors")
    build.run(build.VocabConfig(size=12, output=path, features=str(tmp_path / "store"), always=(V - 1,)))
    assert "12 of 50 tokens cover" in capsys.readouterr().out
    ids = load_vocab(path, V)
    counts = torch.zeros(V)
    for d in documents:
        for token in d.input_ids[1:][d.loss_mask[1:]].tolist():
            counts[token] += 1
    chosen = set(ids.tolist())
    assert V - 1 in chosen
    worst = min(counts[i] for i in chosen - {V - 1})
    assert all(counts[i] <= worst for i in set(range(V)) - chosen)
    with pytest.raises(ConfigError, match="50 tokens, the policy's has 51"):
        load_vocab(path, 51)
    (tmp_path / "junk").write_bytes(b"x")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_vocab(tmp_path / "junk", V)


def test_a_vocabulary_that_has_no_place(tmp_path):
    """Said before the counting, which may take long; and as an error of the store where it comes later."""
    build = script("build_draft_vocab")
    write_store(tmp_path / "store")
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "store", tmp_path / "file" / "v", tmp_path / "nowhere" / "v"):
        with pytest.raises(ConfigError, match="output=.*must be a file in a folder that exists"):
            build.run(build.VocabConfig(size=12, output=str(output), features=str(tmp_path / "store")))
    with pytest.raises(StoreError, match="cannot write .*file/v"):
        write_tensors(tmp_path / "file" / "v", {"x": torch.ones(1)}, {})


def test_tokenizer_hash_of_a_folder(tmp_path):
    tokenizer = make_tokenizer(KEEPS)
    tokenizer.save_pretrained(tmp_path / "a")
    from cospec.features.source import tokenizer_hash

    assert folder_tokenizer_hash(tmp_path / "a") == tokenizer_hash(tokenizer.get_vocab())
    assert folder_tokenizer_hash(tmp_path) is None
    ids = torch.tensor([1, 2])
    from cospec.features.vocab import save_vocab

    save_vocab(tmp_path / "v", ids, torch.ones(V, dtype=torch.int64), tokenizer="one", policy=None)
    with pytest.raises(ConfigError, match="another tokenizer"):
        load_vocab(tmp_path / "v", V, tokenizer="two")
    assert torch.equal(load_vocab(tmp_path / "v", V, tokenizer="one"), ids)
