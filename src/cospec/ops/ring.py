"""Trunk and branch attention over a context-parallel group, as one autograd function.

A trunk holds the keys and values of the first pass, sharded over cp. Every pass attends to
the trunk's causal prefix and to its own branch keys; with no branches this is plain packed,
context-parallel causal attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from cospec.layout import PackedLayout
from cospec.ops.agree import check_together
from cospec.ops.blocks import block_between, padding_rows
from cospec.ops.branch import branch_backward, branch_forward
from cospec.ops.dispatch import takes_dtensors
from cospec.ops.kernels import Kernel, choose_kernel
from cospec.ops.merge import accumulator_dtype, merge
from cospec.ops.wire import carried

KV_TAG, GRAD_TAG = 1, 2  # both may be under way between the same two ranks


@dataclass
class Traffic:
    """Bytes that this rank has sent for one trunk, forward and backward."""

    sent: int = 0


@dataclass(frozen=True)
class Trunk:
    """Trunk keys and values of one packed row, opened once for all passes.

    shards: what autograd sees. cp_size 1: k and v [J, M, H]. ring: one [2, J_local, M, H], this
    rank's keys and values. gather: one [cp, 2, J_local, M, H], those of all ranks.
    """

    layout: PackedLayout
    rank: int
    mode: str
    kernel: Kernel
    group: dist.ProcessGroup | None
    shards: tuple[Tensor, ...]
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def key_shape(self) -> tuple[int, int, int]:
        """(J_local, M, H)."""
        rows, heads, head_dim = self.shards[0].shape[-3:]
        return rows, heads, head_dim


@takes_dtensors
def open_trunk(
    k_JMH: Tensor,
    v_JMH: Tensor,
    layout: PackedLayout,
    *,
    cp_group: dist.ProcessGroup | None = None,
    mode: str = "ring",
    kernel: str | Kernel | None = None,
) -> Trunk:
    """Open the trunk of one packed row.

    Args:
        k_JMH, v_JMH: [J_local, M, H], this rank's rows of `layout`. Padding rows may hold anything.
        cp_group: the ranks that share the row, in the layout's order; None when `cp_size` is 1.
        mode: "ring" passes shards round in every pass and holds one extra; "gather" collects all
            of them here, once, and reduces their gradient once, after all passes.
        kernel: a kernel, its name, or None to choose by device and dtype.

    Raises:
        ValueError: shapes, dtypes or devices of k and v differ, their rows are not the
            layout's, the group's size is not the layout's, or an unknown mode or kernel; on
            every rank of the group, see ops.agree.
    """
    chosen: list[Kernel] = []

    def check() -> None:
        if k_JMH.ndim != 3 or k_JMH.shape != v_JMH.shape:
            raise ValueError(f"k and v must be equal [J, M, H], got {tuple(k_JMH.shape)} and {tuple(v_JMH.shape)}")
        _same_kind("k", k_JMH, "v", v_JMH)
        if mode not in ("ring", "gather"):
            raise ValueError(f"mode={mode!r}: choose 'ring' or 'gather'")
        group_size = 1 if cp_group is None else dist.get_world_size(cp_group)
        if group_size != layout.cp_size:
            raise ValueError(f"cp_group has {group_size} ranks, the layout has cp_size={layout.cp_size}")
        _check_rows("k", k_JMH, layout)
        named = kernel is None or isinstance(kernel, str)
        chosen.append(choose_kernel(k_JMH.device, k_JMH.dtype, kernel or "auto") if named else kernel)

    same = f"k and v {tuple(k_JMH.shape)} {k_JMH.dtype} {k_JMH.device.type}, mode {mode}"
    check_together(("open_trunk", mode), layout, cp_group, check, same)
    (kernel,) = chosen
    k_JMH, v_JMH = _dense_rows(k_JMH), _dense_rows(v_JMH)
    traffic = Traffic()
    if layout.cp_size == 1:
        return Trunk(layout, 0, mode, kernel, None, (k_JMH, v_JMH), traffic)
    kv = torch.stack((k_JMH, v_JMH))  # one message for both
    if mode == "gather":
        kv = _Gather.apply(kv, cp_group, traffic)
    return Trunk(layout, dist.get_rank(cp_group), mode, kernel, cp_group, (kv,), traffic)


@takes_dtensors
def trunk_branch_attention(
    q_TNH: Tensor,
    trunk: Trunk,
    k_branches: Sequence[Tensor] = (),
    v_branches: Sequence[Tensor] = (),
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention of each row to its causal trunk prefix and to its own branch keys.

    Shapes:   q [T, N, H], branches [T, M, H] each, out [T, N, H]; T the rank's rows, M divides N.
              Padding rows of out, and of every gradient, are 0.
    Sharding: T is a cp shard in the layout's order; every rank of the group calls together, and
              runs backward together (a share of 0 must still be part of the loss).
    Numerics: float32 accumulators (float64 for float64); exact gradients.
    scale:    multiplies the scores, default H ** -0.5.
    window:   keys a row sees, itself included, by position: with K branches the query stands K
              positions after its row. None means all; needs window > K, and the math kernel
              where a document is longer than the window.

    Raises:
        ValueError: shapes, dtypes, devices or counts that do not fit, naming both values.
    """
    layout, head_dim = trunk.layout, trunk.key_shape[2]

    def check() -> None:
        _check_pass(q_TNH, trunk, k_branches, v_branches, window)

    same = f"q {tuple(q_TNH.shape)} {q_TNH.dtype}, {len(k_branches)} branches, window {window}"
    point = ("trunk_branch_attention", trunk.mode, len(k_branches))
    check_together(point, layout, trunk.group, check, same)
    kernel = trunk.kernel
    if window is not None:
        depth = len(k_branches)
        window = window - depth if max(layout.lengths) > window - depth else None
    if window is not None and kernel.name != "math" and (kernel.name != "cuda_flash" or layout.cp_size > 1):
        kernel = choose_kernel(q_TNH.device, q_TNH.dtype, "math")
    call = _Call(trunk, kernel, head_dim**-0.5 if scale is None else scale, window, len(k_branches))
    return _TrunkBranchAttention.apply(call, _dense_rows(q_TNH), *trunk.shards, *k_branches, *v_branches)


