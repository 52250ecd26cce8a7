"""ops.losses against the float64 oracle: forward, every gradient, tiles, masks, dtypes."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cospec.ops import losses, reference, tiling
from cospec.ops.losses import draft_loss, token_logprobs

FIELDS = ("loss", "loss_sum", "alpha_sum", "top1_sum", "count", "length_sum", "length_count")
CASES = [(1, 23, False), (2, 23, True), (3, 23, False), (4, 9, False), (5, 9, True), (8, 9, False)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def make_case(
    passes=3, rows=11, extra=3, vocab=23, draft_vocab=None, dim=6, dim_teacher=8, dtype=torch.float64, seed=0
):
    """Random inputs; pass k pairs teacher row s with local row s - k - 1, some masked."""
    dim, dim_teacher = 6, 8
    g = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    teacher_rows = rows + extra
    pairs = torch.full((passes, teacher_rows), -1, dtype=torch.int64)
    for k in range(passes):
        for s in range(teacher_rows):
            row = s - k - 1
            if 0 <= row < rows and (s * 7 + k) % 5:
                pairs[k, s] = row
    draft_vocab = vocab if draft_vocab is None else draft_vocab
    vocab_map = None if draft_vocab == vocab else torch.randperm(vocab, generator=g)[:draft_vocab].sort().values
    return {
        "hidden_KTD": [draw(rows, dim).requires_grad_() for _ in range(passes)],
        "head_UD": draw(draft_vocab, dim).requires_grad_(),
        "teacher_SD": draw(teacher_rows, dim_teacher),
        "teacher_head_VD": draw(vocab, dim_teacher) * 0.5,
        "rows_KS": pairs,
        "coef_K": torch.rand(passes, generator=g, dtype=torch.float64).to(torch.float32) * 0.1,
        "vocab_map_U": vocab_map,
    }


def run(fn, case, **kw):
    """Outputs as a dict, and the gradients of every pass and the head."""
    leaves = [t.detach().clone().requires_grad_() for t in (*case["hidden_KTD"], case["head_UD"])]
    out = fn(**{**case, "hidden_KTD": leaves[:-1], "head_UD": leaves[-1]}, **kw)
    out = out if isinstance(out, dict) else {name: getattr(out, name) for name in FIELDS}
    out["loss"].backward()
    return {k: v.detach() for k, v in out.items()}, [t.grad for t in leaves]


def assert_close(got, want, tolerance, what):
    error = ((got.double() - want.double()).abs() / want.double().abs().clamp(min=1)).max()
    assert error <= tolerance, f"{what}: {error}"


def assert_same(got, want, tolerance, counts_exact=True):
    for name in FIELDS:
        loose = 2e-2 if tolerance > 1e-3 else tolerance
        if name == "top1_sum" and tolerance > 1e-3:
            continue  # near-ties may flip in bfloat16
        assert_close(got[0][name], want[0][name], loose * max(1, len(want[1])), name)
    for i, (a, b) in enumerate(zip(got[1], want[1], strict=True)):
        assert a.dtype == (torch.bfloat16 if tolerance > 1e-3 else a.dtype)
        assert_close(a, b, tolerance, f"gradient {i}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("passes", "draft_vocab", "renormalise"), CASES)
def test_matches_oracle(passes, draft_vocab, renormalise, dtype):
    """Forward, metrics and all gradients; known failures 18 (products are averaged, a token
    outside the draft vocabulary is a rejection) and 20 (float32 losses)."""
    case = make_case(passes=passes, draft_vocab=draft_vocab, dtype=dtype)
    got = run(draft_loss, case, renormalise=renormalise, chunk=4)
    want = run(reference.draft_loss, case, renormalise=renormalise)
    assert_same(got, want, TOLERANCE[dtype])
    assert got[0]["loss"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert all(got[0][name].dtype == torch.float64 for name in FIELDS[1:])


def shrink(monkeypatch, cells, min_rows):
    """Buffers of so many float64, so that small cases take the paths of large vocabularies."""
    monkeypatch.setattr(tiling, "LOGITS_BYTES", 8 * cells)
    monkeypatch.setattr(tiling, "SCRATCH_BYTES", 8 * max(40, cells // 3))
    monkeypatch.setattr(losses, "_MIN_ROWS", min_rows)


@pytest.mark.parametrize("draft_vocab", [257, 100])
@pytest.mark.parametrize("chunk", [3, 256])
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("cells, min_rows", [(150, 2), (600, 2), (1500, 20)])
def test_vocabulary_tiles(monkeypatch, draft_vocab, chunk, renormalise, cells, min_rows):
    """Row blocks too large for the budget: fewer rows, or tiles with a running logsumexp."""
    shrink(monkeypatch, cells, min_rows)
    case = make_case(vocab=257, draft_vocab=draft_vocab)
    got = run(draft_loss, case, chunk=chunk, renormalise=renormalise)
    assert_same(got, run(reference.draft_loss, case, renormalise=renormalise), 1e-12)


@pytest.mark.parametrize("cells, min_rows", [(600, 2), (1500, 20), (100_000, 2)])
def test_draft_vocabulary_in_any_order(monkeypatch, cells, min_rows):
    shrink(monkeypatch, cells, min_rows)
    case = make_case(vocab=257, draft_vocab=100)
    case["vocab_map_U"] = case["vocab_map_U"][torch.randperm(100, generator=torch.Generator().manual_seed(1))]
    assert_same(run(draft_loss, case), run(reference.draft_loss, case), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_in_lower_precision(monkeypatch, dtype):
    shrink(monkeypatch, 150, 2)
    case = make_case(vocab=257, draft_vocab=100, dtype=dtype)
    assert_same(run(draft_loss, case), run(reference.draft_loss, case), TOLERANCE[dtype])


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@pytest.mark.parametrize("draft_vocab", [2000, 1000])
def test_no_whole_logits(monkeypatch, draft_vocab):
    """No tensor grows with rows x vocabulary, forward or backward."""
    shrink(monkeypatch, 8000, 64)
    case = make_case(rows=400, vocab=2000, draft_vocab=draft_vocab)
    with LargestTensor() as largest:
        run(draft_loss, case)
    assert 4000 <= largest.numel <= max(8000, 2000 * 8)  # a buffer, or a head
    hidden, head = case["teacher_SD"].requires_grad_(), case["teacher_head_VD"].requires_grad_()
    with LargestTensor() as largest:
        token_logprobs(hidden, head, torch.zeros(len(hidden), dtype=torch.int64)).sum().backward()
    assert largest.numel <= 2000 * 8


def test_large_scores_stay_finite():
    """Logits of 1e4: one token has all the mass, the rest underflows to zero."""
    case = make_case(dtype=torch.float32)
    case["teacher_head_VD"] *= 1e4
    case["head_UD"] = (case["head_UD"] * 1e4).detach()
    out, grads = run(draft_loss, case)
    want, want_grads = run(reference.draft_loss, case)
    assert torch.isfinite(out["loss"])
    assert abs(out["loss"] - want["loss"]) < 1e-2 * want["loss"]
    for got, expected in zip(grads, want_grads, strict=True):
        assert torch.isfinite(got).all()
        assert (got - expected).norm() < 1e-2 * expected.norm()


def test_mixed_dtypes_take_the_heads():
    """bfloat16 states under a float32 head: float32 products, gradients in the states' dtype."""
    case = make_case(dtype=torch.float32)
    case["hidden_KTD"] = [h.detach().bfloat16() for h in case["hidden_KTD"]]
    got, want = run(draft_loss, case), run(reference.draft_loss, case)
    assert_close(got[0]["loss_sum"], want[0]["loss_sum"], 1e-5, "loss")
    assert [g.dtype for g in got[1]] == [torch.bfloat16] * 3 + [torch.float32]
    assert_close(got[1][-1], want[1][-1], 1e-5, "head gradient")


