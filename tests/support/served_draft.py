"""A draft as a server runs it, from its files alone, token by token in float64.

Written from the published behaviour of the servers and of transformers' RoPE; it shares no
code with the package, which it is compared against.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

IDS = "eagle_aux_hidden_state_layer_ids"


class ServedDraft:
    def __init__(self, folder: Path):
        raw = json.loads((folder / "config.json").read_text())
        self.flags = raw
        self.layer = raw.get("transformer_layer_config", raw)
        stored = load_file(folder / "model.safetensors")
        self.w = {
            k.replace("midlayer.", "").replace("layers.0.", ""): v.double() if v.is_floating_point() else v
            for k, v in stored.items()
        }
        if "eagle_config" in raw:  # output of 0-based layer i is hidden_states[i + 1]
            self.hf_ids = [i + 1 for i in raw["eagle_config"][IDS]]
        else:
            self.hf_ids = raw[IDS]
        names = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")
        rope = {**self.layer["rope_parameters"]}
        config = LlamaConfig(**{n: self.layer[n] for n in names}, rope_parameters=rope)
        self.rotary = LlamaRotaryEmbedding(config).double()

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + self.layer["rms_norm_eps"]) * self.w[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def fuse(self, hidden_states: list[Tensor]) -> Tensor:
        """From HF's list of hidden states (embedding first), each [n, Dt]."""
        taps = [hidden_states[i] for i in self.hf_ids]
        if self.flags.get("fc_norm"):
            taps = [self.norm(tap, f"fc_norm.{i}") for i, tap in enumerate(taps)]
        joined = torch.cat(taps, -1)
        return self.linear(self.norm(joined, "input_norm") if self.flags.get("norm_before_fc") else joined, "fc")

    def row(self, emb: Tensor, g: Tensor, position: int, cache: list) -> tuple[Tensor, Tensor]:
        """One row: adds its key and value to the cache; returns logits and the state for the next step."""
        normed = self.norm(g, "hidden_norm")
        x = torch.cat([self.norm(emb, "input_layernorm"), normed])
        size, heads = self.layer["head_dim"], self.layer["num_attention_heads"]
        q, k, v = (self.linear(x, f"self_attn.{n}_proj").view(-1, size) for n in "qkv")
        if "self_attn.q_norm.weight" in self.w:
            q, k = self.norm(q, "self_attn.q_norm"), self.norm(k, "self_attn.k_norm")
        cos, sin = self.rotary(torch.zeros(1, dtype=torch.float64), torch.tensor([[position]]))

        def turn(y: Tensor) -> Tensor:
            return y * cos[0] + torch.cat([-y[:, size // 2 :], y[:, : size // 2]], -1) * sin[0]

        cache.append((position, turn(k), v))
        window = self.layer.get("sliding_window") if self.layer.get("use_sliding_window") else None
        seen = [c for c in cache if window is None or position - c[0] < window]
        share = heads // k.shape[0]
        out = []
        for head, query in enumerate(turn(q)):
            keys = torch.stack([c[1][head // share] for c in seen])
            values = torch.stack([c[2][head // share] for c in seen])
            out.append(torch.softmax(keys @ query / math.sqrt(size), 0) @ values)
        residual = normed if self.flags.get("norm_before_residual") else g
        state = residual + self.linear(torch.cat(out), "self_attn.o_proj")
        y = self.norm(state, "post_attention_layernorm")
        gate = torch.nn.functional.silu(self.linear(y, "mlp.gate_proj"))
        state = state + self.linear(gate * self.linear(y, "mlp.up_proj"), "mlp.down_proj")
        final = self.norm(state, "norm")
        return final @ self.w["lm_head.weight"].T, final if self.flags.get("norm_output") else state

    def chains(self, ids: Tensor, hidden_states: list[Tensor], table: Tensor, steps: int) -> dict[tuple, Tensor]:
        """{(t, k): logits [U]}: a chain of `steps` steps after every prefix, fed the true tokens."""
        table = self.w.get("embed_tokens.weight", table)
        g = self.fuse(hidden_states)
        found, trunk = {}, []
        for t in range(ids.numel() - 1):
            logits, state = self.row(table[ids[t + 1]], g[t], t, trunk)
            found[t, 0] = logits
            cache = list(trunk)
            for k in range(1, steps):
                if t + k + 1 >= ids.numel():
                    break
                found[t, k], state = self.row(table[ids[t + k + 1]], state, t + k, cache)
        return found
