"""The model card of an exported draft: README.md with what a server's operator must know.

The four facts (policy, data, acceptance, commit) stand in a table that can be read back, so
that they travel with a draft from folder to folder.
"""

from __future__ import annotations

import subprocess
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import cospec
from cospec.config import Eagle3Config

CARD = "README.md"
UNKNOWN = "not recorded"


@dataclass(frozen=True, kw_only=True)
class Card:
    """Facts of a draft; None is written as "not recorded"."""

    policy: str | None = None
    """Name or path of the policy that it drafts for."""
    data: str | None = None
    """What it was trained on."""
    acceptance: str | None = None
    """Measured acceptance length and where."""
    commit: str | None = None
    """Of the code that trained it."""


def card_text(card: Card, config: Eagle3Config, family: str) -> str:
    """README.md: the facts, the shape and the flags; the same facts give the same bytes."""
    c = config
    facts = {name: value or UNKNOWN for name, value in asdict(card).items()}
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm", "attention_bias")
    rope = f"theta {c.rope.theta:g}, " + (
        "no scaling" if c.rope.scaling == "none" else f"{c.rope.scaling} by {c.rope.factor:g}"
    )
    shape = {
        "format": f"EAGLE-3, {family}",
        "tapped layers (0-based, outputs)": ", ".join(map(str, c.tap_layers)),
        "policy hidden size, vocabulary": f"{c.target_hidden_size}, {c.vocab_size}",
        "draft hidden size, vocabulary": f"{c.hidden_size}, {c.draft_vocab_size}",
        "embeddings": "its own" if c.own_embedding else "the policy's",
        "attention": f"{c.num_attention_heads} heads, {c.num_key_value_heads} of keys and values, "
        + (f"window {c.sliding_window}" if c.sliding_window is not None else "full"),
        "RoPE": f"{rope}, {c.max_position_embeddings} positions",
        "flags": ", ".join(name for name in flags if getattr(c, name)) or "none",
    }
    lines = ["---", "tags:", "- speculative-decoding", "- eagle3", "---", "# EAGLE-3 draft", ""]
    lines += _table(facts) + ["", "It proposes tokens for this policy alone; the policy verifies them.", ""]
    return "\n".join(lines + _table(shape) + [""])


def read_card(folder: str | Path) -> Card:
    """The facts of a folder's card; nothing for a folder without one, or with another's."""
    path = Path(folder) / CARD
    if path.is_symlink() or not path.is_file():
        return Card()
    facts = {}
    for line in path.read_text(errors="replace").splitlines():
        cells = [cell.strip().replace("\0", "|") for cell in line.replace("\\|", "\0").split("|")]
        if len(cells) == 4 and cells[1] in asdict(Card()) and cells[2] != UNKNOWN:
            facts.setdefault(cells[1], cells[2])
    return Card(**facts)


@cache
def commit() -> str:
    """The commit of this checkout, or the version where there is none."""
    version, checkout = f"cospec {cospec.__version__}", Path(__file__).resolve().parents[3]
    if not (checkout / ".git").exists():  # installed: a repository further up is not this code's
        return version
    command = ["git", "-C", str(checkout), "rev-parse", "--short=12", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return version
    return f"{version}, {found.stdout.strip()}" if found.returncode == 0 else version


def _table(rows: dict[str, str]) -> list[str]:
    cells = [f"| {name} | {' '.join(value.split()).replace('|', chr(92) + '|')} |" for name, value in rows.items()]
    return ["| | |", "|---|---|", *cells]
