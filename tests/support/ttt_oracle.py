"""The training-time test written position by position, in dense float64 with plain autograd.

One document, one pass, one row, one head at a time, as the design's section 4.1 and 4.2
read. It shares no code with the package: a state dict, a config and documents go in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class OracleDocument:
    """ids int64 [n], mask bool [n], taps P x [n, Dt], embeddings [n, Dt], final [n, Dt]."""

    ids: Tensor
    mask: Tensor
    taps: list[Tensor]
    embeddings: Tensor
    final: Tensor


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def turn(x_H: Tensor, position: int, frequencies: Tensor, factor: float) -> Tensor:
    """Each pair (i, i + H/2) rotated by position * frequency_i."""
    half = x_H.numel() // 2
    out = []
    for part in range(2):
        for i in range(half):
            angle = position * float(frequencies[i])
            a, b = x_H[i], x_H[i + half]
            cos, sin = math.cos(angle) * factor, math.sin(angle) * factor
            out.append(a * cos - b * sin if part == 0 else b * cos + a * sin)
    return torch.stack(out)


class Oracle:
    def __init__(self, state: dict[str, Tensor], config, frequencies: Tensor, factor: float = 1.0):
        self.w = {k: v.double() if v.is_floating_point() else v for k, v in state.items()}
        self.c, self.frequencies, self.factor = config, frequencies, factor

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = self.w[f"{name}.weight"] @ x
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms(x, self.w[f"{name}.weight"], self.c.rms_norm_eps)

    def fuse(self, taps: list[Tensor]) -> Tensor:
        if self.c.fc_norm:
            taps = [self.norm(f"fc_norm.{i}", tap) for i, tap in enumerate(taps)]
        joined = torch.cat(taps)
        return self.linear("fc", self.norm("input_norm", joined) if self.c.norm_before_fc else joined)

    def heads(self, kind: str, x: Tensor, count: int, position: int) -> list[Tensor]:
        parts = list(self.linear(f"midlayer.self_attn.{kind}_proj", x).chunk(count))
        if kind != "v":
            if self.c.qk_norm:
                parts = [self.norm(f"midlayer.self_attn.{kind}_norm", p) for p in parts]
            parts = [turn(p, position, self.frequencies, self.factor) for p in parts]
        return parts

    def hidden(self, doc: OracleDocument, num_passes: int) -> list[list[Tensor]]:
        """[K][n]: the normed state of every row; rows past the document's end see a zero embedding."""
        c, n = self.c, doc.ids.numel()
        keys: list[list[tuple[int, list[Tensor], list[Tensor]]]] = [
            [] for _ in range(n)
        ]  # of each row: (position, k, v)
        g = [self.fuse([tap[t] for tap in doc.taps]) for t in range(n)]
        states = []
        for k in range(num_passes):
            states.append([])
            for t in range(n):
                token = t + k + 1
                if token >= n:
                    emb = torch.zeros(c.hidden_size, dtype=torch.float64)
                elif c.own_embedding:
                    emb = self.w["embed_tokens.weight"][doc.ids[token]]
                else:
                    emb = doc.embeddings[token]
                position = t + k
                normed = self.norm("midlayer.hidden_norm", g[t])
                x = torch.cat([self.norm("midlayer.input_layernorm", emb), normed])
                queries = self.heads("q", x, c.num_attention_heads, position)
                keys[t].append(
                    (
                        position,
                        self.heads("k", x, c.num_key_value_heads, position),
                        self.heads("v", x, c.num_key_value_heads, position),
                    )
                )
                seen = [keys[j][0] for j in range(t + 1)] + keys[t][1:]
                if c.sliding_window is not None:
                    seen = [s for s in seen if position - s[0] < c.sliding_window]
                attn = []
                for head, query in enumerate(queries):
                    shared = head // (c.num_attention_heads // c.num_key_value_heads)
                    scores = torch.stack([query @ s[1][shared] for s in seen]) / math.sqrt(c.head_dim)
                    weights = torch.exp(scores - torch.logsumexp(scores, 0))
                    attn.append(sum(w * s[2][shared] for w, s in zip(weights, seen, strict=True)))
                residual = normed if c.norm_before_residual else g[t]
                out = residual + self.linear("midlayer.self_attn.o_proj", torch.cat(attn))
                y = self.norm("midlayer.post_attention_layernorm", out)
                gate = self.linear("midlayer.mlp.gate_proj", y)
                gate = gate * torch.sigmoid(gate) * self.linear("midlayer.mlp.up_proj", y)
                out = out + self.linear("midlayer.mlp.down_proj", gate)
                state = self.norm("norm", out)
                states[k].append(state)
                g[t] = state if c.norm_output else out
        return states

    def counted(self, doc: OracleDocument, k: int, drop_outside: bool = False) -> list[int]:
        n = doc.ids.numel()
        rows = [t for t in range(n) if t + k + 2 < n and bool(doc.mask[t + k + 2])]
        return [t for t in rows if bool(self.w["t2d"][doc.ids[t + k + 2]])] if drop_outside else rows

    def loss(
        self,
        docs: list[OracleDocument],
        teacher_head: Tensor,
        num_passes: int,
        decay: float,
        renormalise: bool = False,
        drop_outside: bool = False,
    ) -> Tensor:
        """sum_k w_k S_k / N_k / sum_k w_k over all documents, w_k = decay**k."""
        policy_ids = torch.arange(self.c.draft_vocab_size) + self.w["d2t"]
        sums = [torch.zeros((), dtype=torch.float64) for _ in range(num_passes)]
        counts = [0] * num_passes
        for doc in docs:
            states = self.hidden(doc, num_passes)
            for k in range(num_passes):
                for t in self.counted(doc, k, drop_outside):
                    teacher = torch.softmax(teacher_head @ doc.final[t + k + 1], 0)[policy_ids]
                    if renormalise:
                        teacher = teacher / teacher.sum()
                    logits = self.w["lm_head.weight"] @ states[k][t]
                    sums[k] = sums[k] - (teacher * (logits - torch.logsumexp(logits, 0))).sum()
                    counts[k] += 1
        weights = [decay**k for k in range(num_passes)]
        total = sum(w * s / max(n, 1) for w, s, n in zip(weights, sums, counts, strict=True))
        return total / sum(weights)
