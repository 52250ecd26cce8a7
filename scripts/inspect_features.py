"""What is in a folder of saved features, whose is it, is it sound? Exit code 1 when it is not.

python scripts/inspect_features.py features/ [--policy policy/] [--most 200]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from cospec.config import ConfigError
from cospec.features.foreign import open_features
from cospec.features.inspect import inspect
from cospec.features.source import cat_names
from cospec.features.store import POLICY, FeatureStore, StoreError
from cospec.features.teacher import read_ends, read_stored_ends


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    folder: Annotated[str, tyro.conf.Positional]
    policy: str | None = None
    """Folder of the policy that the features should be of; a store of our own may bring its ends."""
    tap_layers: tuple[int, ...] | None = None
    """What foreign files do not say."""
    most: int | None = None
    """Documents to read, spread evenly; None: all."""


def run(config: InspectConfig) -> int:
    console = Console(highlight=False)
    try:
        source = open_features(config.folder, tap_layers=config.tap_layers, need_layers=False, allow_incomplete=True)
        ends = read_ends(config.policy) if config.policy is not None else None
        if ends is None and isinstance(source, FeatureStore) and (source.folder / POLICY).is_file():
            ends = read_stored_ends(config.folder, source.info)
        found = inspect(source, ends, most=config.most)
    except (ConfigError, StoreError) as error:
        console.print(f"not sound: {error}", markup=False)
        return 1
    table = Table(show_header=False, title=config.folder)
    for name, text in found.figures:
        table.add_row(name, text)
    console.print(table)
    for problem in found.problems[:20]:
        console.print(f"  {problem}", markup=False)
    if found.problems:
        console.print(f"not sound: {len(found.problems)} problems ({cat_names(found.problems[:1])})", markup=False)
        return 1
    console.print("sound")
    return 0


if __name__ == "__main__":
    sys.exit(run(tyro.cli(InspectConfig, description=__doc__)))
