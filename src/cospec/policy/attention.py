"""The policy's inner attention on packed, context-parallel rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from cospec.layout import PackedLayout
from cospec.ops.ring import open_trunk, trunk_branch_attention


@dataclass(frozen=True)
class PackedContext:
    """What a forward pass of the policy hands to its attention layers as `attention_masks`.

    layout: the packed row; cp_group: the ranks that share it (None for one). mode: "ring" or
    "gather", see `ops.ring.open_trunk`. kernel: a kernel's name, None chooses.
    """

    layout: PackedLayout
    cp_group: dist.ProcessGroup | None = None
    mode: str = "ring"
    kernel: str | None = None

    def attend(self, layer_id: int, q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor, scale: float | None) -> Tensor:
        """Causal attention inside each document; [T, N, H] of this rank's rows. `layer_id` is not used."""
        trunk = open_trunk(k_TMH, v_TMH, self.layout, cp_group=self.cp_group, mode=self.mode, kernel=self.kernel)
        return trunk_branch_attention(q_TNH, trunk, scale=scale)
