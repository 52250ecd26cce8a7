"""Tasks of the user's own that misbehave: one message with method, value and rule, and no silent training on them."""

import numpy as np
import pytest
import torch

from cospec.config import ConfigError
from cospec.records import Document
from cospec.rl.checked import CheckedTask, TaskError
from cospec.rl.tasks import Prompt


class Toy:
    vocab_size, stop_token_id, max_prompt_tokens, max_response_tokens = 16, 15, 4, 4

    def train_prompt(self, index):
        return Prompt([1, 2], {})

    def eval_prompts(self, count):
        return [Prompt([1, 2], {})] * count

    def demonstrations(self, first, count):
        return [document([1, 2, 15])] * count

    def reward(self, prompt, token_ids):
        return 1.0


def document(ids, mask=None):
    mask = [False, *[True] * (len(ids) - 1)] if mask is None else mask
    return Document(torch.tensor(ids), torch.tensor(mask, dtype=torch.bool))


def checked(**changes):
    """A Toy with attributes or, for its methods, answers replaced."""
    changes = {k: v if k in ("vocab_size", "stop_token_id") or "max_" in k else _gives(v) for k, v in changes.items()}
    return CheckedTask(type("Changed", (Toy,), changes)())


def _gives(answer):
    return answer if callable(answer) else lambda self, *args: answer


SIZES = [
    ({"vocab_size": 16.0}, r"task.vocab_size=16.0: must be an integer >= 1"),
    ({"vocab_size": None}, r"task.vocab_size=None"),
    ({"stop_token_id": 16}, r"task.stop_token_id=16: must be 0\.\.15"),
    ({"stop_token_id": -1}, r"task.stop_token_id=-1: must be an integer >= 0"),
    ({"max_prompt_tokens": 0}, r"task.max_prompt_tokens=0"),
]


@pytest.mark.parametrize("changes, message", SIZES)
def test_sizes(changes, message):
    with pytest.raises(ConfigError, match=message):
        checked(**changes)


@pytest.mark.parametrize(
    "prompt, message",
    [
        (Prompt([], {}), r"has 0 tokens: must be 1\.\.4, which is task.max_prompt_tokens"),
        (Prompt([1] * 5, {}), r"has 5 tokens"),
        (Prompt([16], {}), r"holds token 16: must be an integer in 0\.\.15"),
        (Prompt([-1], {}), r"holds token -1"),
        (Prompt([1.0], {}), r"holds token 1.0"),
        ([1, 2], r"is a list: must be a Prompt"),
    ],
)
def test_prompts(prompt, message):
    with pytest.raises(TaskError, match=r"task.train_prompt\(7\) " + message):
        checked(train_prompt=prompt).train_prompt(7)
    with pytest.raises(ConfigError, match=r"eval.prompts=1: task.eval_prompts\(1\)\[0\] " + message):
        checked(eval_prompts=[prompt]).eval_prompts(1)


def test_evaluation_prompts_are_as_many_as_asked_for():
    with pytest.raises(ConfigError, match="eval.prompts=3: the task gives 1"):
        checked(eval_prompts=[Prompt([1], {})]).eval_prompts(3)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1", torch.ones(2)])
def test_rewards_that_are_no_finite_number(value):
    with pytest.raises(TaskError, match=r"task.reward gave .* for \[3\].*: must be a finite number"):
        checked(reward=value).reward(Prompt([1], {}), [3])


@pytest.mark.parametrize("value", [1, True, torch.tensor(1.0), np.float32(1)])
def test_rewards_are_floats_whatever_they_came_as(value):
    reward = checked(reward=value).reward(Prompt([1], {}), [3])
    assert type(reward) is float
    assert reward == 1


@pytest.mark.parametrize(
    "documents, message",
    [
        ([], r"gave 0 documents: must be 2"),
        ([document([1] * 9)] * 2, r"\[0\] has 9 tokens: must be 1\.\.8, which is .*prompt_tokens \+ .*response_tokens"),
        ([document([1, 2]), document([1, 99])], r"\[1\] holds token 99"),
        ([document([1, 2], [True, False])] * 2, r"\[0\] supervises no token"),
        ([{"input_ids": [1]}] * 2, r"\[0\] is a dict"),
    ],
)
def test_demonstrations(documents, message):
    with pytest.raises(TaskError, match=r"task.demonstrations\(4, 2\) ?" + message):
        checked(demonstrations=documents).demonstrations(4, 2)


def test_an_exception_of_the_task_is_kept_as_the_cause():
    def reward(self, prompt, token_ids):
        raise TimeoutError("sandbox: connection timed out")

    with pytest.raises(TaskError, match="task.reward failed: TimeoutError: sandbox") as found:
        checked(reward=reward).reward(Prompt([1], {}), [3])
    assert isinstance(found.value.__cause__, TimeoutError)


def test_a_sound_task_passes():
    task = checked()
    assert task.train_prompt(0).token_ids == [1, 2]
    assert len(task.eval_prompts(3)) == 3
    assert len(task.demonstrations(0, 2)) == 2
    assert task.demonstrations(0, 1)[0].input_ids.tolist() == [1, 2, 15]