def test_rows_that_do_not_count_may_hold_nan():
    """Known failures 5 and 7: garbage in uncounted rows reaches neither loss nor gradients."""
    clean = make_case(passes=2)
    clean["rows_KS"][:, 5] = -1
    clean["rows_KS"][1, 8] = -1
    dirty = {
        **clean,
        "hidden_KTD": [h.detach().clone() for h in clean["hidden_KTD"]],
        "teacher_SD": clean["teacher_SD"].clone(),
    }
    for k, hidden in enumerate(dirty["hidden_KTD"]):
        used = clean["rows_KS"][k]
        unused = torch.ones(len(hidden), dtype=torch.bool)
        unused[used[used >= 0]] = False
        assert unused.any()
        assert unused[0] == (0 not in used.tolist())
        hidden[unused] = float("nan")
    dirty["teacher_SD"][(clean["rows_KS"] < 0).all(0)] = float("inf")
    got, want = run(draft_loss, dirty), run(draft_loss, clean)
    for name in FIELDS:
        assert torch.equal(got[0][name], want[0][name]), name
    assert all(torch.equal(a, b) for a, b in zip(got[1], want[1], strict=True))


def test_nothing_counts():
    """Known failure 16: a rank without a supervised pair still has a loss to call backward on."""
    case = make_case()
    case["rows_KS"].fill_(-1)
    out, grads = run(draft_loss, case)
    assert out["loss"] == 0
    assert out["count"].sum() == 0
    assert out["length_count"] == 0
    assert all(g is not None and not g.any() for g in grads)


def test_zero_coefficient_keeps_the_metrics():
    case = make_case()
    want = run(draft_loss, case)[0]
    case["coef_K"] = torch.tensor([0.0, 0.3, 0.0])
    out, grads = run(draft_loss, case)
    assert not grads[0].any()
    assert not grads[2].any()
    assert grads[1].any()
    assert torch.equal(out["alpha_sum"], want["alpha_sum"])