def _check_pass(
    q: Tensor, trunk: Trunk, k_branches: Sequence[Tensor], v_branches: Sequence[Tensor], window: int | None
) -> None:
    rows, key_heads, head_dim = trunk.key_shape
    if q.ndim != 3 or q.shape[-1] != head_dim:
        raise ValueError(f"q must be [T, N, {head_dim}] as the trunk's keys, got {tuple(q.shape)}")
    if q.shape[1] % key_heads:
        raise ValueError(f"q has {q.shape[1]} heads, no multiple of the trunk's {key_heads}")
    _check_rows("q", q, trunk.layout)
    _same_kind("q", q, "the trunk", trunk.shards[0])
    if len(k_branches) != len(v_branches):
        raise ValueError(f"got {len(k_branches)} k_branches and {len(v_branches)} v_branches")
    for name, branches in (("k_branches", k_branches), ("v_branches", v_branches)):
        for i, branch in enumerate(branches):
            if tuple(branch.shape) != (rows, key_heads, head_dim):
                raise ValueError(f"{name}[{i}] has shape {tuple(branch.shape)}, expected {(rows, key_heads, head_dim)}")
            _same_kind(f"{name}[{i}]", branch, "q", q)
    if window is not None and window <= len(k_branches):
        raise ValueError(f"window={window} must be larger than the number of branches, {len(k_branches)}")


