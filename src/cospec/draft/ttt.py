"""The training-time test: K draft passes over a packed row, as serving would run them.

Row t of pass k feeds the embedding of token t+k+1 and g_t^k (pass 0: the fused taps,
later: the previous pass's output at the same row) at RoPE position pos_t + k, attends
to the pass-0 keys of its document up to t and to its own keys of passes 1..k, and
predicts token t+k+2. Shifts end with the document and cross cp shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from cospec.ops.ring import open_trunk, trunk_branch_attention
from cospec.ops.shift import halo_index, with_halo
from cospec.records import Batch, Taps

if TYPE_CHECKING:
    from cospec.draft.eagle3 import Eagle3Draft


def unroll(
    draft: Eagle3Draft,
    taps: Taps,
    batch: Batch,
    *,
    num_passes: int,
    cp_group=None,
    mode: str = "ring",
    kernel=None,
    checkpoint: bool = False,
) -> list[Tensor]:
    """Normed hidden states of the K passes, K tensors [T, D]: what the draft's head reads.

    Sharding: T is the rank's cp shard of `batch.layout`. One halo exchange and one trunk
    serve all passes. `checkpoint` recomputes everything but the attentions in backward
    (their keys are shared by later passes and must exist once).
    Raises ValueError when num_passes is outside 1..8.
    """
    if not 1 <= num_passes <= 8:
        raise ValueError(f"num_passes={num_passes}: must be 1..8")
    layout, layer = batch.layout, draft.midlayer
    own_table = draft.embed_tokens
    halo = with_halo(taps.embeddings if own_table is None else batch.input_ids, layout, num_passes, cp_group=cp_group)
    g_TD = run(checkpoint, draft.fuse, taps.hidden)
    trunk, k_branches, v_branches, hidden_KTD = None, [], [], []
    for k in range(num_passes):
        rows_T = halo_index(layout, batch.cp_rank, k + 1, num_passes).to(halo.device)
        emb_TD = halo[rows_T.clamp(min=0)]
        if own_table is not None:
            emb_TD = own_table(emb_TD).to(g_TD.dtype)
        emb_TD.masked_fill_((rows_T < 0)[:, None], 0)  # where the document ends
        q_TNH, k_TMH, v_TMH, residual_TD = run(checkpoint, layer.before_attention, emb_TD, g_TD, batch.positions + k)
        if trunk is None:
            trunk = open_trunk(k_TMH, v_TMH, layout, cp_group=cp_group, mode=mode, kernel=kernel)
        else:
            k_branches.append(k_TMH)
            v_branches.append(v_TMH)
        attn_TNH = trunk_branch_attention(
            q_TNH, trunk, tuple(k_branches), tuple(v_branches), window=draft.config.sliding_window
        )
        out_TD = run(checkpoint, layer.after_attention, attn_TNH, residual_TD)
        hidden_KTD.append(draft.head_input(out_TD))
        g_TD = draft.next_input(out_TD, hidden_KTD[-1])
    return hidden_KTD


def run(checkpoint: bool, function, *args):
    return recompute(function, *args, use_reentrant=False) if checkpoint else function(*args)


def pairs(batch: Batch, *, num_passes: int, cp_group=None, t2d: Tensor | None = None) -> Tensor:
    """Which (pass, row) pairs count, by teacher row: int64 [K, S].

    S are the rows of `with_halo(final_hidden, layout, K)`; entry [k, s] is the local row
    whose pass-k teacher is row s, or -1. Row t of pass k has its teacher at t+k+1 and
    counts iff token t+k+2 exists in its document and is supervised; with `t2d` (bool
    [V]) also iff the draft can propose that token. Pairs of pass k: `(rows[k] >= 0).sum()`.
    """
    layout, rank = batch.layout, batch.cp_rank
    label = batch.loss_mask if t2d is None else batch.loss_mask & t2d.to(batch.input_ids.device)[batch.input_ids]
    halo = with_halo(label, layout, num_passes + 1, cp_group=cp_group)
    num_teachers = with_halo(label, layout, num_passes, cp_group=cp_group).shape[0]
    rows_KS = torch.full((num_passes, num_teachers), -1, dtype=torch.int64, device=label.device)
    for k in range(num_passes):
        teacher_T = halo_index(layout, rank, k + 1, num_passes).to(label.device)
        label_T = halo_index(layout, rank, k + 2, num_passes + 1).to(label.device)
        counts = ((label_T >= 0) & halo[label_T.clamp(min=0)]).nonzero().squeeze(1)
        rows_KS[k, teacher_T[counts]] = counts
    return rows_KS
