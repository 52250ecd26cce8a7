"""Key/value caches of the sequences being generated.

A slot holds one sequence; key j of a slot is the token at position j. A query at position
p sees the keys 0..p of its slot, so taking tokens back (rollback) needs no work: what was
written past the kept length is overwritten before any query reaches it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

KEY_BLOCK = 32
"""Keys are read in multiples of this many: few distinct shapes, and aligned masks."""


class KVCache:
    """Keys and values [layers, slots, M, max_len, H] and the attention over them.

    Args:
        max_len: positions per slot. The last one may be written by queries that stand past
            the end (see `CacheView`), so sequences may fill max_len - 1 positions.
        window: keys that a query sees, its own included; None means all.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        max_len: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        window: int | None = None,
    ):
        self.k = torch.zeros(num_layers, num_slots, num_kv_heads, max_len, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.num_kv_heads, self.max_len, self.window = num_kv_heads, max_len, window
        self._rows_k = [layer.view(-1, head_dim) for layer in self.k]
        self._rows_v = [layer.view(-1, head_dim) for layer in self.v]
        self._heads = torch.arange(num_kv_heads, device=device) * max_len
        self._keys = torch.arange(max_len, device=device)

    def clear(self) -> None:
        """Forget everything: a masked key still multiplies its value by 0, and 0 * NaN is NaN."""
        self.k.zero_()
        self.v.zero_()

    def move(self, source: int, target: int) -> None:
        """Copy the sequence of one slot over that of another."""
        self.k[:, target] = self.k[:, source]
        self.v[:, target] = self.v[:, source]

    def view(self, first_slot: int, positions_BQ: Tensor, reach: int) -> CacheView:
        """The attention context of a forward pass over slots first_slot..first_slot + B - 1.

        positions_BQ: int64, where the pass's tokens stand. reach: number of keys that the
        furthest query sees (an upper bound will do), known on the host.
        """
        return CacheView(self, first_slot, positions_BQ, reach)


class CacheView:
    """Attention context of one forward pass over rows [B * Q] (row-major by sequence).

    Keys and values of the pass are written at their positions, then every query attends to
    the keys of its slot up to its own position. Positions past the cache's end must be
    clamped to its last one by the caller; such queries return finite values without meaning.
    """

    def __init__(self, cache: KVCache, first_slot: int, positions_BQ: Tensor, reach: int):
        self.cache = cache
        self.slots = slice(first_slot, first_slot + positions_BQ.shape[0])
        self.reach = min(-(-reach // KEY_BLOCK) * KEY_BLOCK, cache.max_len)
        self.batch, self.length = positions_BQ.shape
        slots_B = torch.arange(self.slots.start, self.slots.stop, device=positions_BQ.device)
        base_B = slots_B * (cache.num_kv_heads * cache.max_len)
        self._write = (base_B[:, None, None] + positions_BQ[:, :, None] + cache._heads).flatten()
        keys = cache._keys[: self.reach]
        distance = positions_BQ[:, :, None] - keys
        hidden = distance < 0 if cache.window is None else (distance < 0) | (distance >= cache.window)
        self._mask = torch.zeros(hidden.shape, dtype=cache.k.dtype, device=keys.device)
        self._mask.masked_fill_(hidden, float("-inf"))  # [B, Q, keys]
        self._mask_rows: Tensor | None = None

    def attend(self, layer_id: int, q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor, scale: float | None = None) -> Tensor:
        cache, H = self.cache, q_TNH.shape[-1]
        B, Q, M = self.batch, self.length, cache.num_kv_heads
        G = q_TNH.shape[1] // M
        cache._rows_k[layer_id].index_copy_(0, self._write, k_TMH.reshape(-1, H))
        cache._rows_v[layer_id].index_copy_(0, self._write, v_TMH.reshape(-1, H))
        if self._mask_rows is None:
            # The query heads of one key head become rows of one problem: no key is repeated.
            self._mask_rows = self._mask.unsqueeze(1).expand(B, G, Q, -1).reshape(B, 1, G * Q, -1)
        q = q_TNH.view(B, Q, M, G, H).permute(0, 2, 3, 1, 4).reshape(B, M, G * Q, H)
        k = cache.k[layer_id, self.slots, :, : self.reach]
        v = cache.v[layer_id, self.slots, :, : self.reach]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask_rows, scale=scale)
        return out.view(B, M, G, Q, H).permute(0, 3, 1, 2, 4).reshape(B * Q, M * G, H)


class PrefillView(CacheView):
    """The same for sequences that start at position 0, padded on the right: no mask in memory."""

    def __init__(self, cache: KVCache, first_slot: int, batch: int, length: int):
        self._plain = cache.window is None or cache.window >= length
        if not self._plain:
            positions = cache._keys[:length].expand(batch, length)
            super().__init__(cache, first_slot, positions, length)
            return
        self.cache, self.batch, self.length = cache, batch, length
        self.slots = slice(first_slot, first_slot + batch)

    def attend(self, layer_id: int, q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor, scale: float | None = None) -> Tensor:
        if not self._plain:
            return super().attend(layer_id, q_TNH, k_TMH, v_TMH, scale)
        shape = (self.batch, self.length)
        q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in (q_TNH, k_TMH, v_TMH))
        self.cache.k[layer_id, self.slots, :, : self.length] = k
        self.cache.v[layer_id, self.slots, :, : self.length] = v
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(0, 1)