def test_split_batches_add_up():
    """Known failures 14 and 19: with a global normaliser, two halves give the whole's loss,
    gradients and metric sums."""
    case = make_case(rows=12, extra=4)
    whole = run(draft_loss, case)
    early = torch.arange(case["rows_KS"].shape[1]) < 6
    halves = []
    for part in (early, ~early):
        rows = case["rows_KS"].masked_fill(~part, -1)
        halves.append(run(draft_loss, {**case, "rows_KS": rows}))
    for name in ("loss", "loss_sum", "alpha_sum", "top1_sum", "count"):
        assert_close(halves[0][0][name] + halves[1][0][name], whole[0][name], 1e-12, name)
    for i in range(4):
        assert_close(halves[0][1][i] + halves[1][1][i], whole[1][i], 1e-12, f"gradient {i}")


def test_acceptance_length_averages_products():
    """Known failure 18: E[a1 + a1 a2], not a1_mean + a1_mean a2_mean."""
    big = 60.0
    head = torch.eye(2, dtype=torch.float64) * big
    teacher = torch.tensor([[1.0, 0.0]] * 4, dtype=torch.float64)  # policy: token 0, surely
    agree, differ = [1.0, 0.0], [0.0, 1.0]
    hidden = [torch.tensor([agree, differ], dtype=torch.float64)] * 2  # row 0 always right, row 1 never
    rows = torch.tensor([[0, 1, -1, -1], [-1, -1, 0, 1]])
    out = draft_loss(hidden, head, teacher, head, rows, torch.ones(2))
    assert out.length_sum.item() == pytest.approx(3 + 1)  # means: 1 + .5 + .25 per row
    assert out.length_count == 2
    assert out.alpha_sum.tolist() == pytest.approx([1, 1])


def test_tokens_outside_the_draft_vocabulary_are_rejections():
    """Known failure 18: renormalising the teacher does not lift the acceptance."""
    teacher_head = torch.tensor([[2.0], [0.0], [0.0]], dtype=torch.float64)
    case = (torch.ones(1, 1, dtype=torch.float64), teacher_head, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1))
    head = torch.zeros(2, 1, dtype=torch.float64)
    policy = teacher_head.squeeze(1).softmax(0)
    for renormalise in (False, True):
        out = draft_loss(
            [torch.ones(1, 1, dtype=torch.float64)],
            head,
            *case,
            vocab_map_U=torch.tensor([1, 2]),
            renormalise=renormalise,
        )
        assert out.alpha_sum.item() == pytest.approx(policy[1:].sum().item())
        assert out.top1_sum == 0  # the policy's best token is outside
        mass = 1.0 if renormalise else policy[1:].sum().item()
        assert out.loss.item() == pytest.approx(mass * torch.tensor(2.0).log().item())


def test_backward_scales_and_runs_once():
    case = make_case()
    leaves = [*case["hidden_KTD"], case["head_UD"]]
    want = run(draft_loss, case)[1]
    loss = draft_loss(**case).loss
    (loss * 3).backward(retain_graph=True)
    for leaf, grad in zip(leaves, want, strict=True):
        assert_close(leaf.grad, 3 * grad, 1e-12, "scaled gradient")
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradients_only_where_wanted():
    case = make_case()
    case["head_UD"] = case["head_UD"].detach()
    case["teacher_SD"].requires_grad_()
    case["teacher_head_VD"].requires_grad_()
    draft_loss(**case).loss.backward()
    assert case["hidden_KTD"][0].grad is not None
    assert case["teacher_SD"].grad is None
    assert case["teacher_head_VD"].grad is None
    with torch.no_grad():
        assert not draft_loss(**case).loss.requires_grad


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rows_KS": torch.zeros(2, 3, dtype=torch.int64)}, "rows_KS"),
        ({"coef_K": torch.ones(2)}, "coef_K"),
        ({"head_UD": torch.zeros(5, 6, dtype=torch.float64)}, "draft vocabulary"),
        ({"chunk": 0}, "chunk"),
        ({"hidden_KTD": []}, "pass"),
    ],
)
def test_bad_shapes(change, message):
    with pytest.raises(ValueError, match=message):
        draft_loss(**{**make_case(), **change})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tiled", [False, True])
def test_token_logprobs(monkeypatch, dtype, temperature, tiled):
    if tiled:
        shrink(monkeypatch, 64, 2)
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(13, 6, generator=g, dtype=torch.float64).to(dtype)
    head = torch.randn(37, 6, generator=g, dtype=torch.float64).to(dtype)
    labels = torch.randint(37, (13,), generator=g)
    upstream = torch.randn(13, generator=g, dtype=torch.float64)
    results = []
    for fn, kw in ((token_logprobs, {"chunk": 5}), (reference.token_logprobs, {})):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        logp = fn(h, w, labels, temperature=temperature, **kw)
        (logp * upstream.to(logp.dtype)).sum().backward()
        results.append((logp.detach(), h.grad, w.grad))
    assert results[0][0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for got, want, what in zip(*results, ("logp", "hidden", "head"), strict=True):
        assert_close(got, want, TOLERANCE[dtype], what)


def test_token_logprobs_of_no_rows():
    hidden = torch.zeros(0, 4, requires_grad=True)
    logp = token_logprobs(hidden, torch.ones(5, 4), torch.zeros(0, dtype=torch.int64))
    logp.sum().backward()
    assert logp.shape == (0,)
    assert hidden.grad.shape == (0, 4)
