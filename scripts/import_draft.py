"""Read a draft of any family, check it against a policy, and write it as one of ours.

    python scripts/import_draft.py SOURCE OUTPUT [--policy POLICY_FOLDER] [--tap_layers 1 11 21]

The written folder says everything explicitly (layers, flags, RoPE in both schemas) and is what
`--draft.init` starts from; the source works there too. Exit code 2 with the reason for what is
not understood or does not fit.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import tyro

from cospec.export.card import read_card
from cospec.export.eagle3 import save_draft
from cospec.export.fit import differences, read_folder, require_fit
from cospec.hf import read_policy_config
from cospec.train.cli import command


def import_draft(
    source: tyro.conf.Positional[Path],
    output: tyro.conf.Positional[Path],
    policy: str | None = None,
    tap_layers: tuple[int, ...] | None = None,
    ignore: tuple[str, ...] = (),
    overwrite: bool = False,
) -> None:
    """Read a draft of any family and write it as one of ours.

    Args:
        source: folder of the draft.
        output: folder to write.
        policy: folder of the policy that it must fit (its config.json is enough).
        tap_layers: 0-based layers, for a draft that names none.
        ignore: keys of config.json and tensor names to let pass although they are not understood.
        overwrite: replace `output` when it has files in it.
    """
    found = read_folder(source, tap_layers=tap_layers, ignore=ignore)
    if policy is not None:
        target = read_policy_config(policy)
        require_fit(found.draft.config, target)
        for line in differences(found.draft.config, target):
            print(f"differs from the policy: {line}")
    card = read_card(source)
    card = replace(card, policy=card.policy or policy or found.verifier)
    dtype = getattr(torch, found.dtypes[0]) if len(found.dtypes) == 1 else None
    save_draft(found.draft, output, family="vllm", dtype=dtype, card=card, overwrite=overwrite)
    print(f"{output}: from a {found.family} folder; start from it with --draft.init {output}")


def main(argv: list[str] | None = None) -> None:
    command(import_draft, argv, __doc__)


if __name__ == "__main__":
    main()