@dataclass(frozen=True)
class _Call:
    trunk: Trunk
    kernel: Kernel
    scale: float
    window: int | None
    depth: int

    def split(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
        """Trunk shards, branch keys, branch values."""
        first = len(tensors) - 2 * self.depth
        return tensors[:first], tensors[first : first + self.depth], tensors[first + self.depth :]


class _TrunkBranchAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: _Call, q: Tensor, *tensors: Tensor) -> Tensor:
        trunk = call.trunk
        shards, k_branches, v_branches = call.split(tensors)
        single = trunk.layout.cp_size == 1
        dtype = accumulator_dtype(q.dtype)
        out, lse = branch_forward(q, k_branches, v_branches, call.scale) if call.depth else (None, None)
        for source, k, v in _walk(trunk, shards):
            block = block_between(trunk.layout, trunk.rank, source)
            rows, keys = block.q_range, block.k_range
            new_out, new_lse = call.kernel.forward(q[rows], k[keys], v[keys], block, call.scale, call.window)
            if out is None or lse is None:  # the first block covers all rows
                out, lse = new_out if single else new_out.to(dtype), new_lse
            elif len(new_out) == len(out):
                out, lse = merge(out, lse, new_out, new_lse)
            else:
                out[rows], lse[rows] = merge(out[rows], lse[rows], new_out, new_lse)
        assert out is not None, "every rank has a block of its own keys"
        assert lse is not None
        padding = padding_rows(trunk.layout, trunk.rank, q.device) if call.depth else None
        if padding is not None:  # branches were computed on padding rows too
            out.index_fill_(0, padding, 0)
            lse.index_fill_(0, padding, 0)
        out = out.to(q.dtype)
        ctx.call = call
        ctx.save_for_backward(q, out, lse, *tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        call = ctx.call
        trunk = call.trunk
        q, out, lse, *tensors = ctx.saved_tensors
        shards, k_branches, v_branches = call.split(tensors)
        grad = grad.contiguous()

        def block_backward(source: int, k: Tensor, v: Tensor):
            block = block_between(trunk.layout, trunk.rank, source)
            rows, keys = block.q_range, block.k_range
            grads = call.kernel.backward(
                grad[rows], q[rows], k[keys], v[keys], out[rows], lse[rows], block, call.scale, call.window
            )
            return rows, keys, *grads

        if trunk.layout.cp_size == 1:
            _, _, dq, dk, dv = block_backward(0, *shards)
            dshards = [dk.to(q.dtype), dv.to(q.dtype)]
        else:
            run = _gathered_backward if trunk.mode == "gather" else _ring_backward
            dq, dshard = run(trunk, shards, block_backward)
            dshards = [dshard]
        dk_branches, dv_branches = [], []
        if call.depth:
            dq, dk_branches, dv_branches = branch_backward(
                grad, q, k_branches, v_branches, out, lse, call.scale, dq.to(lse.dtype).contiguous()
            )
            padding = padding_rows(trunk.layout, trunk.rank, q.device)
            if padding is not None:
                for x in (dq, *dk_branches, *dv_branches):
                    x.index_fill_(0, padding, 0)
        return None, dq.to(q.dtype), *dshards, *dk_branches, *dv_branches


def _walk(trunk: Trunk, shards: Sequence[Tensor]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(owner, k, v) of every shard, one's own first and then backwards round the ring.

    In ring mode the next shard travels while the caller computes on the present one.
    """
    cp = trunk.layout.cp_size
    if cp == 1:
        k, v = shards
        yield 0, k, v
        return
    if trunk.mode == "gather":
        for step in range(cp):
            source = (trunk.rank - step) % cp
            yield source, shards[0][source, 0], shards[0][source, 1]
        return
    kv = shards[0]
    for step in range(cp):
        arriving = _pass_on(kv, trunk, KV_TAG) if step < cp - 1 else None
        yield (trunk.rank - step) % cp, kv[0], kv[1]
        if arriving is not None:
            kv = arriving()


def _ring_backward(trunk: Trunk, shards: Sequence[Tensor], block_backward) -> tuple[Tensor, Tensor]:
    """dq [T, N, H] in the accumulator dtype, and the gradient of this rank's shard [2, J_local, M, H].

    The gradient of a foreign shard starts at its first foreign user and travels along with the
    shard; after the last step it is one hop from home.
    """
    dtype = accumulator_dtype(shards[0].dtype)
    dq = own = arriving = None
    for source, k, v in _walk(trunk, shards):
        rows, keys, block_dq, dk, dv = block_backward(source, k, v)
        if dq is None:  # the first block, of the own keys, covers all rows
            dq, own = block_dq.to(dtype), torch.stack((dk, dv)).to(dtype)
            continue
        dq[rows] += block_dq
        if arriving is None:
            total = torch.zeros(shards[0].shape, dtype=dtype, device=dq.device)
        else:
            total = arriving()
        total[0, keys] += dk
        total[1, keys] += dv
        arriving = _pass_on(total, trunk, GRAD_TAG)
    assert dq is not None
    assert own is not None
    assert arriving is not None, "a ring has at least two ranks"
    return dq, own.add_(arriving()).to(shards[0].dtype)


def _gathered_backward(trunk: Trunk, shards: Sequence[Tensor], block_backward) -> tuple[Tensor, Tensor]:
    """dq [T, N, H] in the accumulator dtype, and this rank's share of all shards' gradients [cp, 2, J_local, M, H]."""
    dq = None
    total = torch.zeros_like(shards[0])
    for source, k, v in _walk(trunk, shards):
        rows, keys, block_dq, dk, dv = block_backward(source, k, v)
        if dq is None:
            dq = block_dq.to(accumulator_dtype(k.dtype))
        else:
            dq[rows] += block_dq
        total[source, 0, keys] = dk
        total[source, 1, keys] = dv
    assert dq is not None
    return dq, total


def _pass_on(x: Tensor, trunk: Trunk, tag: int) -> Callable[[], Tensor]:
    """Send `x` to the next rank of the ring; the returned function waits for the previous rank's."""
    cp, group = trunk.layout.cp_size, trunk.group
    assert group is not None, "a ring of several ranks has a group"
    device = x.device
    sent = [carried(x.contiguous(), group)]  # a list, to let go of it at the wait
    received = torch.empty_like(sent[0])
    following = dist.get_global_rank(group, (trunk.rank + 1) % cp)
    preceding = dist.get_global_rank(group, (trunk.rank - 1) % cp)
    # Both are posted before either is waited for, so that no order of ranks can deadlock.
    requests = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent[0], following, group, tag),
            dist.P2POp(dist.irecv, received, preceding, group, tag),
        ]
    )
    trunk.traffic.sent += x.numel() * x.element_size()

    def wait() -> Tensor:
        for request in requests:
            request.wait()
        sent.clear()
        return received.to(device)

    return wait


