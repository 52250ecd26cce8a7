"""Optimizers, learning-rate schedule, mesh-wide gradient norm and clip.

Policy and draft each get an `Optimizer` of their own: their norms and clips never mix.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cospec.config import OptimConfig
from cospec.mesh import Mesh
from cospec.records import Diverged

# Muon orthogonalises a matrix as one linear map; tables of token vectors are not one.
_TOKEN_TABLES = ("tok_embeddings", "embed_tokens", "lm_head")


class Optimizer:
    """AdamW, or Muon for the matrices and AdamW for the rest, on one schedule.

    Args:
        modules: their parameters that require gradients are trained.
        config: see OptimConfig.
        total_steps: length of the run; the decay ends there.
    """

    def __init__(self, modules: Sequence[nn.Module], config: OptimConfig, total_steps: int):
        self.config = config
        self.total_steps = total_steps
        named = [(n, p) for module in modules for n, p in module.named_parameters() if p.requires_grad]
        self.params = [p for _, p in named]
        matrices, rest = [], []
        for name, param in named:
            is_matrix = param.ndim == 2 and not any(table in name for table in _TOKEN_TABLES)
            (matrices if config.name == "muon" and is_matrix else rest).append(param)
        self.optimizers: list[torch.optim.Optimizer] = []
        if matrices:
            self.optimizers.append(
                torch.optim.Muon(matrices, lr=config.muon_lr, weight_decay=config.weight_decay, nesterov=True)
            )
        if rest:
            self.optimizers.append(
                torch.optim.AdamW(
                    rest, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
                )
            )
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["base_lr"] = group["lr"]

    def lr_scale(self, step: int) -> float:
        """Factor on the learning rate at `step` (0-based): linear warm-up, flat, linear decay."""
        c = self.config
        scale = min(1.0, (step + 1) / (c.warmup_steps + 1))
        left = self.total_steps - step
        if c.decay_steps and left <= c.decay_steps:
            scale *= c.min_lr_ratio + (1 - c.min_lr_ratio) * max(0, left) / c.decay_steps
        return scale

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def step(self, step: int) -> None:
        """Apply the gradients at the learning rate of `step`."""
        scale = self.lr_scale(step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * scale
            optimizer.step()


@dataclass
class Skips:
    """Updates left out because a loss or a gradient norm was not finite: one is bad luck, many are the end."""

    MOST = 10
    counts: dict[str, int] = field(default_factory=dict)
    """By model: how many in a row, up to now."""

    @property
    def in_a_row(self) -> int:
        return max(self.counts.values(), default=0)

    def see(self, skipped: bool, what: str, step: int) -> None:
        """Raises Diverged at the last of MOST skipped updates in a row of "policy" or "draft"."""
        self.counts[what] = self.counts.get(what, 0) + 1 if skipped else 0
        if self.counts[what] >= self.MOST:
            raise Diverged(
                f"the {what}'s loss or gradient norm was not finite in its last {self.MOST} updates (up to step "
                f"{step}) and none of them was made. No checkpoint was dropped since"
            )


def global_norm(params: Iterable[nn.Parameter], mesh: Mesh) -> float:
    """L2 norm of all gradients as a single process would compute it.

    Each element is counted once: shards, an expert's too, lie on one rank of dp x cp each, replicated
    tensors on one process count as they are, pipeline stages add up over pp.
    """
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for grad in _local_grads(params):
        total += torch.linalg.vector_norm(grad, dtype=torch.float64) ** 2
    if mesh.fsdp_group is not None:
        dist.all_reduce(total, group=mesh.fsdp_group)
    if mesh.group("pp") is not None:
        dist.all_reduce(total, group=mesh.group("pp"))
    return math.sqrt(total.item())


def clip_(params: Iterable[nn.Parameter], norm: float, max_norm: float) -> None:
    """Scale gradients so that their global norm, given as `norm`, is at most `max_norm`."""
    if norm > max_norm:
        for grad in _local_grads(params):
            grad.mul_(max_norm / norm)


def _local_grads(params: Iterable[nn.Parameter]) -> Iterator[Tensor]:
    for param in params:
        if param.grad is not None:
            yield param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
