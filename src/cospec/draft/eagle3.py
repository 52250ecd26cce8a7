"""The EAGLE-3 draft model: fuse the taps, one decoder layer, a head of its own.

Parameter names are those of the public checkpoints (prefix `midlayer`), so that a
state dict is a checkpoint. Parameters stay in their own dtype; the computation runs in
the dtype of the taps.
Source: Li et al. 2025, EAGLE-3 (arXiv 2503.01840).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cospec.config import Eagle3Config, require
from cospec.draft.rope import cos_sin
from cospec.draft.ttt import unroll
from cospec.ops.dense import rms_norm, rotate_halves, swiglu
from cospec.records import Batch, Taps

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q [T, N, H], k [T, M, H], v [T, M, H]) -> out [T, N, H]."""


def check_eagle3(config: Eagle3Config) -> None:
    """Raise ConfigError for a shape or flag that cannot be built."""
    c = config
    for name in ("hidden_size", "target_hidden_size", "intermediate_size", "num_attention_heads", "head_dim"):
        require(getattr(c, name) >= 1, f"draft.{name}", getattr(c, name), "must be >= 1")
    require(c.head_dim % 2 == 0, "draft.head_dim", c.head_dim, "must be even: RoPE turns pairs of dims")
    require(
        c.num_key_value_heads >= 1 and c.num_attention_heads % c.num_key_value_heads == 0,
        "draft.num_key_value_heads",
        c.num_key_value_heads,
        f"must divide num_attention_heads={c.num_attention_heads}",
    )
    require(c.vocab_size >= 1, "vocab_size", c.vocab_size, "must be >= 1")
    require(
        1 <= c.draft_vocab_size <= c.vocab_size,
        "draft.draft_vocab_size",
        c.draft_vocab_size,
        f"must be 1..vocab_size={c.vocab_size}: the draft proposes tokens of the policy's vocabulary",
    )
    layers = tuple(c.tap_layers)
    require(len(layers) >= 1, "draft.tap_layers", layers, "must name at least one layer")
    require(
        layers[0] >= 0 and all(a < b for a, b in zip(layers, layers[1:], strict=False)),
        "draft.tap_layers",
        layers,
        "must be ascending, distinct and >= 0",
    )
    require(
        c.own_embedding or c.hidden_size == c.target_hidden_size,
        "draft.hidden_size",
        c.hidden_size,
        f"differs from target_hidden_size={c.target_hidden_size}: "
        "the policy's embeddings do not fit, the draft needs own_embedding",
    )
    require(
        not (c.norm_before_fc and c.fc_norm),
        "draft.norm_before_fc",
        True,
        "and fc_norm both norm the input of fc: choose one",
    )
    require(
        c.sliding_window is None or c.sliding_window >= 1,
        "draft.sliding_window",
        c.sliding_window,
        "must be >= 1 keys, the query's own included, or None for all",
    )
    require(
        c.rope.scaling in ("none", "linear", "llama3", "yarn"),
        "rope.scaling",
        c.rope.scaling,
        "must be none, linear, llama3 or yarn",
    )


