"""One attention block with its log-sum-exp, forward and backward, on three kernels.

A kernel is a pair of plain functions without autograd: `ops.ring` joins blocks and owns the
gradient. Backward takes the *merged* out and lse of all blocks of a query row: then
p = exp(s - lse) and delta = sum(dout * out) are those of the whole attention and each block
returns its exact share.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from cospec.ops.blocks import Block, Tile
from cospec.ops.merge import accumulator_dtype

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MATH_SCORES = 2**24
"""Scores that the math kernel holds at once; longer documents are taken in chunks of queries."""


class Kernel(Protocol):
    """Attention over the documents of one block.

    forward: q [T, N, H], k and v [J, M, H] with M dividing N -> out [T, N, H] in q's dtype, lse
    [T, N] in the accumulator dtype; rows that the block does not name get 0 and -inf.
    backward: grad, out [T, N, H] and lse [T, N] of the merged attention -> dq [T, N, H],
    dk, dv [J, M, H] in the inputs' or the accumulator dtype; rows that the block does not name get 0.
    T and J are the rows of `block.q_range` and `block.k_range`. `window` keeps the keys
    less than `window` positions back.
    """

    name: str

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float, window: int | None = None
    ) -> tuple[Tensor, Tensor]: ...

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        block: Block,
        scale: float,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class TiledKernel:
    """A kernel that works on padded batches [B, heads, rows, H], one tile after another."""

    name = ""

    def tile_forward(self, q, k, v, tile: Tile, causal: bool, scale: float, window: int | None):
        raise TypeError(f"{type(self).__name__} must define tile_forward")

    def tile_backward(self, grad, q, k, v, out, lse, tile: Tile, causal: bool, scale: float, window: int | None):
        raise TypeError(f"{type(self).__name__} must define tile_backward")

    def forward(self, q, k, v, block, scale, window=None):
        if not block.documents:
            return _nothing(q)
        tiled = block.tiled(q.device)
        out, lse = tiled.q_sink(), tiled.q_sink(-torch.inf)
        for tile in tiled.tiles:
            part = self.tile_forward(tile.q.take(q), tile.k.take(k), tile.k.take(v), tile, block.causal, scale, window)
            for sink, x in zip((out, lse), part, strict=True):
                sink.put(tile.q, x)
        return out.result(), lse.result()

    def backward(self, grad, q, k, v, out, lse, block, scale, window=None):
        if not block.documents:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        tiled = block.tiled(q.device)
        dq, dk, dv = tiled.q_sink(), tiled.k_sink(), tiled.k_sink()
        for tile in tiled.tiles:
            part = self.tile_backward(
                tile.q.take(grad, clear_repeats=True),  # a repeated query has no gradient
                tile.q.take(q),
                tile.k.take(k),
                tile.k.take(v),
                tile.q.take(out),
                tile.q.take(lse),
                tile,
                block.causal,
                scale,
                window,
            )
            for sink, rows, x in zip((dq, dk, dv), (tile.q, tile.k, tile.k), part, strict=True):
                sink.put(rows, x)
        return dq.result(), dk.result(), dv.result()


class CpuFlash(TiledKernel):
    """The flash kernel of SDPA on CPU: any float dtype and head dim, grouped heads without copies."""

    name = "cpu_flash"

    def tile_forward(self, q, k, v, tile, causal, scale, window):
        _no_window(self.name, window)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, causal, scale=scale)

    def tile_backward(self, grad, q, k, v, out, lse, tile, causal, scale, window):
        _no_window(self.name, window)
        # In half precision the kernel sums dk and dv in that precision: off by 4e-2 at 600 rows, and slower.
        grad, q, k, v, out = (x.to(lse.dtype) for x in (grad, q, k, v, out))
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )


class Math(TiledKernel):
    """Plain matrix products, any device and float dtype; half precisions are computed in float32.

    Holds at most `MATH_SCORES` scores of one tile (or one row of them), never a whole row's square.
    """

    name = "math"

    def tile_forward(self, q, k, v, tile, causal, scale, window):
        dtype = accumulator_dtype(q.dtype)
        outs, lses = [], []
        for rows, keys in self._chunks(q, k, causal):
            score = self._scores(q, k, rows, keys, tile, causal, scale, window)
            lse = torch.logsumexp(score, dim=-1)
            weight = torch.exp(score - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
            outs.append(_ungroup(_grouped(weight, k) @ v[:, :, keys].to(dtype), weight))
            lses.append(lse)
        return torch.cat(outs, dim=2).to(q.dtype), torch.cat(lses, dim=2)

    def tile_backward(self, grad, q, k, v, out, lse, tile, causal, scale, window):
        dtype = accumulator_dtype(q.dtype)
        dqs = []
        dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v))
        for rows, keys in self._chunks(q, k, causal):
            score = self._scores(q, k, rows, keys, tile, causal, scale, window)
            weight = torch.exp(score - lse[:, :, rows].unsqueeze(-1))
            dout, key, value = grad[:, :, rows].to(dtype), k[:, :, keys].to(dtype), v[:, :, keys].to(dtype)
            delta = (dout * out[:, :, rows].to(dtype)).sum(-1, keepdim=True)
            dweight = _ungroup(_grouped(dout, k) @ value.mT, weight)
            dscore = _grouped(weight * (dweight - delta) * scale, k)
            dqs.append(_ungroup(dscore @ key, dout))
            dk[:, :, keys] += dscore.mT @ _grouped(q[:, :, rows].to(dtype), k)
            dv[:, :, keys] += _grouped(weight, k).mT @ _grouped(dout, k)
        return torch.cat(dqs, dim=2), dk, dv

    @staticmethod
    def _chunks(q: Tensor, k: Tensor, causal: bool):
        batch, heads, length, _ = q.shape
        step = max(1, MATH_SCORES // (batch * heads * k.shape[2]))
        for start in range(0, length, step):
            stop = min(start + step, length)
            yield slice(start, stop), slice(0, stop if causal else k.shape[2])

    @staticmethod
    def _scores(q, k, rows: slice, keys: slice, tile: Tile, causal: bool, scale: float, window: int | None) -> Tensor:
        """[B, N, rows, keys] scaled scores, -inf where a row may not look."""
        dtype = accumulator_dtype(q.dtype)
        query = q[:, :, rows].to(dtype)
        score = _ungroup(_grouped(query, k) @ k[:, :, keys].to(dtype).mT, query) * scale
        if causal:
            place = torch.arange(keys.stop, device=q.device)
            score.masked_fill_(place > place[rows].unsqueeze(-1), -torch.inf)
        if window is not None:
            distance = tile.q.position[:, rows].unsqueeze(-1) - tile.k.position[:, keys].unsqueeze(1)
            score.masked_fill_((distance >= window).unsqueeze(1), -torch.inf)
        return score


class CudaFlash:
    """The packed (varlen) flash kernel on CUDA: bfloat16 and float16, head dim a multiple of 8 up to 256."""

    name = "cuda_flash"

    def forward(self, q, k, v, block, scale, window=None):
        self._check(q, block, window)
        if not block.documents:
            return _nothing(q)
        packed = block.packed(q.device)
        window_left, window_right = self._window(window)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            packed.q_map.take(q),
            packed.k_map.take(k),
            packed.k_map.take(v),
            packed.cu_q,
            packed.cu_k,
            packed.max_q,
            packed.max_k,
            0.0,
            block.causal,
            False,
            scale=scale,
            window_size_left=window_left,
            window_size_right=window_right,
        )
        return packed.q_map.put(out), packed.q_map.put(lse.transpose(0, 1), -torch.inf)

    def backward(self, grad, q, k, v, out, lse, block, scale, window=None):
        self._check(q, block, window)
        if not block.documents:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        packed = block.packed(q.device)
        window_left, window_right = self._window(window)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            packed.q_map.take(grad),
            packed.q_map.take(q),
            packed.k_map.take(k),
            packed.k_map.take(v),
            packed.q_map.take(out),
            packed.q_map.take(lse).transpose(0, 1).contiguous(),
            packed.cu_q,
            packed.cu_k,
            packed.max_q,
            packed.max_k,
            0.0,
            block.causal,
            torch.zeros(2, dtype=torch.uint64, device=q.device),  # dropout's random state: unused
            torch.empty(0, device=q.device),
            scale=scale,
            window_size_left=window_left,
            window_size_right=window_right,
        )
        return packed.q_map.put(dq), packed.k_map.put(dk), packed.k_map.put(dv)

    @staticmethod
    def _window(window: int | None) -> tuple[int | None, int | None]:
        return (None, None) if window is None else (window - 1, 0)

    @staticmethod
    def _check(q: Tensor, block: Block, window: int | None) -> None:
        if q.shape[-1] % 8 or q.shape[-1] > 256:
            raise ValueError(f"head_dim={q.shape[-1]}: cuda_flash takes multiples of 8 up to 256; use kernel 'math'")
        if window is not None and any(len(queries) > 1 for queries, _ in block.documents):
            raise ValueError(f"window={window}: cuda_flash cannot hold it over zigzag shards; use kernel 'math'")


KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (CpuFlash(), CudaFlash(), Math())}


def choose_kernel(device: torch.device, dtype: torch.dtype, name: str = "auto") -> Kernel:
    """The kernel for tensors of this device and dtype, or the named one.

    auto: cpu_flash on CPU, cuda_flash for bfloat16 and float16 on CUDA, math elsewhere.

    Raises ValueError for an unknown name, a dtype that is no float, or a kernel that cannot
    run on this device and dtype.
    """
    device = torch.device(device)
    possible = ["math"]
    if device.type == "cpu":
        possible.insert(0, "cpu_flash")
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        possible.insert(0, "cuda_flash")
    if dtype not in FLOATS:
        raise ValueError(f"dtype={dtype}: attention takes {', '.join(str(d) for d in FLOATS)}")
    if name == "auto":
        return KERNELS[possible[0]]
    if name not in KERNELS:
        raise ValueError(f"kernel={name!r}: choose one of auto, {', '.join(KERNELS)}")
    if name not in possible:
        raise ValueError(f"kernel={name!r} cannot run {dtype} on {device.type}: choose one of {', '.join(possible)}")
    return KERNELS[name]


def _nothing(q_TNH: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse over no keys."""
    return torch.zeros_like(q_TNH), q_TNH.new_full(q_TNH.shape[:2], -torch.inf, dtype=accumulator_dtype(q_TNH.dtype))


def _grouped(x_BNLH: Tensor, key: Tensor) -> Tensor:
    """[B, N, L, *] as [B, M, N / M * L, *]: the rows of all query heads of a key head."""
    return x_BNLH.unflatten(1, (key.shape[1], -1)).flatten(2, 3)


def _ungroup(x_BMRH: Tensor, like_BNLH: Tensor) -> Tensor:
    """The inverse of `_grouped`."""
    return x_BMRH.unflatten(2, (-1, like_BNLH.shape[2])).flatten(1, 2)


def _no_window(name: str, window: int | None) -> None:
    if window is not None:
        raise ValueError(f"window={window}: {name} has no sliding window; use kernel 'math'")
