"""rl.tasks: determinism, disjoint splits, demonstrations, reasoning-gym's own reward."""

import random
import sys

import pytest

from cospec.config import ConfigError, RolloutConfig
from cospec.rl.tasks import CharTokenizer, CountBits, make_task

pytest.importorskip("reasoning_gym")


def text_of(task, document):
    return task.tokenizer.decode(document.input_ids.tolist())


def test_tokenizer():
    tokenizer = CharTokenizer()
    text = "613?613:1 ~306:1#5"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.stop_id, *ids]) == text
    assert max(tokenizer.encode("~")) < tokenizer.stop_id < tokenizer.vocab_size
    with pytest.raises(ValueError, match="character 1"):
        tokenizer.encode("a\n")


def test_clean_demonstration():
    task = CountBits(slip=0, direct=0, filler=0)
    assert task._response(613, random.Random(0)) == "613:1 306:1 153:2 76:2 38:2 19:3 9:4 4:4 2:4 1:5#5"


def test_demonstrations_are_scored_by_reasoning_gym():
    """Without noise every demonstration is right; with the default noise about four in ten."""
    scores = {}
    for name, task in (("clean", CountBits(slip=0, direct=0, filler=0)), ("noisy", CountBits())):
        rewards = []
        for document in task.demonstrations(0, 300):
            prompt_length = int((~document.loss_mask).sum())
            ids = document.input_ids.tolist()
            number = int(task.tokenizer.decode(ids[:prompt_length]).rstrip("?"))
            rewards.append(task.reward(task._prompt(number), ids[prompt_length:]))
        scores[name] = sum(rewards) / len(rewards)
    assert scores["clean"] == 1
    assert 0.4 < scores["noisy"] < 0.75


def test_mask_covers_the_response_and_the_stop_token():
    task = CountBits()
    document = task.demonstration(3)
    ids, mask = document.input_ids.tolist(), document.loss_mask.tolist()
    assert ids[-1] == task.stop_token_id
    assert mask.index(True) == ids.index(task.tokenizer.encode("?")[0]) + 1
    assert all(mask[mask.index(True) :])


def test_sizes_hold():
    task = CountBits()
    documents = task.demonstrations(0, 1500)
    longest = max(int(d.loss_mask.sum()) for d in documents)
    assert longest <= task.max_response_tokens <= RolloutConfig().max_new_tokens
    assert max(int((~d.loss_mask).sum()) for d in documents) <= task.max_prompt_tokens
    assert max(int(d.input_ids.max()) for d in documents) < task.tokenizer.vocab_size


def test_evaluation_is_held_out():
    """Known failure 33: no evaluation prompt occurs in the warm start or in RL."""
    task = CountBits()
    held_out = {tuple(p.token_ids) for p in task.eval_prompts(512)}
    assert len(held_out) == 512
    train = {tuple(task.train_prompt(i).token_ids) for i in range(len(task._pools[0]))}
    assert len(train) == 4095 - 512  # an epoch asks every training number once
    demonstrated = {tuple(d.input_ids[~d.loss_mask].tolist()) for d in task.demonstrations(0, 3000)}
    assert not held_out & train
    assert not held_out & demonstrated
    with pytest.raises(ConfigError, match="eval.prompts"):
        task.eval_prompts(513)


def test_a_sample_depends_on_seed_and_index_only():
    a, b, other = CountBits(seed=1), CountBits(seed=1), CountBits(seed=2)
    b.demonstrations(5, 20)
    assert text_of(a, a.demonstration(7)) == text_of(b, b.demonstration(7))
    assert a.train_prompt(4000) == b.train_prompt(4000)
    assert [p.token_ids for p in a.eval_prompts(8)] == [p.token_ids for p in b.eval_prompts(8)]
    assert [p.token_ids for p in a.eval_prompts(8)] != [p.token_ids for p in other.eval_prompts(8)]
    assert len({text_of(a, d) for d in a.demonstrations(0, 50)}) > 45
    epoch = [[a.train_prompt(e * 3583 + i).token_ids for i in range(5)] for e in range(2)]
    assert epoch[0] != epoch[1]


@pytest.mark.parametrize(
    ("response", "reward"),
    [("613:1#5", 1.0), ("#5", 1.0), ("613:5", 0.0), ("#", 0.0), ("#4", 0.0), ("#5 5 5", 0.2), ("#4#5", 1 / 3)],
)
def test_reward(response, reward):
    """The scorer is reasoning-gym's: an answer that merely contains the right one scores its share."""
    task = CountBits()
    assert task.reward(task._prompt(613), task.tokenizer.encode(response)) == pytest.approx(reward)


def test_reward_ends_at_the_stop_token():
    task = CountBits()
    assert task.reward(task._prompt(613), [*task.tokenizer.encode("#5"), task.stop_token_id]) == 1


def test_unknown_task_and_missing_extra(monkeypatch):
    with pytest.raises(ConfigError, match="rl.task='chess'"):
        make_task("chess")
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"pip install 'cospec\[rl\]'"):
        make_task("count_bits")
