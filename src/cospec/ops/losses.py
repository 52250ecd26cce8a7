"""Soft-label draft loss and label log-probabilities that never hold `[T, V]` logits.

Both sweep over chunks of rows and, where a row block is still too large, over tiles of
the vocabulary with a running logsumexp. `draft_loss` forms its gradients in the sweep;
`token_logprobs` recomputes a tile in backward, since its upstream gradient is per token.

Letters beyond the legend of cospec.records: S teacher rows, C rows of a chunk,
W columns of a vocabulary tile. The machinery of tiles is in ops.tiling.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cospec.ops import tiling
from cospec.ops.tiling import Running, add_product, blocks, buffer, product_into, sweep, tiles
from cospec.records import DraftOutput

_MIN_ROWS = 64
"""Below this many rows a matrix product waits for the head's memory: then it is cheaper to
cut the vocabulary in tiles and compute the draft's logits twice."""


def draft_loss(
    hidden_KTD: Sequence[Tensor],
    head_UD: Tensor,
    teacher_SD: Tensor,
    teacher_head_VD: Tensor,
    rows_KS: Tensor,
    coef_K: Tensor,
    *,
    vocab_map_U: Tensor | None = None,
    chunk: int = 256,
    renormalise: bool = False,
) -> DraftOutput:
    """Soft cross-entropy of K draft passes against the policy's own distribution.

    `loss = sum_k coef_k sum_pairs -sum_u policy(u) log draft(u)`: `policy` is the softmax
    over all V tokens restricted to the draft vocabulary, where it keeps its mass m < 1
    unless `renormalise`; `draft` is the softmax over U. Gradient of a pair's logits:
    `m * draft - policy`. Pairs that do not count add nothing, whatever their rows hold.

    The metrics compare with the policy over its whole vocabulary: acceptance is
    `sum_u min(policy, draft)` and top-1 asks for the policy's argmax over V.

    Args:
        hidden_KTD: K tensors [T, D], the draft's head inputs of each pass.
        head_UD: the draft's head. Matrix products run in its dtype.
        teacher_SD: the policy's final normed hidden states; detached here.
        teacher_head_VD: the policy's head; detached here.
        rows_KS: int64 [K, S]: the row of pass k whose pair has teacher row s, -1 where no
            pair counts. A row may appear once per pass.
        coef_K: what multiplies the loss sum of each pass (global weight / global count).
        vocab_map_U: int64 [U], policy ids of the draft vocabulary; None is the identity.
        chunk: teacher rows at a time, at most.

    Numerics: softmax, loss and sums in float32 (float64 for float64 heads), also for
        bfloat16 inputs. The head's gradient is accumulated in float32.
    Memory: under 64 MiB above inputs and gradients at V = 151936, whatever T. The gradient
        of a bfloat16 head counts as float32, and is rounded once at the end.
    Raises: ValueError for shapes that do not fit together.
    """
    hidden_KTD = tuple(hidden_KTD)
    _check_draft_inputs(hidden_KTD, head_UD, teacher_SD, teacher_head_VD, rows_KS, coef_K, vocab_map_U, chunk)
    sums = _DraftLoss.apply(
        torch.is_grad_enabled(),
        teacher_SD.detach(),
        teacher_head_VD.detach(),
        rows_KS,
        coef_K,
        vocab_map_U,
        chunk,
        renormalise,
        head_UD,
        *hidden_KTD,
    )
    return DraftOutput(*sums)


def token_logprobs(
    hidden_TD: Tensor, head_VD: Tensor, labels_T: Tensor, *, temperature: float = 1.0, chunk: int = 1024
) -> Tensor:
    """float32 [T]: log-probability of each label under `softmax(hidden @ head.T / temperature)`.

    float64 for a float64 head. Saves one logsumexp per row; gradients flow to hidden and
    head. Raises ValueError for shapes that do not fit or a temperature <= 0.
    """
    if hidden_TD.ndim != 2 or head_VD.ndim != 2 or hidden_TD.shape[1] != head_VD.shape[1]:
        raise ValueError(f"hidden {tuple(hidden_TD.shape)} and head {tuple(head_VD.shape)} must be [T, D] and [V, D]")
    if labels_T.shape != hidden_TD.shape[:1]:
        raise ValueError(f"labels has shape {tuple(labels_T.shape)}, hidden has {hidden_TD.shape[0]} rows")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be > 0")
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be >= 1")
    return _TokenLogprobs.apply(hidden_TD, head_VD, labels_T, float(temperature), chunk)


