"""The two ends of a policy, all that draft training needs of it besides features: embeddings, final norm, head."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cospec import hf
from cospec.config import ConfigError, PolicyConfig, RopeConfig, require
from cospec.features.source import FeatureInfo, tokenizer_hash
from cospec.features.store import POLICY, write_tensors
from cospec.mesh import Mesh
from cospec.policy.stream import WeightStream

_NAMES = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}


@dataclass(frozen=True)
class PolicyEnds:
    """embed_VD: [V, Dt] token embeddings; norm_D: [Dt] weight of the final RMSNorm; head_VD: [V, Dt]."""

    config: PolicyConfig
    embed_VD: Tensor
    norm_D: Tensor
    head_VD: Tensor
    tokenizer: str | None = None
    name: str = ""

    def to(self, device: torch.device, dtype: torch.dtype) -> PolicyEnds:
        embed = self.embed_VD.to(device, dtype)
        head = embed if self.head_VD is self.embed_VD else self.head_VD.to(device, dtype)
        return replace(self, embed_VD=embed, head_VD=head, norm_D=self.norm_D.to(device, dtype))

    def final_hidden(self, last_TD: Tensor, is_normed: bool) -> Tensor:
        """What the head reads: `last_TD`, after the final norm unless it has been applied.

        x / sqrt(mean(x^2) + eps) * weight, in float32 (float64 for float64).
        """
        if is_normed:
            return last_TD
        wide = last_TD.to(torch.promote_types(last_TD.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return (wide * self.norm_D.to(wide.dtype)).to(last_TD.dtype)


def read_ends(folder: str | Path) -> PolicyEnds:
    """The ends of a Hugging Face folder; no other tensor is read.

    Raises ConfigError naming what is missing or misshapen.
    """
    config = hf.read_policy_config(folder)
    try:
        files = hf.TensorFolder(folder)
        wanted = ["embed", "norm"] + ([] if config.tie_word_embeddings else ["head"])
        found = {name: files[_NAMES[name]] for name in wanted}
    except (KeyError, ValueError) as error:
        raise ConfigError("policy.hf_path", str(folder), f"lacks {error}") from error
    return _make(config, found, folder_tokenizer_hash(folder), str(folder))


def read_stored_ends(folder: str | Path, info: FeatureInfo) -> PolicyEnds:
    """The ends that an extraction left beside its store. Raises ConfigError when it left none."""
    from safetensors import SafetensorError, safe_open

    path = Path(folder) / POLICY
    rule = "the features come without the policy's embeddings and head: give its folder"
    require(path.is_file() and info.policy_config is not None, "policy.hf_path", None, rule)
    config = policy_config_from_json(info.policy_config or {})
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            found = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ConfigError("features", str(path), f"cannot be read ({error})") from error
    return _make(config, found, info.tokenizer, str(path))


def gather_ends(parts: Sequence[nn.Module], mesh: Mesh, config: PolicyConfig) -> PolicyEnds:
    """The ends of a policy that is in memory, sharded and staged as it may be. Collective."""
    wanted = ("tok_embeddings.weight", "norm.weight", "lm_head.weight")
    local = {n: p for part in parts for n, p in part.named_parameters() if n in wanted}
    state = {n: whole.cpu() for n, whole in WeightStream(local, mesh).items()}
    head = state.get("lm_head.weight", state.get("tok_embeddings.weight"))
    embed = state.get("tok_embeddings.weight", head)
    assert embed is not None and head is not None  # noqa: PT018
    return PolicyEnds(config, embed, state["norm.weight"], embed if config.tie_word_embeddings else head)


def save_ends(folder: str | Path, ends: PolicyEnds) -> None:
    """Leave the ends beside a store."""
    tensors = {"embed": ends.embed_VD, "norm": ends.norm_D}
    if not ends.config.tie_word_embeddings:
        tensors["head"] = ends.head_VD
    write_tensors(Path(folder) / POLICY, {k: v.detach().cpu().contiguous() for k, v in tensors.items()}, {})


def _make(config: PolicyConfig, found: Mapping[str, Tensor], tokenizer: str | None, name: str) -> PolicyEnds:
    size = (config.vocab_size, config.hidden_size)
    for part, shape in (("embed", size), ("norm", size[1:]), ("head", size)):
        tensor = found.get(part, None if part != "head" or not config.tie_word_embeddings else found.get("embed"))
        got = None if tensor is None else tuple(tensor.shape)
        require(got == shape, f"policy {_NAMES[part]}", got, f"{name}: must have shape {list(shape)}")
    return PolicyEnds(config, found["embed"], found["norm"], found.get("head", found["embed"]), tokenizer, name)


def check_features_fit(info: FeatureInfo, ends: PolicyEnds, stored: PolicyEnds | None = None) -> None:
    """Raise ConfigError, naming both values, when features are not of this policy.

    stored: the ends beside the store; they tell policies of equal sizes apart.
    """
    require(info.last_is_normed is not None, "features", info.format, "hold no final hidden state: EAGLE-3 needs one")
    pairs = (
        ("hidden size", info.hidden_size, ends.config.hidden_size),
        ("vocabulary size", info.vocab_size, ends.config.vocab_size),
        ("tokenizer", info.tokenizer, ends.tokenizer),
    )
    for name, theirs, ours in pairs:
        fits = theirs is None or ours is None or theirs == ours
        require(fits, f"features' {name}", theirs, f"the policy in {ends.name} has {ours}: they are of another policy")
    layers = info.tap_layers or ()
    fits = all(0 <= i < ends.config.num_hidden_layers for i in layers)
    require(fits, "features' tap_layers", layers, f"the policy has {ends.config.num_hidden_layers} layers")
    if stored is not None:
        for part in ("embed_VD", "norm_D", "head_VD"):
            a, b = getattr(stored, part).float(), getattr(ends, part).float()
            far = float((a - b).abs().max()) / max(float(b.abs().max()), 1e-30)
            rule = f"differs from that of the policy in {ends.name} (by {far:.1%}): the features are of other weights"
            require(far <= 0.02, f"features' {part}", stored.name, rule)  # a bfloat16 copy is off by 0.4 %


def folder_tokenizer_hash(folder: str | Path) -> str | None:
    """`tokenizer_hash` of the tokenizer.json in a folder; None without one."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        return None
    raw = json.loads(path.read_text(encoding="utf-8"))
    vocab = raw["model"].get("vocab") or {}
    table = dict(vocab) if isinstance(vocab, dict) else {entry[0]: i for i, entry in enumerate(vocab)}
    return tokenizer_hash(table | {t["content"]: t["id"] for t in raw.get("added_tokens") or []})


def policy_config_from_json(raw: Mapping[str, Any]) -> PolicyConfig:
    """A PolicyConfig out of `dataclasses.asdict` of one."""
    values = dict(raw)
    values["rope"] = RopeConfig(**raw["rope"])
    return PolicyConfig(**values)
