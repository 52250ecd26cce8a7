"""The files of a draft's folder, read with care: nothing outside the folder is opened."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from cospec.config import ConfigError, require
from cospec.hf import TensorFolder
from cospec.tensor_writer import INDEX, SINGLE


def open_tensors(folder: str | Path) -> TensorFolder:
    """The tensors of a folder, after a check that its files and its index tell one story.

    Raises ConfigError naming the file or key: outside the folder, unreadable, truncated, in
    the index only, in a file only, in two files.
    """
    folder = Path(folder)
    index, tensors = folder / INDEX, sorted(folder.glob("*.safetensors"))
    for path in [index, *tensors]:
        if path.is_symlink() or path.exists():
            check_inside(path, folder)
    weight_map: Mapping[str, str] = {}
    if index.is_file():
        raw = read_json(index)
        weight_map = raw.get("weight_map") or {}
        sound = isinstance(weight_map, dict) and all(isinstance(v, str) for v in weight_map.values())
        require(sound and bool(weight_map), f"{INDEX}: weight_map", type(weight_map).__name__, "must name the files")
        for key, name in weight_map.items():
            require(Path(name).name == name, f"{INDEX}: {key}", name, "is a path outside the folder")
            require((folder / name).is_file(), f"{INDEX}: {key}", name, "is no file of the folder")
        left = sorted({p.name for p in tensors} - set(weight_map.values()))
        require(not left, "files", left, f"are not in {INDEX}: a reader that takes every file would load them")
    elif (folder / SINGLE).is_file():
        left = [p.name for p in tensors if p.name != SINGLE]
        require(not left, "files", left, f"lie beside {SINGLE} without {INDEX}")
    try:
        found = TensorFolder(folder)
    except ValueError as error:
        raise ConfigError("draft folder", str(folder), str(error)) from error
    _check_places(folder, set(found), weight_map)
    return found


def _check_places(folder: Path, found: set[str], weight_map: Mapping[str, str]) -> None:
    if not weight_map:
        return
    for key in sorted(set(weight_map) - found):
        raise ConfigError("tensor", key, f"is in {INDEX} but in none of the files")
    for key in sorted(found - set(weight_map)):
        raise ConfigError("tensor", key, f"is in a file but not in {INDEX}")
    for name in sorted(set(weight_map.values())):
        for key in names_in(folder / name):
            require(weight_map[key] == name, "tensor", key, f"is in {name}, {INDEX} says {weight_map[key]}")


def names_in(path: Path) -> list[str]:
    """Names in one safetensors file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return [name for name in json.loads(file.read(size)) if name != "__metadata__"]


def check_inside(path: Path, folder: Path) -> None:
    """Raise ConfigError for a file that is, by a symbolic link, outside its folder."""
    inside = path.resolve().parent == folder.resolve()
    require(inside, "file", path.name, f"leads out of {folder} to {path.resolve()}: copy it there (cp -rL)")


def write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def read_json(path: Path) -> dict:
    """The object in a JSON file; raises ConfigError naming a file that is damaged."""
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError("file", str(path), f"cannot be read: {error}") from error
    require(isinstance(raw, dict), "file", str(path), "must hold a JSON object")
    return raw
