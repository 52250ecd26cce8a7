"""Join partial attentions by their log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums of `dtype` are kept in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge(out_TNH: Tensor, lse_TN: Tensor, new_out_TNH: Tensor, new_lse_TN: Tensor) -> tuple[Tensor, Tensor]:
    """Join two attentions over disjoint key sets into the attention over both.

    out + sigmoid(new_lse - lse) * (new_out - out); lse = logaddexp(lse, new_lse).
    (Not exp(lse - joint): that loses three digits at |score| 1e4 in float32.)
    An empty set has out = 0 and lse = -inf and adds nothing; two empty sets give 0 and -inf.

    Shapes:   out [T, N, H], lse [T, N]; the result has the dtype of the first pair, which is
              float32 (float64 for float64) for accumulators.
    Sharding: T is a cp shard; no communication.
    Numerics: 1e-6 relative to max(1, |reference|) in float32.
    Source:   Milakov & Gimelshein 2018; FlashAttention-2, section 3.1.
    """
    # Two empty sets make -inf - -inf = nan; the weight is then of no matter, as both outs are 0.
    weight = torch.sigmoid(new_lse_TN - lse_TN).nan_to_num_(nan=0.0)
    out = torch.lerp(out_TNH, new_out_TNH.to(out_TNH.dtype), weight.to(out_TNH.dtype).unsqueeze(-1))
    return out, torch.logaddexp(lse_TN, new_lse_TN)
