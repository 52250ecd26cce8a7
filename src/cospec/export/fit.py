"""What kind of draft a folder holds, and whether it can serve a policy."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from cospec.config import Eagle3Config, PolicyConfig, require
from cospec.draft.eagle3 import Eagle3Draft
from cospec.export.eagle3 import load_draft, read_raw
from cospec.export.eagle3_config import Family, read_config
from cospec.export.files import open_tensors


@dataclass(frozen=True)
class DraftFolder:
    """A draft that was read whole, and what its files say beside it."""

    draft: Eagle3Draft
    family: Family
    dtypes: tuple[str, ...]
    """Of the floating tensors in the files."""
    verifier: str | None
    """The policy that a speculators file names."""


def read_folder(
    folder: str | Path, *, tap_layers: Collection[int] | None = None, ignore: Collection[str] = ()
) -> DraftFolder:
    """`load_draft` with its provenance; raises ConfigError as it does."""
    draft = load_draft(folder, tap_layers=tap_layers, ignore=ignore)
    raw, tensors = read_raw(folder), open_tensors(folder)
    _, family, _ = read_config(raw, tap_layers=tap_layers, ignore=ignore)
    dtypes = {str(t.dtype).removeprefix("torch.") for t in tensors.values() if t.is_floating_point()}
    settings = raw.get("speculators_config")
    verifier = settings.get("verifier") if isinstance(settings, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return DraftFolder(draft, family, tuple(sorted(dtypes)), name if isinstance(name, str) else None)


def misfits(config: Eagle3Config, policy: PolicyConfig) -> list[str]:
    """Why the draft cannot serve this policy; empty when it can. Each names the key and both values."""
    c, layers = config, policy.num_hidden_layers
    found = []
    if c.target_hidden_size != policy.hidden_size:
        found.append(f"target_hidden_size={c.target_hidden_size}: the policy's hidden size is {policy.hidden_size}")
    if c.vocab_size != policy.vocab_size:
        found.append(f"vocab_size={c.vocab_size}: the policy's vocabulary has {policy.vocab_size} tokens")
    if max(c.tap_layers) >= layers:
        found.append(f"tap_layers={c.tap_layers}: the policy has {layers} layers, 0..{layers - 1}")
    return found


def require_fit(config: Eagle3Config, policy: PolicyConfig) -> None:
    """Raise ConfigError when the draft was made for another policy."""
    found = misfits(config, policy)
    require(not found, "draft", "; ".join(found), "was made for another policy")


def differences(config: Eagle3Config, policy: PolicyConfig) -> list[str]:
    """What differs without making the draft unusable; it may cost acceptance."""
    found = []
    ours, theirs = asdict(config.rope), asdict(policy.rope)
    if config.rope.scaling == policy.rope.scaling == "none":
        ours, theirs = {"theta": ours["theta"]}, {"theta": theirs["theta"]}
    for name in ours:
        if ours[name] != theirs[name]:
            found.append(f"rope.{name}: draft {ours[name]}, policy {theirs[name]}")
    for name in ("max_position_embeddings", "rms_norm_eps"):
        if getattr(config, name) != getattr(policy, name):
            found.append(f"{name}: draft {getattr(config, name)}, policy {getattr(policy, name)}")
    return found
