"""Verifiable tasks: prompts, noisy demonstrations for a warm start, and a reward.

Everything is a pure function of (seed, index): the sample of a global index is the same
on every rank and for every number of ranks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Protocol

import torch

from cospec.config import ConfigError
from cospec.records import Document


class CharTokenizer:
    """One token per printable ASCII character, and a stop token after them.

    No padding token: packed rows need none.
    """

    characters = "".join(map(chr, range(32, 127)))
    stop_id = len(characters)
    vocab_size = len(characters) + 1

    def encode(self, text: str) -> list[int]:
        """Raises ValueError for a character that is not printable ASCII."""
        for i, character in enumerate(text):
            if not " " <= character <= "~":
                raise ValueError(f"character {i} of {text!r} is not printable ASCII")
        return [ord(character) - 32 for character in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text up to the stop token, if there is one."""
        text = []
        for token in token_ids:
            if token == self.stop_id:
                break
            text.append(self.characters[token])
        return "".join(text)


@dataclass(frozen=True)
class Prompt:
    """token_ids: what the policy is given. entry: what the task scores against."""

    token_ids: list[int]
    entry: dict = field(hash=False)


class Task(Protocol):
    """What the training loop needs of a task; `run_rl(config, task)` takes one of your own."""

    vocab_size: int
    """Tokens are 0..vocab_size - 1; a policy made from sizes gets this vocabulary, another must hold it."""
    stop_token_id: int

    @property
    def max_prompt_tokens(self) -> int: ...

    @property
    def max_response_tokens(self) -> int:
        """Longest response that a demonstration shows, stop token included."""
        ...

    def demonstrations(self, first: int, count: int) -> list[Document]: ...

    def train_prompt(self, index: int) -> Prompt: ...

    def eval_prompts(self, count: int) -> list[Prompt]: ...

    def reward(self, prompt: Prompt, token_ids: Sequence[int]) -> float: ...


def make_task(name: str, *, seed: int = 0) -> Task:
    if name == "count_bits":
        return CountBits(seed=seed)
    raise ConfigError("rl.task", name, 'must be "count_bits"')


@dataclass(frozen=True)
class CountBits:
    """reasoning-gym's count_bits with a scratchpad: halve the number, keep the count, answer after `#`.

        613?613:1 306:1 153:2 76:2 38:2 19:3 9:4 4:4 2:4 1:5#5

    The numbers 1..max_n are split once: `eval_share` of them are evaluation prompts, which
    neither demonstrations nor training prompts ever ask.

    Demonstrations are noisy, so that a warm start ends at a middling reward and RL has
    something to remove. Noise changes what follows, as it does for a policy that samples:
    after a slip the scratchpad goes on from the wrong value, and the answer follows it.

    Args:
        max_n: largest number. 4095 keeps sequences under 100 tokens.
        slip: probability that a step goes wrong, by a count or by a halved number.
        direct: share of demonstrations that answer without a scratchpad.
        filler: probability of a meaningless token before a step.
    """

    seed: int = 0
    max_n: int = 4095
    eval_share: float = 0.125
    slip: float = 0.08
    direct: float = 0.15
    filler: float = 0.25

    tokenizer = CharTokenizer()
    vocab_size = CharTokenizer.vocab_size
    stop_token_id = CharTokenizer.stop_id
    _fillers = "~^_|"

    def __post_init__(self) -> None:
        if self.max_n < 16:
            raise ConfigError("max_n", self.max_n, "must be >= 16")
        if not 0 < self.eval_share < 1:
            raise ConfigError("eval_share", self.eval_share, "must be in (0, 1)")
        for name in ("slip", "direct", "filler"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(name, getattr(self, name), "must be in [0, 1]")
        _reasoning_gym()

    @property
    def max_prompt_tokens(self) -> int:
        return len(f"{self.max_n}?")

    @property
    def max_response_tokens(self) -> int:
        steps = [f"{self._fillers[0]}{self.max_n >> i}:{i + 1} " for i in range(self.max_n.bit_length())]
        return sum(map(len, steps)) + len("#") + len(str(len(steps)))  # the last space is the stop token's

    @cached_property
    def _pools(self) -> tuple[list[int], list[int]]:
        """(training numbers, evaluation numbers), shuffled."""
        numbers = list(range(1, self.max_n + 1))
        self._rng("split").shuffle(numbers)
        held_out = max(1, round(len(numbers) * self.eval_share))
        return numbers[held_out:], numbers[:held_out]

    def demonstration(self, index: int) -> Document:
        """Prompt, response and stop token; the response is supervised."""
        rng = self._rng("demonstration", index)
        number = rng.choice(self._pools[0])
        prompt = self.tokenizer.encode(f"{number}?")
        response = [*self.tokenizer.encode(self._response(number, rng)), self.stop_token_id]
        mask = torch.zeros(len(prompt) + len(response), dtype=torch.bool)
        mask[len(prompt) :] = True
        return Document(torch.tensor(prompt + response), mask)

    def demonstrations(self, first: int, count: int) -> list[Document]:
        return [self.demonstration(index) for index in range(first, first + count)]

    def _response(self, number: int, rng: random.Random) -> str:
        if rng.random() < self.direct:
            return f"#{number.bit_count()}"
        steps = []
        value, count = number, 0
        while True:
            count += value & 1
            if steps and rng.random() < self.slip:
                if value >= 8 and rng.random() < 0.5:  # small values stay, so that the walk ends in time
                    count -= value & 1
                    value -= rng.choice((1, 2))
                    count += value & 1
                else:
                    count = max(0, count + rng.choice((-1, 1)))
            filler = rng.choice(self._fillers) if rng.random() < self.filler else ""
            steps.append(f"{filler}{value}:{count}")
            if value == 1:
                return " ".join(steps) + f"#{count}"
            value //= 2

    def train_prompt(self, index: int) -> Prompt:
        """Prompt of a global index: epochs over the training numbers, each in a new order."""
        numbers = self._pools[0]
        epoch, offset = divmod(index, len(numbers))
        return self._prompt(numbers[self._order(epoch)[offset]])

    @lru_cache(maxsize=8)  # noqa: B019
    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self._pools[0])))
        self._rng("epoch", epoch).shuffle(order)
        return order

    def eval_prompts(self, count: int) -> list[Prompt]:
        """The first `count` held-out prompts, always the same. Raises ConfigError for more than there are."""
        numbers = self._pools[1]
        if not 1 <= count <= len(numbers):
            raise ConfigError("eval.prompts", count, f"must be 1..{len(numbers)}, the held-out prompts of count_bits")
        return [self._prompt(number) for number in numbers[:count]]

    def reward(self, prompt: Prompt, token_ids: Sequence[int]) -> float:
        """reasoning-gym's score in [0, 1] of the text after the first `#`; 0 without one."""
        _, mark, answer = self.tokenizer.decode(token_ids).partition("#")
        if not mark:
            return 0.0
        return float(self._dataset(prompt.entry["metadata"]["number"]).score_answer(answer, prompt.entry))

    def _prompt(self, number: int) -> Prompt:
        return Prompt(self.tokenizer.encode(f"{number}?"), self._dataset(number)[0])

    def _dataset(self, number: int):
        """reasoning-gym's dataset of exactly this number."""
        return _reasoning_gym().create_dataset("count_bits", min_n=number, max_n=number, size=1, seed=0)

    def _rng(self, *purpose: object) -> random.Random:
        return random.Random("/".join(map(str, ("count_bits", self.seed, *purpose))))


def _reasoning_gym():
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError("the RL tasks need reasoning-gym: pip install 'cospec[rl]'") from error
    return reasoning_gym
