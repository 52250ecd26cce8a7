"""Write the policy of a run, or of one of its checkpoints, as a Hugging Face folder.

    python scripts/export_policy.py runs/rl my-policy [--dtype bfloat16]

Of any mesh; tensors are read and written one at a time. transformers, vLLM and SGLang load the
folder, and `--policy.hf_path` starts a run from it. Tokenizer files and the ids of special tokens
come along from the folder that the run started from; without one, the task's stop token ends a
text. Exit code 2 with the reason where there is no policy to write.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

import torch
import tyro

from cospec.config import ConfigError, require
from cospec.export.files import read_json
from cospec.policy.weights import save_hf
from cospec.train.cli import command
from cospec.train.saved import find_checkpoint, read_policy

ALONG = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
)
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


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
    policy = read_policy(checkpoint)
    start = None if policy.start is None else Path(policy.start)
    special, files = {"eos_token_id": policy.stop_token_id}, []
    if start is not None and (start / "config.json").is_file():
        raw = read_json(start / "config.json")
        special = {name: raw.get(name) for name in SPECIAL}
        files = sorted({file for pattern in ALONG for file in start.glob(pattern) if file.is_file()})
    save_hf(
        policy.spec,
        policy.tensors,
        output,
        dtype=policy.dtype if dtype is None else getattr(torch, dtype),
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
        extra={name: value for name, value in special.items() if value is not None},
    )
    for file in files:
        shutil.copy(file, output / file.name)
    along = f", with {len(files)} files of {start} beside the weights" if files else ""
    print(f"{output}: from {checkpoint}{along}")


def main(argv: list[str] | None = None) -> None:
    command(export, argv, __doc__)


if __name__ == "__main__":
    main()