def _check_draft_inputs(hidden_KTD, head_UD, teacher_SD, teacher_head_VD, rows_KS, coef_K, vocab_map_U, chunk) -> None:
    num_passes = len(hidden_KTD)
    if num_passes < 1:
        raise ValueError("hidden_KTD must hold at least one pass")
    shape = hidden_KTD[0].shape
    if len(shape) != 2 or any(h.shape != shape for h in hidden_KTD):
        raise ValueError(f"every pass must be [T, D] of one shape, got {[tuple(h.shape) for h in hidden_KTD]}")
    if head_UD.ndim != 2 or head_UD.shape[1] != shape[1]:
        raise ValueError(f"head_UD has shape {tuple(head_UD.shape)}, hidden has D={shape[1]}")
    if teacher_head_VD.ndim != 2 or teacher_SD.ndim != 2 or teacher_SD.shape[1] != teacher_head_VD.shape[1]:
        raise ValueError(
            f"teacher_SD {tuple(teacher_SD.shape)} and teacher_head_VD {tuple(teacher_head_VD.shape)} must share D"
        )
    if tuple(rows_KS.shape) != (num_passes, teacher_SD.shape[0]):
        raise ValueError(f"rows_KS has shape {tuple(rows_KS.shape)}, must be {(num_passes, teacher_SD.shape[0])}")
    if tuple(coef_K.shape) != (num_passes,):
        raise ValueError(f"coef_K has shape {tuple(coef_K.shape)}, must be {(num_passes,)}")
    mapped = teacher_head_VD.shape[0] if vocab_map_U is None else vocab_map_U.shape[0]
    if mapped != head_UD.shape[0] or mapped > teacher_head_VD.shape[0]:
        raise ValueError(
            f"head_UD has {head_UD.shape[0]} rows for a draft vocabulary of {mapped}, "
            f"the policy's has {teacher_head_VD.shape[0]}"
        )
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be >= 1")


