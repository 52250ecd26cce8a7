"""From a recipe's config and the command line to a run: typed overrides, clear errors."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro

from cospec.config import ConfigError, RunConfig
from cospec.records import Diverged
from cospec.rl.checked import TaskError
from cospec.train.check import check
from cospec.train.checkpoint import CheckpointError
from cospec.train.faults import REFUSALS, RankFault, diverged_hint, leave, resume_hint


def main(config: RunConfig, run: Callable[..., object], argv: list[str] | None = None, **options: Any) -> None:
    """Override `config` by command-line flags, check it, run it: `run(config, **options)`.

    Unknown flags, wrong types and impossible values end with one message and exit code 2,
    before anything is written; so does a checkpoint or a feature store that cannot be written or read.
    A rank that fails or dies ends all, with one message and exit code 1; so does a model that diverged,
    and a task of your own that fails, whose traceback comes first. Ctrl-C and a full disk
    say how to go on.
    """
    config = tyro.cli(RunConfig, default=config, args=argv, description=run.__doc__)
    try:
        check(config)
        run(config, **options)
    except REFUSALS as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # all ranks raise it together: said once a machine
            print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except Diverged as error:
        print(f"error: {error}. {diverged_hint(config)}", file=sys.stderr)
        raise SystemExit(1) from None
    except TaskError as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except OSError as error:
        own = Path(config.output_dir).absolute()
        if error.filename is None or own not in (path := Path(str(error.filename)).absolute(), *path.parents):
            raise
        print(f"error: cannot write the run's record: {error}. {resume_hint(config)}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:  # of a single process; see faults for several
        print(f"error: told to end by Ctrl-C. {resume_hint(config)}", file=sys.stderr)
        raise SystemExit(130) from None
    except RankFault as fault:
        leave(fault)


def command(function: Callable[..., object], argv: list[str] | None, description: str | None) -> None:
    """Run a script's function on its command-line arguments; what it refuses ends with one message and exit code 2."""
    try:
        tyro.cli(function, args=argv, description=description)
    except (ConfigError, CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
