"""The training-time test against a float64 oracle written position by position."""

from __future__ import annotations

import pytest
import torch

from cospec.config import RopeConfig
from cospec.draft.ttt import pairs, unroll
from cospec.hf import rope_frequencies
from cospec.ops.losses import draft_loss
from cospec.ops.shift import with_halo
from support.ttt_cases import D, V, make_documents, make_draft, pack, pass_coefficients
from support.ttt_oracle import Oracle

LONG = 8


def packed_loss(draft, docs, teacher_head, num_passes, *, drop_outside=False, renormalise=False, **options):
    taps, batch = pack(docs)
    hidden_KTD = draft(taps, batch, num_passes=num_passes, **options)
    rows_KS = pairs(batch, num_passes=num_passes, t2d=draft.t2d if drop_outside else None)
    return draft_loss(
        hidden_KTD,
        draft.lm_head.weight,
        with_halo(taps.final_hidden, batch.layout, num_passes),
        teacher_head,
        rows_KS,
        pass_coefficients(rows_KS, 0.8),
        vocab_map_U=draft.policy_ids,
        chunk=3,
        renormalise=renormalise,
    ).loss


CASES = {
    "plain": (1, {}, {}),
    "two passes, normed residual": (2, {"norm_before_residual": True}, {}),
    "three passes, norm_output": (3, {"norm_output": True}, {}),
    "four passes, EAGLE-3.1": (4, {"norm_output": True, "fc_norm": True}, {"renormalise": True}),
    "five passes": (5, {}, {"drop_outside": True}),
    "norm_before_fc": (3, {"norm_before_fc": True}, {}),
    "q/k norms and biases": (3, {"qk_norm": True, "attention_bias": True}, {}),
    "window 2": (2, {"sliding_window": 2}, {}),
    "window 4": (4, {"sliding_window": 4}, {}),
    "own table": (3, {"own_embedding": True}, {}),
    "own width": (2, {"own_embedding": True, "hidden_size": 8, "head_dim": 2}, {}),
    "yarn": (
        3,
        {"rope": RopeConfig(theta=50.0, scaling="yarn", factor=4.0, original_max_position_embeddings=8)},
        {},
    ),
    "whole vocabulary": (2, {"vocab": tuple(range(V))}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_loss_and_every_gradient(case):
    """Known failures 1-5, 7, 8: documents of 1..K+2 tokens and a longer one, packed, random masks."""
    num_passes, flags, loss_options = CASES[case]
    draft = make_draft(**flags)
    docs = make_documents([*range(1, num_passes + 3), LONG])
    teacher_head = torch.randn(V, D, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    state = {k: v.detach().clone().requires_grad_(v.is_floating_point()) for k, v in draft.state_dict().items()}
    frequencies, factor = rope_frequencies(draft.config.rope, draft.config.head_dim)
    oracle = Oracle(state, draft.config, frequencies.double(), factor)
    expected = oracle.loss(docs, teacher_head, num_passes, 0.8, **loss_options)
    expected.backward()

    loss = packed_loss(draft, docs, teacher_head, num_passes, **loss_options)
    loss.backward()
    assert expected.item() > 0.1
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=1e-12)
    for name, parameter in draft.named_parameters():
        want = state[name].grad
        assert want is not None, f"{name} takes no part in the oracle"
        assert want.abs().max() > 0, f"{name} takes no part in the oracle"
        torch.testing.assert_close(parameter.grad, want, rtol=1e-11, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")

    taps, batch = pack(docs)
    hidden_KTD = unroll(draft, taps, batch, num_passes=num_passes)
    hidden_KTD = [batch.layout.unshard([h]) for h in hidden_KTD]
    start = 0
    for doc in docs:
        for k, states in enumerate(oracle.hidden(doc, num_passes)):
            for t in range(doc.ids.numel()):
                torch.testing.assert_close(hidden_KTD[k][start + t], states[t], rtol=1e-11, atol=1e-12)
        start += doc.ids.numel()


@pytest.mark.parametrize("mask", ["all", "none", "response", "random"])
@pytest.mark.parametrize("drop_outside", [False, True])
def test_pairs_are_those_of_the_oracle(mask, drop_outside):
    """Known failures 1 and 2: the mask sits on the label t+k+2 at every pass; row t's teacher is row t+k+1."""
    draft = make_draft()
    oracle = Oracle(draft.state_dict(), draft.config, torch.zeros(2))
    docs = make_documents([1, 2, 3, 4, 5, 6, 7, 11], seed=3, mask=mask)
    _, batch = pack(docs, pad_to=46)
    rows_KS = pairs(batch, num_passes=5, t2d=draft.t2d if drop_outside else None)
    expected = set()
    start = 0
    for doc in docs:
        for k in range(5):
            expected |= {(k, start + t + k + 1, start + t) for t in oracle.counted(doc, k, drop_outside)}
        start += doc.ids.numel()
    token = batch.layout.source_index(0).tolist()  # of a padded row
    found = {(k, token[s], token[rows_KS[k, s]]) for k, s in (rows_KS >= 0).nonzero().tolist()}
    assert found == expected
    assert (len(expected) == 0) == (mask == "none")


def test_packed_equals_alone():
    """Known failure 7: the same documents packed or one at a time give the same loss and gradients."""
    docs = make_documents([5, 1, 9, 3], mask="all")
    teacher_head = torch.randn(V, D, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    together, apart = make_draft(), make_draft()
    loss = packed_loss(together, docs, teacher_head, 3)
    loss.backward()
    _, batch = pack(docs)
    coef = pass_coefficients(pairs(batch, num_passes=3), 0.8)
    total = 0.0
    for doc in docs:
        taps, batch = pack([doc])
        part = draft_loss(
            apart(taps, batch, num_passes=3),
            apart.lm_head.weight,
            taps.final_hidden,
            teacher_head,
            pairs(batch, num_passes=3),
            coef,
            vocab_map_U=apart.policy_ids,
        ).loss
        part.backward()
        total += part.item()
    assert total == pytest.approx(loss.item(), rel=1e-12)
    for (name, a), b in zip(together.named_parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


def test_another_document_changes_nothing():
    """Known failure 4: other documents' rows and input gradients are equal to the bit."""
    draft = make_draft(dtype=torch.float32)
    docs = make_documents([6, 5, 7], dtype=torch.float32)
    other = make_documents([6, 5, 7], seed=9, dtype=torch.float32)

    def run(documents):
        taps, batch = pack(documents)
        for tensor in (*taps.hidden, taps.embeddings):
            tensor.requires_grad_()
        hidden = batch.layout.unshard([torch.stack(unroll(draft, taps, batch, num_passes=4))], dim=1)
        weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
        (hidden * weights).sum().backward()
        return hidden.detach(), [batch.layout.unshard([t.grad]) for t in (*taps.hidden, taps.embeddings)]

    hidden, grads = run(docs)
    changed, changed_grads = run([docs[0], other[1], docs[2]])
    kept = torch.tensor([True] * 6 + [False] * 5 + [True] * 7)
    assert torch.equal(hidden[:, kept], changed[:, kept])
    assert not torch.equal(hidden[:, ~kept], changed[:, ~kept])
    for a, b in zip(grads, changed_grads, strict=True):
        assert torch.equal(a[kept], b[kept])
        assert not torch.equal(a[~kept], b[~kept])


def test_each_row_reads_exactly_the_tokens_it_may():
    """Known failure 3: pass k of row t reads embeddings 1..t+1 (through the trunk) and up to t+k+1, no later."""
    draft = make_draft()
    taps, batch = pack(make_documents([7]))
    for k in range(3):
        taps.embeddings.requires_grad_()
        for t in range(7):
            hidden = unroll(draft, taps, batch, num_passes=3)[k][t]
            (grad,) = torch.autograd.grad(hidden.sum(), taps.embeddings)
            read = (grad.abs().sum(1) > 0).nonzero().squeeze(1).tolist()
            assert read == list(range(1, min(t + k + 1, 6) + 1))


def test_position_moves_with_the_pass(monkeypatch):
    """Known failure 2: without the offset k the later passes differ, the first does not."""
    draft = make_draft()
    taps, batch = pack(make_documents([9]))
    right = unroll(draft, taps, batch, num_passes=3)
    inner = draft.midlayer.before_attention
    monkeypatch.setattr(draft.midlayer, "before_attention", lambda emb, g, _: inner(emb, g, batch.positions))
    wrong = unroll(draft, taps, batch, num_passes=3)
    assert torch.equal(right[0], wrong[0])
    for k in (1, 2):
        assert (right[k] - wrong[k]).abs().max() > 1e-3


@pytest.mark.parametrize("flags", [{}, {"own_embedding": True, "norm_output": True, "fc_norm": True}])
def test_recomputing_the_passes_changes_nothing(flags):
    """Known failure 13: each trunk and branch key exists once, also when passes are recomputed."""
    docs = make_documents([6, 2, 9])
    teacher_head = torch.randn(V, D, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    plain, recomputed = make_draft(**flags), make_draft(**flags)
    loss = packed_loss(plain, docs, teacher_head, 4)
    loss.backward()
    again = packed_loss(recomputed, docs, teacher_head, 4, checkpoint=True)
    again.backward()
    assert torch.equal(loss, again)
    for a, b in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_filler_and_padding_stay_out():
    """Rows of nobody's document change no row of a document."""
    draft = make_draft()
    docs = make_documents([5, 4])
    taps, batch = pack(docs)
    bare = [batch.layout.unshard([h]) for h in unroll(draft, taps, batch, num_passes=3)]
    taps, batch = pack(docs, pad_to=16)
    nobody = ~batch.layout.valid(0)
    taps.hidden[0][nobody], taps.embeddings[nobody] = 7.0, -7.0
    filled = unroll(draft, taps, batch, num_passes=3)
    for a, b in zip(bare, filled, strict=True):
        assert b.shape == (16, D)
        assert torch.isfinite(b).all()
        torch.testing.assert_close(a, b[~nobody], rtol=1e-12, atol=1e-12)


def test_compute_follows_the_taps():
    """bfloat16 taps give bfloat16 states near the float64 ones; parameters and their gradients stay float32."""
    docs = make_documents([8])
    exact = unroll(make_draft(), *pack(docs), num_passes=2)
    draft = make_draft(dtype=torch.float32)
    taps, batch = pack(make_documents([8], dtype=torch.bfloat16))
    hidden = unroll(draft, taps, batch, num_passes=2)
    assert all(h.dtype == torch.bfloat16 for h in hidden)
    sum(h.float().sum() for h in hidden).backward()
    assert draft.fc.weight.grad.dtype == torch.float32
    for a, b in zip(exact, hidden, strict=True):
        assert (a - b.double()).abs().max() < 0.15


@pytest.mark.parametrize("num_passes", [0, 9])
def test_number_of_passes_is_checked(num_passes):
    with pytest.raises(ValueError, match=f"num_passes={num_passes}"):
        unroll(make_draft(), *pack(make_documents([4])), num_passes=num_passes)