class Linear(nn.Linear):
    """Linear that computes in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32 (float64 for float64)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Projections of the layer's attention; the attention itself is handed in."""

    def __init__(self, c: Eagle3Config):
        super().__init__()
        self.config = c
        q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(2 * c.hidden_size, q_size, bias=c.attention_bias)
        self.k_proj = Linear(2 * c.hidden_size, kv_size, bias=c.attention_bias)
        self.v_proj = Linear(2 * c.hidden_size, kv_size, bias=c.attention_bias)
        self.o_proj = Linear(q_size, c.hidden_size, bias=c.attention_bias)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None

    def project(self, x: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q [T, N, H], rotated k [T, M, H] and v [T, M, H] of x [T, 2D]."""
        split = (-1, self.config.head_dim)
        q_TNH = self.q_proj(x).unflatten(-1, split)
        k_TMH = self.k_proj(x).unflatten(-1, split)
        v_TMH = self.v_proj(x).unflatten(-1, split)
        if self.q_norm is not None and self.k_norm is not None:
            q_TNH, k_TMH = self.q_norm(q_TNH), self.k_norm(k_TMH)
        dtype = torch.promote_types(x.dtype, torch.float32)
        cos_TH, sin_TH = cos_sin(self.config.rope, self.config.head_dim, positions_T, dtype)
        return rotate_halves(q_TNH, cos_TH, sin_TH), rotate_halves(k_TMH, cos_TH, sin_TH), v_TMH


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: Eagle3Config):
        super().__init__()
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return swiglu(x, *(part.weight.to(x.dtype) for part in (self.gate_proj, self.up_proj, self.down_proj)))


class DecoderLayer(nn.Module):
    """The layer in two halves around the attention, so that each can be recomputed alone."""

    def __init__(self, c: Eagle3Config):
        super().__init__()
        self.norm_before_residual = c.norm_before_residual
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def before_attention(self, emb_TD: Tensor, g_TD: Tensor, positions_T: Tensor) -> tuple[Tensor, ...]:
        """q, k, v and the residual."""
        normed_TD = self.hidden_norm(g_TD)
        x = torch.cat([self.input_layernorm(emb_TD), normed_TD], dim=-1)
        residual_TD = normed_TD if self.norm_before_residual else g_TD
        return *self.self_attn.project(x, positions_T), residual_TD

    def after_attention(self, attn_TNH: Tensor, residual_TD: Tensor) -> Tensor:
        out_TD = residual_TD + self.self_attn.o_proj(attn_TNH.flatten(-2))
        return out_TD + self.mlp(self.post_attention_layernorm(out_TD))


class Eagle3Draft(nn.Module):
    """An EAGLE-3 draft.

    Buffers: `d2t` int64 [U] (policy id = draft id + d2t) and `t2d` bool [V] (True where
    the policy id is in the draft's vocabulary); see draft.vocab. A new draft maps its
    ids to the first U policy ids.

    Raises ConfigError for a shape or flag that cannot be built.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config):
        super().__init__()
        check_eagle3(config)
        self.config = c = config
        self.init_seed: int | None = None  # set by init_draft: an export must differ from the initial draw
        self.kept_config: dict = {}  # keys of the config.json it came from that change nothing, for the export
        width = len(c.tap_layers) * c.target_hidden_size
        self.input_norm = RMSNorm(width, c.rms_norm_eps) if c.norm_before_fc else None
        self.fc_norm = None
        if c.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(c.target_hidden_size, c.rms_norm_eps) for _ in c.tap_layers)
        self.fc = Linear(width, c.hidden_size, bias=False)
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size) if c.own_embedding else None
        self.midlayer = DecoderLayer(c)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(c.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(c.vocab_size) < c.draft_vocab_size)

    @property
    def policy_ids(self) -> Tensor | None:
        """int64 [U]: the policy id of each draft id; None where the draft has the whole vocabulary."""
        if self.config.draft_vocab_size == self.config.vocab_size:
            return None
        return torch.arange(self.d2t.numel(), device=self.d2t.device) + self.d2t

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        """g^0 [T, D] of the P taps [T, Dt], low layer to high."""
        if len(taps) != len(self.config.tap_layers):
            raise ValueError(f"got {len(taps)} taps, draft.tap_layers={self.config.tap_layers}")
        if self.fc_norm is not None:
            taps = [norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)]
        joined = torch.cat(list(taps), dim=-1)
        return self.fc(joined if self.input_norm is None else self.input_norm(joined))

    def layer(self, emb_TD: Tensor, g_TD: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """The decoder layer's output [T, D], before the final norm.

        `attend(q, k, v)` attends from the rows' rotated queries to whatever keys the
        caller keeps, the rows' own among them.
        """
        q_TNH, k_TMH, v_TMH, residual_TD = self.midlayer.before_attention(emb_TD, g_TD, positions_T)
        return self.midlayer.after_attention(attend(q_TNH, k_TMH, v_TMH), residual_TD)

    def head_input(self, out_TD: Tensor) -> Tensor:
        """Normed [T, D]: what `lm_head` reads."""
        return self.norm(out_TD)

    def next_input(self, out_TD: Tensor, normed_TD: Tensor) -> Tensor:
        """g of the next pass: the raw output, or the normed one with `norm_output`."""
        return normed_TD if self.config.norm_output else out_TD

    def forward(self, taps: Taps, batch: Batch, **options) -> list[Tensor]:
        """draft.ttt.unroll as the module's forward, so that FSDP2's hooks surround all passes."""
        return unroll(self, taps, batch, **options)


INIT_STD = 0.02


def initial_values(name: str, shape: Sequence[int], seed: int, std: float = INIT_STD) -> Tensor:
    """float32 CPU tensor: what the matrix `name` is initialised with, from nothing but its name and `seed`."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu") * std


@torch.no_grad()
def init_draft(draft: Eagle3Draft, seed: int, std: float = INIT_STD) -> None:
    """Draw every parameter by its name and `seed`: matrices normal, norms 1, biases 0.

    So neither the order of the modules, nor another parameter, nor the number of ranks
    changes a value. To be called before the draft is sharded.
    """
    for name, parameter in draft.named_parameters():
        if parameter.ndim > 1:
            parameter.copy_(initial_values(name, parameter.shape, seed, std))
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    draft.init_seed = seed
