"""Write the policy of a run, or of one of its checkpoints, as a Hugging Face folder.

    python scripts/export_policy.py runs/rl my-policy [--dtype bfloat16]

Of any mesh; tensors are read and written one at a time. transformers, vLLM and SGLang load the
folder, and `--policy.hf_path` starts a run from it. Tokenizer files come along from the folder
that the run started from. Exit code 2 with the reason where there is no policy to write.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Literal

import torch
import tyro

from cospec.config import ConfigError, require
from cospec.policy.weights import save_hf
from cospec.train.checkpoint import CheckpointError
from cospec.train.saved import find_checkpoint, read_policy

ALONG = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*")


def export(
    source: tyro.conf.Positional[Path],
    output: tyro.conf.Positional[Path],
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    max_shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
) -> None:
    """Write the policy of a run as a Hugging Face folder.

    Args:
        source: a run's folder (its newest good checkpoint), or a checkpoint.
        output: folder to write.
        dtype: of the written tensors; None keeps float32, in which they are trained.
        max_shard_bytes: of tensor data in one file.
        overwrite: replace `output` when it has files in it.
    """
    require(source.is_dir(), "source", str(source), "is no folder")
    checkpoint = find_checkpoint(source)
    if checkpoint is None:
        raise ConfigError("source", str(source), "is neither a run nor a checkpoint")
    spec, state, start = read_policy(checkpoint)
    kept = None if dtype is None else getattr(torch, dtype)
    save_hf(spec, state, output, dtype=kept, max_shard_bytes=max_shard_bytes, overwrite=overwrite)
    files = sorted({file for pattern in ALONG for file in Path(start).glob(pattern) if file.is_file()}) if start else []
    for file in files:
        shutil.copy(file, output / file.name)
    print(f"{output}: from {checkpoint}" + (f", with {len(files)} tokenizer files of {start}" if files else ""))


def main(argv: list[str] | None = None) -> None:
    try:
        tyro.cli(export, args=argv, description=__doc__)
    except (ConfigError, CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
