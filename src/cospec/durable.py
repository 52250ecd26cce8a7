"""Folders that appear when they are complete, files that survive a crash of the machine."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OF_A_RUN = {"metrics.jsonl", "run.json", "checkpoint.json"}
"""Files beside a config.json that say that it is not a model's."""


@contextmanager
def new_folder(folder: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its name when the block ends without an error.

    What a process left that was killed in its block goes away with the next one for the same folder.

    Raises FileExistsError for a folder with files in it, unless `overwrite` and it holds a model, which is
    replaced whole; OSError naming `folder` where it cannot be written.
    """
    folder = Path(folder).absolute()
    check_free(folder, overwrite=overwrite)
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    try:
        for left in folder.parent.glob(f"{glob.escape(f'.{folder.name}.partial-')}*"):
            if left == partial or not _is_alive(left.name.rpartition("-")[2]):
                shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and (error.filename is None or str(error.filename).startswith(str(partial))):
            # A full disk names no file, others the temporary folder, which nobody knows.
            raise OSError(error.errno, f"cannot be written: {error.strerror or error}", str(folder)) from error
        raise


def _is_alive(pid: str) -> bool:
    """Whether a process of this machine has the number; True for what is no number."""
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError, ValueError):
        return True
    return True


def check_free(folder: str | Path, *, overwrite: bool = False) -> None:
    """Raise FileExistsError when a folder must not be written: `overwrite` is for folders of a model only.

    These are files, config.json among them, and no other folder: what else is there nobody meant to lose.
    """
    folder = Path(folder)
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise FileExistsError(f"{folder} is no folder: choose a new name")
    paths = list(folder.iterdir()) if folder.exists() else []
    if not paths:
        return
    if not overwrite:
        raise FileExistsError(f"{folder} is not empty: choose a new folder or pass overwrite=True")
    names = {path.name for path in paths}
    lost = sorted({path.name for path in paths if path.is_dir()} | (names & _OF_A_RUN))
    if lost or "config.json" not in names:
        what = f"holds {lost[0]}" if lost else "has no config.json"
        raise FileExistsError(f"{folder} {what}: no folder of a model, overwriting would lose what is in it")


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """An OSError in the block that names no file, as that of a full disk, names `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def fsync(path: Path) -> None:
    """Make a file, or the names in a folder, survive a crash of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
