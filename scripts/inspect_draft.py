"""What a draft folder holds, which policy it fits, and what differs.

    python scripts/inspect_draft.py FOLDER [--policy POLICY_FOLDER] [--tap_layers 1 11 21]

Exit code 0 for a sound draft (that fits the policy, when one is given), 1 for one that must
not be served, with the reason; 2 for arguments that make no sense.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tyro

from cospec.config import ConfigError, require
from cospec.export.card import card_text, read_card
from cospec.export.fit import differences, misfits, read_folder
from cospec.hf import read_policy_config


def inspect(
    folder: tyro.conf.Positional[Path],
    policy: str | None = None,
    tap_layers: tuple[int, ...] | None = None,
    ignore: tuple[str, ...] = (),
) -> list[str]:
    """Print what a draft folder holds; returns the reasons why it must not be served.

    Args:
        folder: config.json and safetensors of a draft.
        policy: folder of the policy (its config.json is enough).
        tap_layers: 0-based layers, for a draft that names none.
        ignore: keys of config.json and tensor names to let pass although they are not understood.
    """
    require(folder.is_dir(), "folder", str(folder), "is no folder")
    target = None if policy is None else read_policy_config(policy)
    try:
        found = read_folder(folder, tap_layers=tap_layers, ignore=ignore)
    except ConfigError as error:
        return [str(error)]
    config, draft = found.draft.config, found.draft
    parameters = sum(p.numel() for p in draft.parameters())
    print(f"{folder}: {parameters / 1e6:.2f} M parameters, {', '.join(found.dtypes)} in the files")
    facts = card_text(read_card(folder), config, found.family).splitlines()
    print(
        "\n".join(
            line.strip("| ").replace(" | ", ": ", 1) for line in facts if line.startswith("| ") and line != "| | |"
        )
    )
    if found.verifier is not None:
        print(f"made for: {found.verifier}")
    if target is None:
        return []
    wrong = misfits(config, target)
    if not wrong:
        print(f"fits: {policy}")
        for line in differences(config, target):
            print(f"differs: {line}")
    return wrong


def main(argv: list[str] | None = None) -> None:
    try:
        reasons = tyro.cli(inspect, args=argv, description=__doc__)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    for reason in reasons:
        print(f"unsound: {reason}", file=sys.stderr)
    if reasons:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
