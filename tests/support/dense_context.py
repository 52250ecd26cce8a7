"""The plainest attention context: one causal document, scores written out."""

import torch
from torch import Tensor


class DenseCausal:
    """Every row attends to itself and all rows before it, in the dtype of the queries."""

    def attend(self, layer_id: int, q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor, scale: float) -> Tensor:
        repeat = q_TNH.shape[1] // k_TMH.shape[1]
        k_TNH = k_TMH.repeat_interleave(repeat, dim=1)
        v_TNH = v_TMH.repeat_interleave(repeat, dim=1)
        scores_NTJ = torch.einsum("tnh,jnh->ntj", q_TNH, k_TNH) * scale
        future = torch.ones(scores_NTJ.shape[1:], dtype=torch.bool, device=q_TNH.device).triu(1)
        weights = scores_NTJ.masked_fill(future, float("-inf")).softmax(dim=-1, dtype=torch.float32).to(q_TNH.dtype)
        return torch.einsum("ntj,jnh->tnh", weights, v_TNH)
