"""Where tensors must lie to be sent."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def carried(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """`x` where the backend of the group can send it: gloo takes CUDA tensors through the host.

    (Several processes that share one GPU have no other way: NCCL wants a GPU each.)
    """
    return x.cpu() if x.is_cuda and dist.get_backend(group) == dist.Backend.GLOO else x
