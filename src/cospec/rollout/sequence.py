"""What the native engine knows of one sequence while it grows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from cospec.records import Diverged, Rollout


@dataclass
class Sequence:
    """One sequence being generated."""

    index: int
    prompt: list[int]
    key: int
    limit: int  # most new tokens
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    verify_steps: int = 0
    finish_reason: str = ""
    proposals: list[tuple[int, list[int]]] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Where the newest token stands; the caches hold everything before it."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def room(self) -> int:
        """Tokens a draft may still propose: a verification adds one more."""
        return self.limit - len(self.tokens) - 1

    def extend(self, tokens: list[int], logp: list[float], stops: frozenset[int]) -> int:
        """Append verified tokens up to the first stop token; returns how many were taken."""
        taken = next((i + 1 for i, t in enumerate(tokens) if t in stops), len(tokens))
        if any(math.isnan(x) for x in logp[:taken]):
            raise Diverged(
                f"prompts[{self.index}]: the policy's logits at position {self.position} or just after are not finite: "
                "its weights have diverged"
            )
        self.tokens += tokens[:taken]
        self.logp += logp[:taken]
        if self.tokens[-1] in stops:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.limit:
            self.finish_reason = "length"
        return taken

    def rollout(self, policy_version: int) -> Rollout:
        return Rollout(
            prompt_ids=self.prompt,
            token_ids=self.tokens,
            logp=self.logp,
            finish_reason=self.finish_reason,
            policy_version=policy_version,
            proposed=self.proposed,
            accepted=self.accepted,
            verify_steps=self.verify_steps,
        )


def tally(counts: list[int], upto: int) -> None:
    """Count one event at each of the draft positions 0..upto - 1."""
    counts.extend([0] * (upto - len(counts)))
    for j in range(upto):
        counts[j] += 1
