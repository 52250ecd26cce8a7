"""The draft inside an engine: its cache, and chains of proposals.

Trunk row t is (embedding of token t+1, fused taps of position t) at RoPE position t and
predicts token t+2. A chain continues from the trunk's last row: each further row takes the
embedding of the token just proposed and the draft's own previous output, one position on.
Rows of a chain are written where the trunk rows of the same positions will be, and are
overwritten by them once the tokens are verified and their real taps known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from cospec.records import SamplingParams
from cospec.rollout.cache import CacheView, KVCache, PrefillView
from cospec.rollout.sampling import distribution, draw, policy_logp


class ChainProposer:
    """Proposes chains of tokens for the sequences in an engine's slots.

    Args:
        draft: an `Eagle3Draft`.
        embed: token ids [T] -> embeddings [T, D], the table that the draft reads.
        vocab_size: of the policy; proposals are policy ids.
    """

    def __init__(
        self,
        draft: nn.Module,
        embed: Callable[[Tensor], Tensor],
        *,
        vocab_size: int,
        num_slots: int,
        max_len: int,
        device: torch.device | str,
    ):
        config = draft.config
        weight = draft.lm_head.weight
        self.draft, self.embed, self.vocab_size, self.max_len = draft, embed, vocab_size, max_len
        self.cache = KVCache(
            1,
            num_slots,
            config.num_key_value_heads,
            max_len,
            config.head_dim,
            dtype=weight.dtype,
            device=device,
            window=config.sliding_window,
        )
        self.state = torch.zeros(num_slots, config.hidden_size, dtype=weight.dtype, device=device)

    def move(self, source: int, target: int) -> None:
        self.cache.move(source, target)
        self.state[target] = self.state[source]

    def absorb(
        self,
        first_slot: int,
        taps: Sequence[Tensor],
        next_tokens_BQ: Tensor,
        positions_BQ: Tensor,
        last_B: Tensor,
        reach: int | None,
    ) -> None:
        """Write trunk rows and keep the output of each sequence's last one as its chain's start.

        taps: P tensors [B, Q, Dt] of the policy at `positions`; `next_tokens` are the tokens
        one further. Columns after `last` are padding. reach None: positions start at 0.
        """
        B, Q = next_tokens_BQ.shape
        view = (
            PrefillView(self.cache, first_slot, B, Q)
            if reach is None
            else self.cache.view(first_slot, positions_BQ, reach)
        )
        fused = self.draft.fuse([t.reshape(B * Q, -1) for t in taps])
        out = self._layer(self.embed(next_tokens_BQ.reshape(-1)), fused, positions_BQ.reshape(-1), view)
        last = out.view(B, Q, -1).gather(1, last_B.view(B, 1, 1).expand(B, 1, out.shape[-1])).squeeze(1)
        self.state[first_slot : first_slot + B] = last

    def propose(
        self, start_B: Tensor, length: int, u_BK: Tensor, params: SamplingParams, reach: int
    ) -> tuple[Tensor, Tensor]:
        """A chain of `length` tokens for slots 0..B-1.

        Temperature, top-k and top-p are the policy's: what the policy will not say is not
        worth proposing.

        start_B: RoPE position of the last trunk row. u_BK: uniforms that draw the tokens.
        reach: keys that the last row of the longest sequence sees, see `KVCache.view`.
        Returns (proposed int64 [B, K] in policy ids, draft distributions [B, K, V] that they
        were drawn from: zero outside the draft's vocabulary).
        """
        B, draft = len(start_B), self.draft
        policy_ids = draft.policy_ids
        state = self.state[:B]
        tokens, probs = [], []
        for j in range(length):
            normed = draft.head_input(state)
            probs_BU = distribution(policy_logp(draft.lm_head(normed), params.temperature), params)
            ids_B = draw(probs_BU, u_BK[:, j], params)
            tokens.append(ids_B if policy_ids is None else policy_ids[ids_B])
            probs.append(probs_BU)
            if j + 1 < length:
                positions_B = (start_B + j + 1).clamp_(max=self.max_len - 1)
                view = self.cache.view(0, positions_B.unsqueeze(1), reach - (length - 2 - j))
                state = self._layer(self.embed(tokens[-1]), draft.next_input(state, normed), positions_B, view)
        probs_BKU = torch.stack(probs, 1)
        if policy_ids is None:
            return torch.stack(tokens, 1), probs_BKU
        probs_BKV = probs_BKU.new_zeros(B, length, self.vocab_size)
        return torch.stack(tokens, 1), probs_BKV.index_copy_(2, policy_ids, probs_BKU)

    def _layer(self, emb_TD: Tensor, g_TD: Tensor, positions_T: Tensor, view: CacheView) -> Tensor:
        return self.draft.layer(emb_TD, g_TD, positions_T, lambda q, k, v: view.attend(0, q, k, v))
