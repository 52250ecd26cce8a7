"""The draft's half of a step: which pairs count, passes and loss of a row, the update."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cospec.config import RunConfig
from cospec.draft.eagle3 import Eagle3Draft
from cospec.draft.ttt import pairs
from cospec.mesh import Mesh
from cospec.ops.losses import draft_loss
from cospec.ops.shift import with_halo
from cospec.policy.stream import WeightStream
from cospec.records import Batch, DraftOutput, Taps
from cospec.train.optim import Optimizer, clip_, global_norm


@dataclass
class DraftSide:
    """A draft and its optimizer on one mesh.

    With pipeline stages the draft lives on the ranks of the last one (pp rank `home`). On
    the others it is a shell, see `shell`, which says what the draft is and trains nothing.
    """

    config: RunConfig
    mesh: Mesh
    model: Eagle3Draft
    optim: Optimizer
    home: int = 0

    @property
    def lives_here(self) -> bool:
        return self.mesh.pp_rank == self.home

    @property
    def parts(self) -> list[nn.Module]:
        """The modules that train on this rank."""
        return [self.model] if self.lives_here else []

    def full_state(self) -> dict[str, Tensor]:
        """The draft's whole state on the CPU, on every rank. A collective call."""
        return WeightStream(self.parts, self.mesh).collect()

    def no_sums(self) -> Tensor:
        """Zeros, to add the sums of rows to."""
        return torch.zeros(4 * self.config.draft.num_passes + 2, dtype=torch.float64, device=self.mesh.device)

    def pairs(self, batch: Batch) -> Tensor | None:
        """int64 [K, S]: which (pass, row) pairs of the local rows count; see draft.ttt.pairs. None on a shell."""
        if not self.lives_here:
            return None
        config = self.config.draft
        t2d = self.model.t2d if config.drop_labels_outside_vocab else None
        return pairs(batch, num_passes=config.num_passes, cp_group=self.mesh.cp_group, t2d=t2d)

    def forward_backward(
        self, batch: Batch, pairs_KS: Tensor, taps: Taps, policy_head_VD: Tensor, coef_K: Tensor
    ) -> Tensor:
        """K passes over one row, their loss and its backward.

        Returns this row's sums for `update`, one float64 vector: they add up over rows.
        """
        result, hidden_KTD = self._forward(batch, pairs_KS, taps, policy_head_VD, coef_K)
        # The added zeros keep the graph of a rank without counted pairs, so that it runs the
        # same collectives in backward as its peers.
        (result.loss + sum(0.0 * h.sum() for h in hidden_KTD)).backward()
        return _sums(result)

    @torch.no_grad()
    def measure(self, batch: Batch, pairs_KS: Tensor, taps: Taps, policy_head_VD: Tensor) -> Tensor:
        """The same sums without a gradient, for evaluation; see `figures`."""
        coef_K = torch.zeros(self.config.draft.num_passes, device=self.mesh.device)
        return _sums(self._forward(batch, pairs_KS, taps, policy_head_VD, coef_K)[0])

    def _forward(
        self, batch: Batch, pairs_KS: Tensor, taps: Taps, policy_head_VD: Tensor, coef_K: Tensor
    ) -> tuple[DraftOutput, list[Tensor]]:
        config, group = self.config, self.mesh.cp_group
        num_passes = config.draft.num_passes
        hidden_KTD = self.model(
            taps,
            batch,
            num_passes=num_passes,
            cp_group=group,
            mode=config.attention.cp_mode,
            kernel=config.attention.kernel,
            checkpoint=config.draft.checkpoint_passes,
        )
        result = draft_loss(
            hidden_KTD,
            self.model.lm_head.weight,
            with_halo(taps.final_hidden, batch.layout, num_passes, cp_group=group),
            policy_head_VD.detach(),
            pairs_KS,
            coef_K,
            vocab_map_U=self.model.policy_ids,
            chunk=config.draft.loss_chunk,
            renormalise=config.draft.renormalise_teacher,
        )
        return result, hidden_KTD

    def update(self, sums: Tensor, coef_K: Tensor, step: int) -> dict:
        """Reduce the figures over the mesh, clip, update; returns the draft's fields of StepStats.

        All ranks call together: a shell adds `no_sums` and learns the figures.
        A non-finite loss or norm skips the update and is reported: the policy's goes on, until `Skips` ends the run.
        Without a pair that counts there is no loss (NaN) and nothing to learn from.
        """
        figures = self.figures(sums, coef_K)
        loss = figures["draft_loss"]
        norm = global_norm(self.optim.params, self.mesh)
        counted = bool((coef_K > 0).any())
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            clip_(self.optim.params, norm, self.optim.config.clip_norm)
            self.optim.step(step)
        return {**figures, "draft_grad_norm": norm, "draft_skipped": counted and not finite}

    def figures(self, sums: Tensor, coef_K: Tensor | None = None) -> dict:
        """The mesh-wide figures of summed rows. coef_K: as trained with; None takes the counts of these rows."""
        num_passes = self.config.draft.num_passes
        totals = self.mesh.sum_all(sums).cpu()
        loss_sum, alpha, top1, count = totals[: 4 * num_passes].view(4, num_passes)
        length_sum, length_count = totals[4 * num_passes :].tolist()
        if coef_K is None:
            coef_K = pass_coefficients(count, self.config.draft.pass_decay)
        return {
            "draft_loss": (coef_K.cpu().double() * loss_sum).sum().item() if (count > 0).any() else float("nan"),
            "draft_acceptance": tuple((alpha / count).tolist()),
            "draft_top1": tuple((top1 / count).tolist()),
            "draft_simulated_acceptance_length": length_sum / length_count if length_count else float("nan"),
        }


def _sums(result: DraftOutput) -> Tensor:
    sums = [result.loss_sum, result.alpha_sum, result.top1_sum, result.count]
    return torch.cat([*sums, result.length_sum.view(1), result.length_count.view(1)]).to(torch.float64)


def shell(model: Eagle3Draft) -> Eagle3Draft:
    """The draft without its weights: parameters on the meta device, settings and vocabulary as they are."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.to("meta"), requires_grad=False))
    return model


def pass_coefficients(count_K: Tensor, decay: float) -> Tensor:
    """float32 [K]: what multiplies the loss sum of each pass.

    `L = sum_k w_k S_k / N_k / sum_k w_k` with `w_k = decay**k`; a pass without pairs adds 0.
    """
    weight_K = decay ** torch.arange(count_K.numel(), dtype=torch.float64)
    coef_K = torch.where(count_K > 0, weight_K / count_K.clamp(min=1), 0.0) / weight_K.sum()
    return coef_K.to(torch.float32)
