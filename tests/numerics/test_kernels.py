"""Attention kernels and the single-rank op against the dense float64 oracle."""

import pytest
import torch

from cospec.layout import PackedLayout
from cospec.ops.blocks import block_between
from cospec.ops.kernels import KERNELS, choose_kernel
from cospec.ops.ring import open_trunk, trunk_branch_attention
from support import varlen_emulation
from support.attention_case import TOLERANCE, assert_close, inputs, local, oracle

CPU_KERNELS = ("cpu_flash", "math")
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def check(lengths, dtype, kernel, *, depth=0, pad_to=None, window=None, **sizes):
    layout = PackedLayout(lengths, 1, pad_to)
    tensors = inputs(lengths, depth, dtype, **sizes)
    expected = oracle(tensors, lengths, window=window)
    got = local(tensors, layout, kernel=kernel, window=window)
    padding = ~layout.valid(0)
    for x in got:
        assert (x[padding] == 0).all()  # False for nan
    assert_close([layout.unshard([x]) for x in got], expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize(
    "lengths, pad_to",
    [((1,), None), ((1, 1, 1), 8), ((5, 1, 7, 2), 24), ((64, 33, 32, 31), None), ((130,), None)],
)
def test_packed_documents(lengths, pad_to, kernel, dtype):
    """Known failures 5, 7: odd sizes, one-token documents, filler; padding holds nan."""
    check(lengths, dtype, kernel, pad_to=pad_to)


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("heads, key_heads, head_dim", [(4, 4, 8), (8, 1, 64), (6, 2, 5), (2, 1, 128), (2, 2, 256)])
def test_heads_and_head_dims(heads, key_heads, head_dim, kernel):
    sizes = {"heads": heads, "key_heads": key_heads, "head_dim": head_dim}
    check((9, 4), torch.float64, kernel, depth=2, **sizes)
    check((9, 4), torch.float32, kernel, depth=2, **sizes)


@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_hundreds_of_short_documents(kernel):
    lengths = [1 + (7 * i) % 5 for i in range(300)]
    check(lengths, torch.float64, kernel, heads=2, key_heads=1, head_dim=4)
    assert len(block_between(PackedLayout(lengths), 0, 0).tiled(torch.device("cpu")).tiles) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_long_beside_short(kernel, dtype):
    """A document longer than the largest batch of padded ones is a tile of its own."""
    check((530, 3, 61, 2), dtype, kernel, heads=2, key_heads=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("window", [4, 11, 100])
def test_sliding_window(window, depth, dtype):
    check((23, 5, 40), dtype, None, depth=depth, window=window)


def test_math_in_chunks_of_queries(monkeypatch):
    """Scores are held for a few rows at a time."""
    monkeypatch.setattr("cospec.ops.kernels.MATH_SCORES", 256)
    check((30, 17), torch.float64, "math", depth=1)
    check((30, 17), torch.float64, "math", depth=1, window=5)


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("depth", [0, 2])
def test_huge_scores_stay_finite(kernel, depth):
    """Known failure 9: scores of +-1e4 give finite results, within float32's own error."""
    lengths = (40, 9)
    tensors = inputs(lengths, depth, torch.float32, head_dim=64, seed=3)
    tensors[0] *= 3e3
    scores = torch.einsum("tnh,jnh->tnj", tensors[0], tensors[1].repeat_interleave(2, 1)) / 8
    assert scores.max() > 1e4
    assert scores.min() < -1e4
    expected = oracle(tensors, lengths)
    got = local(tensors, PackedLayout(lengths), kernel=kernel)
    assert all(torch.isfinite(x).all() for x in got)
    assert_close([PackedLayout(lengths).unshard(got[:1])], expected[:1], 1e-2)


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_documents_are_bit_equal(kernel, dtype):
    """Known failures 4, 6: another document's content reaches no row and no gradient of this one."""
    lengths, depth = (6, 20, 3, 18, 6), 2
    layout = PackedLayout(lengths)
    before = inputs(lengths, depth, dtype)
    changed = slice(6, 26)  # the second document
    after = [x.clone() for x in before]
    for x in after:
        x[changed] = torch.randn(x[changed].shape, dtype=torch.float64).to(dtype)
    rest = torch.ones(sum(lengths), dtype=torch.bool)
    rest[changed] = False
    for a, b in zip(local(before, layout, kernel=kernel), local(after, layout, kernel=kernel), strict=True):
        a, b = layout.unshard([a]), layout.unshard([b])
        assert torch.equal(a[rest], b[rest])
        assert not torch.equal(a[~rest], b[~rest])


@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_packed_equals_alone(kernel):
    """Known failure 7."""
    lengths, depth = (7, 30, 1, 12), 2
    tensors = inputs(lengths, depth, torch.float64)
    packed = [PackedLayout(lengths).unshard([x]) for x in local(tensors, PackedLayout(lengths), kernel=kernel)]
    start = 0
    for length in lengths:
        rows, layout = slice(start, start + length), PackedLayout([length])
        alone = local([x[rows] for x in tensors], layout, kernel=kernel)
        assert_close([x[rows] for x in packed], [layout.unshard([x]) for x in alone], 1e-13)
        start += length


def test_gradients_accumulate_over_passes():
    """One trunk serves several passes: its gradient is their sum."""
    lengths = (11, 5)
    layout = PackedLayout(lengths)
    q, k, v, *_, grad = (layout.shard(x, 0).requires_grad_() for x in inputs(lengths, 0, torch.float64))
    trunk = open_trunk(k, v, layout)
    outs = [trunk_branch_attention(q * s, trunk) for s in (1.0, 0.5, -2.0)]
    together = torch.autograd.grad(sum((o * grad).sum() for o in outs), (q, k, v), retain_graph=True)
    single = [torch.autograd.grad((o * grad).sum(), (q, k, v), retain_graph=True) for o in outs]
    for i, total in enumerate(together):
        torch.testing.assert_close(total, sum(s[i] for s in single), rtol=0, atol=1e-13)


@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_strides(kernel):
    """Any memory order of q, k, v and of the incoming gradient."""
    lengths, layout = (12,), PackedLayout((12,))  # one document: its rows are read in place
    tensors = inputs(lengths, 1, torch.float64)
    expected = oracle(tensors, lengths)
    for order in ((2, 1, 0), (1, 0, 2), (0, 2, 1)):
        inverse = [order.index(i) for i in range(3)]
        *leaves, grad = (x.permute(order).contiguous().permute(inverse) for x in tensors)
        q, k, v, k1, v1 = (x.requires_grad_() for x in leaves)
        out = trunk_branch_attention(q, open_trunk(k, v, layout, kernel=kernel), [k1], [v1])
        assert_close([out, *torch.autograd.grad(out, (q, k, v, k1, v1), grad)], expected, 1e-12)
    q, k, v, k1, v1, _ = (x.requires_grad_() for x in tensors)
    out = trunk_branch_attention(q, open_trunk(k, v, layout, kernel=kernel), [k1], [v1])
    (dq,) = torch.autograd.grad(out.sum(), q)  # an expanded gradient
    tensors[-1] = torch.ones_like(out)
    assert_close([dq], oracle([x.detach() for x in tensors], lengths)[1:2], 1e-12)


@pytest.mark.parametrize("window", [None, 6])
def test_cuda_kernel_arguments(monkeypatch, window):
    """What the CUDA kernel is handed, with its documented meaning emulated on CPU."""
    varlen_emulation.install(monkeypatch.setattr)
    lengths, depth = (13, 1, 34, 2), 1
    for pad_to in (None, 64):
        layout = PackedLayout(lengths, 1, pad_to)
        for dtype in (torch.float32, torch.bfloat16):
            tensors = inputs(lengths, depth, dtype)
            got = local(tensors, layout, kernel=KERNELS["cuda_flash"], window=window)
            expected = oracle(tensors, lengths, window=window)
            assert_close([layout.unshard([x]) for x in got], expected, TOLERANCE[dtype])


def test_cuda_kernel_schema():
    """torch's own shape rules for the packed flash ops accept the call."""
    layout = PackedLayout((5, 8), 1, 16)
    q = torch.randn(16, 4, 32, dtype=torch.bfloat16, device="meta", requires_grad=True)
    k = torch.randn(16, 2, 32, dtype=torch.bfloat16, device="meta", requires_grad=True)
    out = trunk_branch_attention(q, open_trunk(k, k, layout, kernel=KERNELS["cuda_flash"]))
    dq, dk = torch.autograd.grad(out.sum(), (q, k))
    assert (out.shape, dq.shape, dk.shape) == (q.shape, q.shape, k.shape)
    with pytest.raises(ValueError, match="head_dim=12"):
        trunk_branch_attention(q[..., :12], open_trunk(k[..., :12], k[..., :12], layout, kernel=KERNELS["cuda_flash"]))


def test_no_grad_keeps_nothing():
    lengths = (4, 4)
    tensors = inputs(lengths, 0, torch.float32)
    layout = PackedLayout(lengths)
    with torch.no_grad():
        q, k, v, *_ = (x.requires_grad_() for x in tensors)
        out = trunk_branch_attention(q, open_trunk(k, v, layout))
    assert out.grad_fn is None


def test_kernel_choice():
    cpu, cuda, meta = (torch.device(d) for d in ("cpu", "cuda", "meta"))
    assert choose_kernel(cpu, torch.float64).name == "cpu_flash"
    assert choose_kernel(cuda, torch.bfloat16).name == "cuda_flash"
    assert choose_kernel(cuda, torch.float32).name == "math"
    assert choose_kernel(meta, torch.float32).name == "math"
    assert choose_kernel(cpu, torch.float32, "math") is KERNELS["math"]
    with pytest.raises(ValueError, match="cuda_flash.*cpu: choose one of cpu_flash, math"):
        choose_kernel(cpu, torch.bfloat16, "cuda_flash")
    with pytest.raises(ValueError, match="cpu_flash.*on cuda"):
        choose_kernel(cuda, torch.bfloat16, "cpu_flash")
    with pytest.raises(ValueError, match="kernel='fast'"):
        choose_kernel(cpu, torch.float32, "fast")
    with pytest.raises(ValueError, match="int64"):
        choose_kernel(cpu, torch.int64)


def test_errors_name_both_values():
    layout = PackedLayout((5, 3))
    q, k = torch.zeros(10, 4, 8), torch.zeros(10, 2, 8)
    trunk = open_trunk(k, k, layout)
    with pytest.raises(ValueError, match="k has 9 rows, the layout has 10"):
        open_trunk(k[:9], k[:9], layout)
    with pytest.raises(ValueError, match=r"\(10, 2, 8\) and \(10, 1, 8\)"):
        open_trunk(k, k[:, :1], layout)
    with pytest.raises(ValueError, match="float32.*float64"):
        open_trunk(k, k.double(), layout)
    with pytest.raises(ValueError, match="cp_group has 1 ranks, the layout has cp_size=2"):
        open_trunk(torch.zeros(6, 2, 8), torch.zeros(6, 2, 8), PackedLayout((5, 3), 2))
    with pytest.raises(ValueError, match="mode='tree'"):
        open_trunk(k, k, layout, mode="tree")
    with pytest.raises(ValueError, match="q has 8 rows"):
        trunk_branch_attention(q[:8], trunk)
    with pytest.raises(ValueError, match="3 heads.*2"):
        trunk_branch_attention(q[:, :3], trunk)
    with pytest.raises(ValueError, match=r"\[T, N, 8\].*\(10, 4, 4\)"):
        trunk_branch_attention(q[..., :4], trunk)
    with pytest.raises(ValueError, match="float64.*float32"):
        trunk_branch_attention(q.double(), trunk)
    with pytest.raises(ValueError, match="1 k_branches and 0 v_branches"):
        trunk_branch_attention(q, trunk, [k])
    with pytest.raises(ValueError, match=r"k_branches\[0\] has shape \(9, 2, 8\), expected \(10, 2, 8\)"):
        trunk_branch_attention(q, trunk, [k[:9]], [k])
    with pytest.raises(ValueError, match=r"v_branches\[0\] has dtype torch.float64"):
        trunk_branch_attention(q, trunk, [k], [k.double()])
    with pytest.raises(ValueError, match="window=1 must be larger than the number of branches, 1"):
        trunk_branch_attention(q, trunk, [k], [k], window=1)
