"""Before vLLM starts: its import, what it must not change in this process, what it cannot be built with."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cospec.config import Eagle3Config
from cospec.draft.attach import check_fits
from cospec.draft.eagle3 import Eagle3Draft
from cospec.titan import DecoderConfig, hf_config

MAX_DRAFT_TOKENS = 16
BLOCK = 128  # positions of a block of keys and values on CPUs, the largest


def check_settings(
    policy_config: DecoderConfig,
    draft_folder: str | Path | None,
    draft_config: Eagle3Config | None,
    *,
    num_draft_tokens: int,
    max_batch: int,
    max_len: int,
) -> Eagle3Draft | None:
    """Raises ValueError for what `VLLMEngine` cannot be built with; returns names and shapes of the draft."""
    if not 0 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
        raise ValueError(f"num_draft_tokens={num_draft_tokens}: must be in 0..{MAX_DRAFT_TOKENS}")
    if max_batch < 1:
        raise ValueError(f"max_batch={max_batch}: must be >= 1")
    most = policy_config.max_seq_len - room(num_draft_tokens if draft_folder is not None else 0)
    if not 2 <= max_len <= most:
        rule = f"must be in 2..{most}, the policy's {policy_config.max_seq_len} positions less what chains need"
        raise ValueError(f"max_len={max_len}: {rule}")
    if (draft_folder is None) != (draft_config is None):
        raise ValueError("draft_folder and draft_config: give both or neither")
    if draft_config is None:
        return None
    check_fits(draft_config, policy_config)
    with torch.device("meta"):
        return Eagle3Draft(draft_config)


def cache_bytes(policy_config: DecoderConfig, draft: Eagle3Draft | None, *, sequences: int, positions: int) -> int:
    """Keys and values, in float32, of as many sequences of so many positions; at least 1 GiB.

    One that is too small is no error: vLLM then stops sequences and starts them again.
    """
    raw = hf_config(policy_config)
    width = raw["num_key_value_heads"] * raw["head_dim"]
    if draft is not None:  # vLLM gives each layer a page as large as the largest needs
        width = max(width, draft.config.num_key_value_heads * draft.config.head_dim)
    layers = raw["num_hidden_layers"] + (draft is not None)
    blocks = sequences * -(-positions // BLOCK) + 1
    return max(2**30, blocks * BLOCK * 2 * 4 * width * layers)


def memory(wanted: int) -> dict[str, Any]:
    """What vLLM's LLM is told of memory: `wanted` bytes for keys and values.

    On a GPU at most half of what is free now, for others are on it; and its check of what is
    free at the start, by default a share of the whole device, is relative to that too.
    """
    if not torch.cuda.is_available():
        return {"kv_cache_memory_bytes": wanted}
    free, total = torch.cuda.mem_get_info()
    return {"kv_cache_memory_bytes": min(wanted, free // 2), "gpu_memory_utilization": 0.9 * free / total}


def room(num_draft_tokens: int) -> int:
    """Positions past the longest sequence that keep vLLM drafting.

    It proposes k tokens in every step, also past a request's limit, and as soon as one
    sequence of the batch with its chain and the next one would not fit, nobody gets proposals
    (they are token 0, which is lossless and slow).
    """
    return 2 * num_draft_tokens + 2 if num_draft_tokens else 0


def import_vllm() -> Any:
    """The vllm module, set up to run in this process. Raises ImportError naming what to install."""
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # refits hand over tensors, not copies
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # training shares this process: it must not be pinned to a core
        "VLLM_CACHE_ROOT": os.path.join(tempfile.gettempdir(), f"cospec-vllm-{os.getuid()}"),
        "VLLM_LOGGING_LEVEL": "CRITICAL",  # its errors come as exceptions
        "VLLM_NO_USAGE_STATS": "1",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
        from vllm import LLM  # noqa: F401  (a folder of that name on the path is not it)
    except ImportError as error:
        raise ImportError(
            f"rollout.engine 'vllm' needs vLLM, which does not import here ({error}): on CPU run "
            "scripts/install_vllm_cpu.sh and use .venv-vllm/bin/python"
        ) from error
    return vllm


@contextmanager
def own_state() -> Iterator[None]:
    """vLLM seeds every generator when it starts and forbids torch.set_num_threads; both are the trainer's."""
    python, threads = random.getstate(), torch.set_num_threads
    array = np.random.get_state()  # noqa: NPY002  (the global one is what vLLM seeds)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(array)  # noqa: NPY002
        torch.set_num_threads = threads