class _Gather(torch.autograd.Function):
    """[2, J_local, M, H] of each rank -> [cp, 2, J_local, M, H]; the gradient is summed at its owner, once."""

    @staticmethod
    def forward(ctx, kv: Tensor, group: dist.ProcessGroup, traffic: Traffic) -> Tensor:
        ctx.group, ctx.traffic = group, traffic
        size = dist.get_world_size(group)
        mine = carried(kv.contiguous(), group)
        gathered = mine.new_empty(size, *kv.shape)
        dist.all_gather_single(gathered.flatten(0, 1), mine, group=group)
        traffic.sent += (size - 1) * kv.numel() * kv.element_size()
        return gathered.to(kv.device)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        mine = carried(grad.contiguous(), ctx.group)
        received = torch.empty_like(mine)
        dist.all_to_all_single(received, mine, group=ctx.group)
        ctx.traffic.sent += grad[1:].numel() * grad.element_size()
        # Summed here and not by the network: half precisions add up in float32.
        total = received.to(grad.device, accumulator_dtype(grad.dtype)).sum(0)
        return total.to(grad.dtype), None, None


def _check_rows(name: str, x: Tensor, layout: PackedLayout) -> None:
    if x.shape[0] != layout.num_local_rows:
        raise ValueError(f"{name} has {x.shape[0]} rows, the layout has {layout.num_local_rows} on each rank")


def _dense_rows(x: Tensor) -> Tensor:
    """Kernels take any strides but in the head dim, where some read wrong values instead of complaining."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _same_kind(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    if x.dtype != other.dtype:
        raise ValueError(f"{name} has dtype {x.dtype}, {other_name} has {other.dtype}")
    if x.device != other.device:
        raise ValueError(f"{name} is on {x.device}, {other_name} on {other.device}")
