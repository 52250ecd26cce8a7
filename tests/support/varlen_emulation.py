"""The packed flash ops of CUDA by their documented meaning, sequence after sequence on CPU."""

import torch


def install(replace) -> None:
    """`replace(object, name, value)`, as monkeypatch.setattr, puts the emulation in place."""
    replace(torch.ops.aten, "_flash_attention_forward", forward)
    replace(torch.ops.aten, "_flash_attention_backward", backward)


def forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale, window_size_left, window_size_right):
    """out [rows, N, H], lse float32 [N, rows]; both cumulative offsets must cover all rows."""
    _check(q, k, v, cu_q, cu_k, max_q, max_k)
    outs, lses = [], []
    for a, b, c, d in _spans(cu_q, cu_k):
        score, value = _score(q[a:b], k[c:d], causal, scale, window_size_left), _heads(v[c:d], q)
        outs.append((score.softmax(-1) @ value).transpose(0, 1))
        lses.append(score.logsumexp(-1))
    nothing = torch.empty(0)
    return torch.cat(outs).to(q.dtype), torch.cat(lses, dim=1).float(), nothing, nothing, nothing


def backward(
    grad,
    q,
    k,
    v,
    out,
    lse,
    cu_q,
    cu_k,
    max_q,
    max_k,
    dropout,
    causal,
    seed,
    unused,
    *,
    scale,
    window_size_left,
    window_size_right,
):
    _check(q, k, v, cu_q, cu_k, max_q, max_k)
    assert lse.shape == (q.shape[1], q.shape[0])
    assert lse.is_contiguous()
    assert out.dtype == grad.dtype == q.dtype
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for a, b, c, d in _spans(cu_q, cu_k):
        weight = (_score(q[a:b], k[c:d], causal, scale, window_size_left) - lse[:, a:b, None]).exp()
        query, dout = (x[a:b].float().transpose(0, 1) for x in (q, grad))
        delta = (dout * out[a:b].float().transpose(0, 1)).sum(-1, keepdim=True)
        dscore = weight * (dout @ _heads(v[c:d], q).mT - delta) * scale
        dq[a:b] = (dscore @ _heads(k[c:d], q)).transpose(0, 1)
        for target, x in ((dk, dscore.mT @ query), (dv, weight.mT @ dout)):
            target[c:d] = x.unflatten(0, (k.shape[1], -1)).sum(1).transpose(0, 1)
    return dq, dk, dv


def _check(q, k, v, cu_q, cu_k, max_q, max_k):
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert len(cu_q) == len(cu_k)
    assert cu_q[-1] == len(q)
    assert cu_k[-1] == len(k) == len(v)
    assert (max_q, max_k) == (cu_q.diff().max(), cu_k.diff().max())


def _spans(cu_q, cu_k):
    q, k = cu_q.tolist(), cu_k.tolist()
    return zip(q, q[1:], k, k[1:], strict=False)


def _heads(x, q):
    return x.float().repeat_interleave(q.shape[1] // x.shape[1], dim=1).transpose(0, 1)


def _score(q, k, causal, scale, window_left):
    """Causal is aligned bottom right; `window_left` keeps that many keys before the query's own."""
    score = q.float().transpose(0, 1) @ _heads(k, q).mT * scale
    distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
    hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    if window_left is not None:
        hidden = hidden | (distance > window_left)
    return score.masked_fill(hidden, -torch.inf)
