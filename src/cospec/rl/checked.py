"""A task as the training loop uses it: what a task of the user's own gives is checked where it comes in."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from cospec.config import ConfigError, require
from cospec.records import Document
from cospec.rl.tasks import Prompt, Task

METHODS = ("demonstrations", "train_prompt", "eval_prompts", "reward")


class TaskError(RuntimeError):
    """A task failed, or gave what cannot be used: names its method, the value and the rule."""


class CheckedTask:
    """A `Task` around another one. Its prompts are lists of int, its rewards finite floats.

    Raises ConfigError for sizes and evaluation prompts, which are asked for before any work is
    done, TaskError for what comes later.
    """

    def __init__(self, task: Task):
        self._task = task
        missing = [name for name in METHODS if not callable(getattr(task, name, None))]
        require(not missing, "task", type(task).__name__, f"must have the methods of rl.tasks.Task, lacks {missing}")
        self.vocab_size = self._size("vocab_size")
        self.stop_token_id = self._size("stop_token_id", 0)
        rule = f"must be 0..{self.vocab_size - 1}: tokens are 0..task.vocab_size - 1, else no response could stop"
        require(self.stop_token_id < self.vocab_size, "task.stop_token_id", self.stop_token_id, rule)
        self.max_prompt_tokens = self._size("max_prompt_tokens")

    @property
    def max_response_tokens(self) -> int:
        return self._size("max_response_tokens")

    def demonstrations(self, first: int, count: int) -> list[Document]:
        where = f"task.demonstrations({first}, {count})"
        documents = list(self._call(where, self._task.demonstrations, first, count))
        if len(documents) != count:
            raise TaskError(f"{where} gave {len(documents)} documents: must be {count}")
        longest = self.max_prompt_tokens + self.max_response_tokens
        for i, document in enumerate(documents):
            if not isinstance(document, Document):
                raise TaskError(f"{where}[{i}] is a {type(document).__name__}: must be a records.Document")
            self._check_tokens(f"{where}[{i}]", document.input_ids.tolist(), longest, "prompt and response")
            if not document.loss_mask[1:].any():
                raise TaskError(f"{where}[{i}] supervises no token: loss_mask must be true for its response")
        return documents

    def train_prompt(self, index: int) -> Prompt:
        where = f"task.train_prompt({index})"
        return self._checked_prompt(where, self._call(where, self._task.train_prompt, index))

    def eval_prompts(self, count: int) -> list[Prompt]:
        where = f"task.eval_prompts({count})"
        try:
            prompts = list(self._call(where, self._task.eval_prompts, count))
            prompts = [self._checked_prompt(f"{where}[{i}]", prompt) for i, prompt in enumerate(prompts)]
        except TaskError as error:
            raise ConfigError("eval.prompts", count, str(error)) from error.__cause__
        require(len(prompts) == count, "eval.prompts", count, f"the task gives {len(prompts)}: must be as many")
        return prompts

    def reward(self, prompt: Prompt, token_ids: Sequence[int]) -> float:
        value = self._call("task.reward", self._task.reward, prompt, token_ids)
        try:
            number = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
            number = math.nan
        if not math.isfinite(number):
            raise TaskError(f"task.reward gave {value!r} for {token_ids[:8]!r}..: must be a finite number")
        return number

    def _checked_prompt(self, where: str, prompt: Prompt) -> Prompt:
        token_ids = getattr(prompt, "token_ids", None)
        if token_ids is None:
            raise TaskError(f"{where} is a {type(prompt).__name__}: must be a Prompt with token_ids and entry")
        token_ids = token_ids.tolist() if isinstance(token_ids, Tensor) else list(token_ids)
        return replace(prompt, token_ids=self._check_tokens(where, token_ids, self.max_prompt_tokens, "prompt"))

    def _check_tokens(self, where: str, tokens: list[Any], most: int, parts: str) -> list[int]:
        names = " + ".join(f"task.max_{part}_tokens" for part in parts.split(" and "))
        if not 1 <= len(tokens) <= most:
            raise TaskError(f"{where} has {len(tokens)} tokens: must be 1..{most}, which is {names}")
        for token in tokens:
            if not hasattr(token, "__index__") or not 0 <= operator.index(token) < self.vocab_size:
                raise TaskError(f"{where} holds token {token!r}: must be an integer in 0..{self.vocab_size - 1}")
        return [operator.index(token) for token in tokens]

    def _size(self, name: str, least: int = 1) -> int:
        value: Any = getattr(self._task, name, None)
        fits = hasattr(value, "__index__") and operator.index(value) >= least
        require(fits, f"task.{name}", value, f"must be an integer >= {least}")
        return operator.index(value)

    def _call(self, where: str, method: Callable[..., Any], *args: Any) -> Any:
        try:
            return method(*args)
        except ConfigError:
            raise
        except Exception as error:
            raise TaskError(f"{where} failed: {type(error).__name__}: {error}") from error
