"""The native engine: batched speculative decoding in PyTorch.

One step: the draft proposes a chain of k tokens per sequence, the policy scores all of
them in one pass over its cache, the lossless rule keeps a prefix and adds one token. With
k = 0 the same step is plain decoding. Sequences that finish leave their slots to waiting
prompts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cospec.ops.acceptance import accept, resample
from cospec.policy.taps import TapRecorder
from cospec.records import Rollout, SamplingParams
from cospec.rollout.cache import CacheView, KVCache, PrefillView
from cospec.rollout.engine import State, check_request, check_state, load_state
from cospec.rollout.proposer import ChainProposer
from cospec.rollout.sampling import ACCEPT, PROPOSE, SAMPLE, distribution, draw, policy_logp, stream_keys, uniforms
from cospec.rollout.sequence import Sequence, tally
from cospec.titan import head_weight

MAX_DRAFT_TOKENS = 16


class NativeEngine:
    """Lossless speculative rollouts from a policy and a draft that the engine owns.

    A sample is a function of the weights, its prompt, `SamplingParams` and its sample id:
    not of the batch, the number of slots or the number of ranks (up to rounding).

    Args:
        policy: an unsharded torchtitan decoder from `policy.build`, not shared with training.
        draft: an `Eagle3Draft`, or None for plain decoding.
        num_draft_tokens: k, tokens proposed per step, 0..16; 0 (or no draft) is plain decoding.
        max_batch: sequences that run at once; more prompts wait.
        max_len: positions of prompt and response together.
        device: where to generate; None is where the policy is.
        record_proposals: keep every proposed chain of the last `generate` in `proposals`, per
            prompt a list of (position of the chain's first token, tokens).

    Raises ValueError for sizes that do not fit.
    """

    def __init__(
        self,
        policy: nn.Module,
        draft: nn.Module | None = None,
        *,
        num_draft_tokens: int = 5,
        max_batch: int = 64,
        max_len: int,
        device: torch.device | str | None = None,
        record_proposals: bool = False,
    ):
        config = policy.config
        _check_chain(num_draft_tokens)
        if max_batch < 1:
            raise ValueError(f"max_batch={max_batch}: must be >= 1")
        if not 2 <= max_len <= config.max_seq_len:
            raise ValueError(f"max_len={max_len}: must be in 2..{config.max_seq_len}, the policy's longest position")
        weight = policy.lm_head.weight
        if isinstance(weight, DTensor):
            raise ValueError("policy: its parameters are sharded, the engine needs a whole copy of its own")
        self.device = torch.device(device or weight.device)
        self.policy = policy.to(self.device).eval().requires_grad_(False)
        self.draft = None if draft is None else _in_dtype(draft.to(self.device), weight.dtype)
        self.num_draft_tokens = num_draft_tokens if draft is not None else 0
        self.max_batch, self.max_len = max_batch, max_len
        self.vocab_size = config.vocab_size
        self.record_proposals = record_proposals
        self.proposals: list[list[tuple[int, list[int]]]] = []
        attention = next(layer.attention for layer in policy.layers.values())
        self.cache = KVCache(
            len(policy.layers),
            max_batch,
            attention.n_kv_heads,
            max_len,
            attention.head_dim,
            dtype=weight.dtype,
            device=self.device,
        )
        self.proposer: ChainProposer | None = None
        if self.draft is not None:
            self._recorder = TapRecorder(self.policy, self.draft.config.tap_layers)
            embeddings = self.draft.embed_tokens if self.draft.config.own_embedding else self.policy.tok_embeddings
            self.proposer = ChainProposer(
                self.draft,
                embeddings,
                vocab_size=self.vocab_size,
                num_slots=max_batch,
                max_len=max_len,
                device=self.device,
            )
        self.policy_version = 0
        self._refits = 0
        self._tokens = self._accepted = self._steps = 0
        self._seconds = 0.0

    def refit(self, policy_state: State, draft_state: State | None, version: int) -> None:
        """Copy new weights in; `draft_state` None keeps the draft as it is.

        Names and shapes of both are checked before any weight changes.
        Raises ValueError naming the tensor, or when a draft's state comes to an engine without one.
        """
        check_state("policy", self.policy, policy_state)
        if draft_state is not None:
            if self.draft is None:
                raise ValueError("draft_state: this engine was built without a draft, give None")
            check_state("draft", self.draft, draft_state)
        load_state(self.policy, policy_state)
        if draft_state is not None:
            load_state(self.draft, draft_state)
        self.policy_version = version
        self._refits += 1

    def stats(self) -> dict[str, Any]:
        """tokens, seconds, tokens_per_s, acceptance_length (nan before any verification), refits, policy_version."""
        return {
            "tokens": self._tokens,
            "seconds": self._seconds,
            "tokens_per_s": self._tokens / self._seconds if self._seconds else 0.0,
            "acceptance_length": 1 + self._accepted / self._steps if self._steps else float("nan"),
            "refits": self._refits,
            "policy_version": self.policy_version,
        }

    @contextmanager
    def speculation(self, num_draft_tokens: int) -> Iterator[None]:
        """Generate with another k inside, for comparisons; 0 switches speculation off."""
        _check_chain(num_draft_tokens)
        if num_draft_tokens and self.draft is None:
            raise ValueError(f"num_draft_tokens={num_draft_tokens}: this engine has no draft, only 0 works")
        saved, self.num_draft_tokens = self.num_draft_tokens, num_draft_tokens
        try:
            yield
        finally:
            self.num_draft_tokens = saved

    @torch.inference_mode()
    def generate(
        self, prompts: list[list[int]], params: SamplingParams, sample_ids: list[int] | None = None
    ) -> list[Rollout]:
        """One rollout per prompt, in order; see `Engine.generate`.

        A response ends with a stop token ("stop"), after `max_new_tokens` or at `max_len`
        ("length"). Raises ValueError for an empty request, an empty or too long prompt, or
        a token outside the vocabulary.
        """
        started = time.perf_counter()
        check_request(prompts, sample_ids, max_len=self.max_len, vocab_size=self.vocab_size)
        ids = torch.tensor(sample_ids if sample_ids is not None else range(len(prompts)), dtype=torch.int64)
        keys = stream_keys(params.seed, ids).tolist()
        sequences = [
            Sequence(i, list(prompt), key, min(params.max_new_tokens, self.max_len - len(prompt)))
            for i, (prompt, key) in enumerate(zip(prompts, keys, strict=True))
        ]
        self.cache.clear()
        if self.proposer is not None:
            self.proposer.cache.clear()
        waiting, active = deque(sequences), []
        while waiting or active:
            free = self.max_batch - len(active)
            # A prefill costs about a step: let some slots gather before running one.
            if waiting and (not active or free >= min(len(waiting), -(-self.max_batch // 4))):
                self._admit([waiting.popleft() for _ in range(min(free, len(waiting)))], active, params)
            if active:
                self._step(active, params)
        self.proposals = [s.proposals for s in sequences]
        self._count(sequences, time.perf_counter() - started)
        return [s.rollout(self.policy_version) for s in sequences]

    def _admit(self, new: list[Sequence], active: list[Sequence], params: SamplingParams) -> None:
        """Prefill prompts into the slots after the active ones and draw their first tokens."""
        first, batch = len(active), len(new)
        lengths = [len(s.prompt) for s in new]
        length = max(lengths)
        padded = torch.tensor([s.prompt + [0] * (length - n) for s, n in zip(new, lengths, strict=True)])
        tokens = padded.to(self.device)
        positions = torch.arange(length, device=self.device).expand(batch, length)
        meta = torch.tensor([[s.key, n] for s, n in zip(new, lengths, strict=True)]).to(self.device)
        key_B, last_B = meta[:, 0], meta[:, 1] - 1
        hidden, taps = self._forward(tokens, positions, PrefillView(self.cache, first, batch, length))
        hidden_BD = hidden[torch.arange(batch, device=self.device), last_B]
        logp_BV = policy_logp(F.linear(hidden_BD, head_weight(self.policy)), params.temperature)
        token_B = draw(distribution(logp_BV, params), uniforms(key_B, last_B + 1, SAMPLE), params)
        proposer = self._drafting
        if proposer is not None:
            shifted = torch.cat([tokens[:, 1:], tokens[:, :1]], dim=1).scatter_(1, last_B[:, None], token_B[:, None])
            proposer.absorb(first, taps, shifted, positions, last_B, reach=None)
        logp_B = logp_BV.gather(1, token_B[:, None])[:, 0]
        stops = frozenset(params.stop_token_ids)
        for s, token, logp in zip(new, token_B.tolist(), logp_B.tolist(), strict=True):
            s.extend([token], [logp], stops)
        active += new
        self._drop_finished(active)

    def _step(self, active: list[Sequence], params: SamplingParams) -> None:
        """Propose, verify, keep; then let the draft catch up on what was kept."""
        proposer = self._drafting
        k = min(self.num_draft_tokens, max(s.room for s in active))
        counts = [min(k, s.room) for s in active]
        furthest = max(s.position for s in active)
        rows = [(s.tokens[-1], s.position, count, s.key) for s, count in zip(active, counts, strict=True)]
        token_B, position_B, count_B, key_B = torch.tensor(rows).to(self.device).unbind(1)
        position_BQ = position_B[:, None] + torch.arange(k + 1, device=self.device)
        if proposer is not None and k:
            u_BK = uniforms(key_B[:, None], position_BQ[:, 1:], PROPOSE)
            proposed_BK, draft_BKV = proposer.propose(position_B - 1, k, u_BK, params, reach=furthest + k - 1)
        else:
            proposed_BK, draft_BKV = position_BQ[:, 1:], None
        clamped_BQ = position_BQ.clamp(max=self.max_len - 1)
        view = self.cache.view(0, clamped_BQ, furthest + k + 1)
        hidden, taps = self._forward(torch.cat([token_B[:, None], proposed_BK], 1), clamped_BQ, view)
        logp_BQV = policy_logp(F.linear(hidden, head_weight(self.policy)), params.temperature)
        policy_BQV = distribution(logp_BQV, params)
        if draft_BKV is None:
            kept_B = torch.zeros_like(position_B)
            next_BQ = draw(policy_BQV[:, 0], uniforms(key_B, position_B + 1, SAMPLE), params)[:, None]
        else:
            kept_B, next_BQ = verify(policy_BQV, draft_BKV, proposed_BK, count_B, key_B, position_B + 1)
        logp_BQ = logp_BQV.gather(2, next_BQ[..., None])[..., 0]
        # float64 holds token ids exactly: one transfer brings everything to the host.
        packed = torch.cat([kept_B[:, None].double(), next_BQ.double(), logp_BQ.double()], 1).tolist()

        if self.record_proposals and k:
            for s, chain, count in zip(active, proposed_BK.tolist(), counts, strict=True):
                s.proposals.append((s.position + 1, chain[:count]))
        stops, kept = frozenset(params.stop_token_ids), [int(row[0]) for row in packed]
        for s, row, n, count in zip(active, packed, kept, counts, strict=True):
            taken = s.extend([int(t) for t in row[1 : n + 2]], row[k + 2 : k + n + 3], stops)
            s.verify_steps += 1
            tally(s.proposed, count if taken == n + 1 else taken)  # a stop ends the chain: the rest was never tried
            tally(s.accepted, min(n, taken))
        order = self._drop_finished(active)
        if proposer is None or not active:
            return
        if order is not None:
            index = torch.tensor(order).to(self.device)
            taps = [tap.index_select(0, index) for tap in taps]
            next_BQ, clamped_BQ, kept_B = (x.index_select(0, index) for x in (next_BQ, clamped_BQ, kept_B))
        width = max(kept) + 1
        taps, positions_BQ = [tap[:, :width] for tap in taps], clamped_BQ[:, :width]
        proposer.absorb(0, taps, next_BQ[:, :width], positions_BQ, kept_B, reach=furthest + width)

    def _forward(self, tokens_BQ: Tensor, positions_BQ: Tensor, view: CacheView) -> tuple[Tensor, list[Tensor]]:
        """Final hidden [B, Q, D] and, with a draft, its taps, P tensors [B, Q, Dt]."""
        shape = tokens_BQ.shape
        tokens, positions = tokens_BQ.reshape(1, -1), positions_BQ.reshape(1, -1)
        if not self.num_draft_tokens:
            return self.policy(tokens, positions=positions, attention_masks=view).view(*shape, -1), []
        with self._recorder.recording() as recording:
            hidden = self.policy(tokens, positions=positions, attention_masks=view)
        return hidden.view(*shape, -1), [tap.view(*shape, -1) for tap in recording.take(hidden).hidden]

    def _drop_finished(self, active: list[Sequence]) -> list[int] | None:
        """Take finished sequences out; the last ones move into their slots.

        Returns the old slot of each remaining sequence, None when none finished.
        """
        proposer, total, slot = self._drafting, len(active), 0
        order = list(range(total))
        while slot < len(active):
            if not active[slot].finish_reason:
                slot += 1
                continue
            last, origin = active.pop(), order.pop()
            if slot < len(active):
                active[slot], order[slot] = last, origin
                self.cache.move(len(active), slot)
                if proposer is not None:
                    proposer.move(len(active), slot)
        return order if len(order) < total else None

    @property
    def _drafting(self) -> ChainProposer | None:
        return self.proposer if self.num_draft_tokens else None

    def _count(self, sequences: list[Sequence], seconds: float) -> None:
        self._tokens += sum(len(s.tokens) for s in sequences)
        self._accepted += sum(sum(s.accepted) for s in sequences)
        self._steps += sum(s.verify_steps for s in sequences)
        self._seconds += seconds


def verify(
    policy_BQV: Tensor,
    draft_BKV: Tensor,
    proposed_BK: Tensor,
    count_B: Tensor,
    key_B: Tensor,
    position_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """Which proposals are kept, and the token that follows them.

    policy: the distributions at the chain's K positions and the one after, Q = K + 1; draft:
    those that `proposed` was drawn from. Only the first `count` proposals of a row count.
    `position`: where the first proposal stands.
    Returns (kept int64 [B], tokens int64 [B, Q]: kept proposals, then the added token, then
    leftovers without meaning).
    """
    k = proposed_BK.shape[1]
    offsets = torch.arange(k, device=proposed_BK.device)
    u_BK = uniforms(key_B[:, None], position_B[:, None] + offsets, ACCEPT)
    accepted_BK = accept(policy_BQV[:, :k], draft_BKV, proposed_BK, u_BK) & (offsets < count_B[:, None])
    kept_B = accepted_BK.cumprod(1).sum(1)
    row_B = torch.arange(len(kept_B), device=kept_B.device)
    # Where nothing was proposed (after the chain, or past the limit) the policy itself is drawn from.
    rejected_BV = draft_BKV[row_B, kept_B.clamp(max=k - 1)] * (kept_B < count_B)[:, None]
    added_B = resample(policy_BQV[row_B, kept_B], rejected_BV, uniforms(key_B, position_B + kept_B, SAMPLE))
    tokens_BQ = torch.cat([proposed_BK, added_B[:, None]], 1)
    return kept_B, tokens_BQ.scatter_(1, kept_B[:, None], added_B[:, None])


def _check_chain(num_draft_tokens: int) -> None:
    if not 0 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
        raise ValueError(f"num_draft_tokens={num_draft_tokens}: must be in 0..{MAX_DRAFT_TOKENS}")


def _in_dtype(draft: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A draft computes in the dtype of its taps: cast its matrices once, not in every step. Norms stay as they are."""
    for parameter in draft.eval().requires_grad_(False).parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.data.to(dtype)
    return draft
