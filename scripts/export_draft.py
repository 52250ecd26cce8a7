"""Write a draft for a server: from a run, one of its checkpoints, or another draft folder.

    python scripts/export_draft.py runs/rl my-draft --to vllm [--policy org/policy]

Tensors are read and written one at a time. README.md says what the run knew of policy, data,
acceptance and commit. Exit code 2 with the reason for a draft that a server must not get.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
import tyro

from cospec.config import require
from cospec.export.card import read_card
from cospec.export.eagle3 import save_draft
from cospec.export.eagle3_config import Family
from cospec.export.fit import read_folder, require_fit
from cospec.hf import read_policy_config
from cospec.train.cli import command
from cospec.train.saved import find_checkpoint, read_draft


def export(
    source: tyro.conf.Positional[Path],
    output: tyro.conf.Positional[Path],
    to: Family,
    policy: str | None = None,
    data: str | None = None,
    acceptance: str | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    max_shard_bytes: int = 5 * 10**9,
    tap_layers: tuple[int, ...] | None = None,
    ignore: tuple[str, ...] = (),
    overwrite: bool = False,
) -> None:
    """Write a draft for a server.

    Args:
        source: a run's folder (its newest good checkpoint), a checkpoint, or a folder of a draft.
        output: folder to write.
        to: whose files.
        policy: name or path of the policy, for the card and the speculators family; a folder is checked to fit.
        data: what the draft was trained on, for the card; None takes what the source knows.
        acceptance: measured acceptance length, for the card; None takes what the source knows.
        dtype: of the written tensors; None keeps the source's.
        max_shard_bytes: of tensor data in one file.
        tap_layers: 0-based layers, for a source folder that names none.
        ignore: keys and tensors of the source, and flags of the server, to let pass.
        overwrite: replace `output` when it has files in it.
    """
    require(source.is_dir(), "source", str(source), "is no folder")
    checkpoint = find_checkpoint(source)
    kept = None if dtype is None else getattr(torch, dtype)
    if checkpoint is not None:
        draft, state, card = read_draft(checkpoint)
    else:
        found = read_folder(source, tap_layers=tap_layers, ignore=ignore)
        draft, state, card = found.draft, None, read_card(source)
        card = replace(card, policy=card.policy or found.verifier)
        if dtype is None and len(found.dtypes) == 1:
            kept = getattr(torch, found.dtypes[0])
    policy = policy or card.policy
    if policy is not None and Path(policy).exists():  # else a name
        require_fit(draft.config, read_policy_config(policy))
    card = replace(card, policy=policy, data=data or card.data, acceptance=acceptance or card.acceptance)
    save_draft(
        draft,
        output,
        family=to,
        state=state,
        dtype=kept,
        verifier=policy,
        card=card,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
        ignore=ignore,
    )
    print(f"{output}: {to}, from {checkpoint or source}")


def main(argv: list[str] | None = None) -> None:
    command(export, argv, __doc__)


if __name__ == "__main__":
    main()