def _gather(x_TD: Tensor, rows_C: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of x, zero where the index is -1."""
    return x_TD.index_select(0, rows_C.clamp(min=0)).to(dtype).masked_fill_((rows_C < 0).unsqueeze(1), 0)


class _DraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        grad_enabled: bool,
        teacher_SD: Tensor,
        teacher_head_VD: Tensor,
        rows_KS: Tensor,
        coef_K: Tensor,
        vocab_map_U: Tensor | None,
        chunk: int,
        renormalise: bool,
        head_UD: Tensor,
        *hidden_KTD: Tensor,
    ):
        num_passes, rows_T = len(hidden_KTD), hidden_KTD[0].shape[0]
        device, matmul_dtype = head_UD.device, head_UD.dtype
        dtype = torch.float64 if matmul_dtype == torch.float64 else torch.float32
        vocab_V, vocab_U, dim = teacher_head_VD.shape[0], head_UD.shape[0], head_UD.shape[1]
        coef_K = coef_K.to(dtype)

        # Only the teacher rows that some pass needs, as many at a time as let the draft's
        # logits of a pass stay whole, if that is enough rows.
        wanted_S = (rows_KS >= 0).any(0).nonzero().squeeze(1)
        cells = tiling.LOGITS_BYTES // dtype.itemsize
        chunk_rows = max(1, min(len(wanted_S), chunk))
        beside = 4 * dim  # cells a row beside two of logits: hidden states of both models and gradients
        fit = 2 * cells // (2 * vocab_U + beside)
        whole_U = fit >= min(chunk_rows, _MIN_ROWS)
        if whole_U:
            chunk_rows = min(chunk_rows, fit)
            cells = chunk_rows * vocab_U
        else:  # every pass keeps the gradient of its rows from tile to tile
            beside += num_passes * dim
            chunk_rows = max(1, min(chunk_rows, cells // (4 * beside)))
            cells = max(chunk_rows, cells - chunk_rows * beside // 2)
        size_V, size_U = (max(1, min(vocab, cells // chunk_rows)) for vocab in (vocab_V, vocab_U))
        logits = torch.empty(chunk_rows * max(size_V, size_U), dtype=dtype, device=device)
        policy = torch.empty(chunk_rows * size_U, dtype=dtype, device=device)
        scratch = torch.empty(
            max(chunk_rows, min(logits.numel(), tiling.SCRATCH_BYTES // dtype.itemsize)), dtype=dtype, device=device
        )

        wants_hidden = grad_enabled and any(ctx.needs_input_grad[-num_passes:])
        wants_head = grad_enabled and ctx.needs_input_grad[-num_passes - 1]
        grad_hidden = [torch.zeros_like(h) for h in hidden_KTD] if wants_hidden else []
        grad_head_UD = torch.zeros(vocab_U, dim, dtype=dtype, device=device) if wants_head else None

        loss_KT = torch.zeros(num_passes, rows_T, dtype=dtype, device=device)
        alpha_KT, top1_KT, counted_KT = (torch.zeros_like(loss_KT) for _ in range(3))
        in_draft_V = draft_id_V = columns_U = None
        if vocab_map_U is not None:
            draft_id_V = torch.full((vocab_V,), -1, dtype=torch.int64, device=device)
            draft_id_V[vocab_map_U] = torch.arange(vocab_U, device=device)
            in_draft_V = (draft_id_V >= 0).to(dtype)
            columns_U = tiling.Columns.of(vocab_map_U, tiles(vocab_V, size_V)) if whole_U else None

        for begin in range(0, len(wanted_S), chunk_rows):
            wanted_C = wanted_S[begin : begin + chunk_rows]
            num_rows, rows_KC = len(wanted_C), rows_KS[:, wanted_C]
            teacher_CD = teacher_SD[wanted_C].to(teacher_head_VD.dtype)
            teacher = Running.start(num_rows, logits, argmax=True, subset=vocab_map_U is not None)
            keep = (buffer(policy, num_rows, vocab_U), columns_U) if whole_U else None
            sweep(teacher, teacher_CD, teacher_head_VD, size_V, logits, scratch, in_subset_V=in_draft_V, keep=keep)
            teacher_lse_C1, mass_C1 = teacher.logsumexp_C1, teacher.mass_C1
            # The policy's best token as the draft numbers it, -1 outside its vocabulary.
            best_C1 = teacher.argmax_C1 if draft_id_V is None else draft_id_V[teacher.argmax_C1]
            target_scale_C1, target_mass_C1 = None, mass_C1
            if renormalise:
                target_scale_C1 = torch.where(mass_C1 > 0, 1 / mass_C1, 0.0)
                target_mass_C1 = (mass_C1 > 0).to(dtype)

            counts_KC = (rows_KC >= 0).to(dtype)
            stats_K = [Running.start(num_rows, logits) for _ in range(num_passes)]
            if not whole_U:
                for stats, hidden_TD, rows_C in zip(stats_K, hidden_KTD, rows_KC, strict=True):
                    sweep(stats, _gather(hidden_TD, rows_C, matmul_dtype), head_UD, size_U, logits, scratch)
            cells_KC3 = logits.new_zeros(num_passes, num_rows, 3)  # loss, alpha, top-1
            grad_KCD = [] if whole_U else [logits.new_zeros(num_rows, dim) for _ in grad_hidden]

            for tile in tiles(vocab_U, size_U):
                width = tile.stop - tile.start
                policy_CW = buffer(policy, num_rows, width)
                if not whole_U:
                    _teacher_tile(policy_CW, teacher_CD, teacher_head_VD, tile, vocab_map_U)
                policy_CW.sub_(teacher_lse_C1).exp_()
                policy_sum_C = policy_CW.sum(1)
                here_C1 = (best_C1 >= tile.start) & (best_C1 < tile.stop)
                local_C1 = (best_C1 - tile.start).clamp(0, width - 1)

                for k, (rows_C, stats) in enumerate(zip(rows_KC, stats_K, strict=True)):
                    loss_C, alpha_C, top1_C = cells_KC3[k].unbind(1)
                    hidden_CD = _gather(hidden_KTD[k], rows_C, matmul_dtype)
                    draft_CW = buffer(logits, num_rows, width)
                    product_into(draft_CW, hidden_CD, head_UD[tile])
                    if whole_U:
                        stats.peak_C1 = draft_CW.amax(1, keepdim=True)
                    top1_C += (here_C1 & (draft_CW.gather(1, local_C1) >= stats.peak_C1)).squeeze(1)
                    # Cross entropy: sum policy * (log normaliser - logit), all relative to the peak.
                    draft_CW.sub_(stats.peak_C1)
                    for columns, scratch_CW in blocks(draft_CW, scratch):
                        torch.mul(policy_CW[:, columns], draft_CW[:, columns], out=scratch_CW)
                        loss_C -= scratch_CW.sum(1)
                    draft_CW.exp_()
                    if whole_U:
                        stats.sum_C1 = draft_CW.sum(1, keepdim=True)
                    loss_C += policy_sum_C * stats.sum_C1.log().squeeze(1)
                    draft_CW.mul_(1 / stats.sum_C1)
                    for columns, scratch_CW in blocks(draft_CW, scratch):
                        torch.minimum(policy_CW[:, columns], draft_CW[:, columns], out=scratch_CW)
                        alpha_C += scratch_CW.sum(1)
                    if not (wants_hidden or wants_head):
                        continue
                    # Gradient of the logits: mass * draft - target, with the weight of the pair.
                    weight_C1 = (coef_K[k] * counts_KC[k]).unsqueeze(1)
                    target_weight_C1 = weight_C1 if target_scale_C1 is None else weight_C1 * target_scale_C1
                    draft_CW.mul_(weight_C1 * target_mass_C1).addcmul_(policy_CW, target_weight_C1, value=-1)
                    if grad_head_UD is not None:
                        add_product(grad_head_UD[tile], draft_CW.T, hidden_CD)
                    if not wants_hidden:
                        continue
                    grad_CD = grad_KCD[k] if grad_KCD else logits.new_zeros(num_rows, dim)
                    add_product(grad_CD, draft_CW, head_UD[tile])
                    if tile.stop == vocab_U:
                        grad_hidden[k].index_add_(0, rows_C.clamp(min=0), grad_CD.to(grad_hidden[k].dtype))

            if target_scale_C1 is not None:
                cells_KC3[..., 0] *= target_scale_C1.T
            cells_KC3 *= counts_KC.unsqueeze(2)
            for k, rows_C in enumerate(rows_KC):
                index_C = rows_C.clamp(min=0)  # an uncounted pair adds zero to row 0
                loss_KT[k].index_add_(0, index_C, cells_KC3[k, :, 0])
                alpha_KT[k].index_add_(0, index_C, cells_KC3[k, :, 1])
                top1_KT[k].index_add_(0, index_C, cells_KC3[k, :, 2])
                counted_KT[k].index_add_(0, index_C, counts_KC[k])

        loss_sum_K = loss_KT.double().sum(1)
        whole_T = (counted_KT > 0).all(0).double()
        length_T = 1 + alpha_KT.double().cumprod(0).sum(0)
        ctx.grads = (grad_head_UD, grad_hidden)
        ctx.head_dtype = matmul_dtype
        metrics = (
            loss_sum_K,
            alpha_KT.double().sum(1),
            top1_KT.double().sum(1),
            counted_KT.double().sum(1),
            (length_T * whole_T).sum(),
            whole_T.sum(),
        )
        ctx.mark_non_differentiable(*metrics)
        return ((coef_K.double() * loss_sum_K).sum().to(dtype), *metrics)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss: Tensor, *_):
        if ctx.grads is None:
            raise RuntimeError("draft_loss: backward a second time; its gradients are formed once and handed out")
        grad_head_UD, grad_hidden = ctx.grads
        ctx.grads = None  # scaled in place: no second copy of the head's gradient
        if grad_head_UD is not None:
            grad_head_UD = grad_head_UD.mul_(grad_loss).to(ctx.head_dtype)
        num_passes = len(ctx.needs_input_grad) - 9
        grads = [g.mul_(grad_loss) for g in grad_hidden] or [None] * num_passes
        return (*[None] * 8, grad_head_UD, *grads)


def _teacher_tile(
    out_CW: Tensor, teacher_CD: Tensor, teacher_head_VD: Tensor, tile: slice, vocab_map_U: Tensor | None
) -> None:
    """Teacher logits of the tile's draft tokens; head rows are gathered a few at a time."""
    if vocab_map_U is None:
        product_into(out_CW, teacher_CD, teacher_head_VD[tile])
        return
    ids_W = vocab_map_U[tile]
    size = tiling.SCRATCH_BYTES // (teacher_head_VD.shape[1] * teacher_head_VD.element_size())
    for part in tiles(len(ids_W), size):
        product_into(out_CW[:, part], teacher_CD, teacher_head_VD[ids_W[part]])


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD: Tensor, head_VD: Tensor, labels_T: Tensor, temperature: float, chunk: int):
        dtype = torch.float64 if head_VD.dtype == torch.float64 else torch.float32
        num_rows, vocab = hidden_TD.shape[0], head_VD.shape[0]
        cells = tiling.LOGITS_BYTES // dtype.itemsize
        rows = max(1, min(num_rows, chunk, cells // min(vocab, 1024)))
        size = max(1, min(vocab, cells // rows))
        logits = torch.empty(rows * size, dtype=dtype, device=hidden_TD.device)
        scratch = logits.new_empty(max(rows, min(rows * size, tiling.SCRATCH_BYTES // dtype.itemsize)))
        logp_T = torch.empty(num_rows, dtype=dtype, device=hidden_TD.device)
        lse_T = torch.empty_like(logp_T)
        for part in tiles(num_rows, rows):
            x_CD, labels_C1 = hidden_TD[part].to(head_VD.dtype), labels_T[part].unsqueeze(1)
            running = Running.start(len(x_CD), logits)
            label_C1 = logits.new_zeros(len(x_CD), 1)
            for tile in tiles(vocab, size):
                logits_CW = buffer(logits, len(x_CD), tile.stop - tile.start)
                product_into(logits_CW, x_CD, head_VD[tile])
                logits_CW.mul_(1 / temperature)
                running.add(logits_CW, tile.start, scratch)
                inside_C1, local_C1 = _inside(labels_C1, tile)
                label_C1 = torch.where(inside_C1, logits_CW.gather(1, local_C1), label_C1)
            lse_T[part] = running.logsumexp_C1.squeeze(1)
            logp_T[part] = (label_C1 - running.logsumexp_C1).squeeze(1)
        ctx.save_for_backward(hidden_TD, head_VD, labels_T, lse_T)
        ctx.plan = (temperature, rows, size, dtype)
        return logp_T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_T: Tensor):
        hidden_TD, head_VD, labels_T, lse_T = ctx.saved_tensors
        temperature, rows, size, dtype = ctx.plan
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        logits = torch.empty(rows * size, dtype=dtype, device=hidden_TD.device)
        grad_hidden_TD = torch.empty_like(hidden_TD) if wants_hidden else None
        grad_head_VD = torch.zeros(head_VD.shape, dtype=dtype, device=head_VD.device) if wants_head else None
        for part in tiles(hidden_TD.shape[0], rows):
            x_CD, labels_C1 = hidden_TD[part].to(head_VD.dtype), labels_T[part].unsqueeze(1)
            grad_C1 = (grad_T[part].to(dtype) / temperature).unsqueeze(1)
            grad_CD = logits.new_zeros(x_CD.shape)
            for tile in tiles(head_VD.shape[0], size):
                logits_CW = buffer(logits, len(x_CD), tile.stop - tile.start)
                product_into(logits_CW, x_CD, head_VD[tile])
                logits_CW.mul_(1 / temperature).sub_(lse_T[part].unsqueeze(1)).exp_()
                # d logp[label] / d logits = onehot - softmax
                logits_CW.mul_(-grad_C1)
                inside_C1, local_C1 = _inside(labels_C1, tile)
                logits_CW.scatter_add_(1, local_C1, grad_C1 * inside_C1)
                if grad_hidden_TD is not None:
                    add_product(grad_CD, logits_CW, head_VD[tile])
                if grad_head_VD is not None:
                    add_product(grad_head_VD[tile], logits_CW.T, x_CD)
            if grad_hidden_TD is not None:
                grad_hidden_TD[part] = grad_CD
        if grad_head_VD is not None:
            grad_head_VD = grad_head_VD.to(head_VD.dtype)
        return grad_hidden_TD, grad_head_VD, None, None, None


def _inside(labels_C1: Tensor, tile: slice) -> tuple[Tensor, Tensor]:
    """Which labels lie in the tile, and their column there (any column for the others)."""
    inside_C1 = (labels_C1 >= tile.start) & (labels_C1 < tile.stop)
    return inside_C1, (labels_C1 - tile.start).clamp(0, tile.stop - tile.start - 1)
