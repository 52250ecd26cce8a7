"""Folders that appear when they are complete, files that survive a crash of the machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_folder(folder: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its name when the block ends without an error.

    Raises FileExistsError for a folder with files in it, unless `overwrite`, which replaces it whole.
    """
    folder = Path(folder).absolute()
    check_free(folder, overwrite=overwrite)
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def check_free(folder: str | Path, *, overwrite: bool = False) -> None:
    """Raise FileExistsError when a folder must not be written."""
    folder = Path(folder)
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise FileExistsError(f"{folder} is no folder: choose a new name")
    if folder.exists() and any(folder.iterdir()) and not overwrite:
        raise FileExistsError(f"{folder} is not empty: choose a new folder or pass overwrite=True")


def fsync(path: Path) -> None:
    """Make a file, or the names in a folder, survive a crash of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
