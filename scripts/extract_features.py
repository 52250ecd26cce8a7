"""Run a policy over documents and save what a draft needs of it.

    torchrun --nproc_per_node 2 scripts/extract_features.py --mesh.dp 2 \\
        --policy.hf_path policy/ --data chats.jsonl --output features/

Data: jsonl with `messages`, `text` or `input_ids` (and `loss_mask`), a text file, or a folder of
`datasets.save_to_disk`. Stopped at any moment, the same command goes on where it stopped.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
import tyro

from cospec.config import (
    AttentionConfig,
    ConfigError,
    MeshConfig,
    PipelineConfig,
    PolicyConfig,
    RunConfig,
    TrainConfig,
    check_tap_layers,
    default_tap_layers,
    require,
)
from cospec.features import extract as extraction
from cospec.features.samples import Samples, load_tokenizer, open_samples
from cospec.features.source import FeatureInfo
from cospec.features.store import FeatureStore, StoreError
from cospec.features.teacher import (
    folder_tokenizer_hash,
    gather_ends,
    policy_config_from_json,
    read_ends,
    save_ends,
)
from cospec.mesh import Mesh, build_mesh, choose_dtype, close_mesh
from cospec.policy.runner import Runner, SequentialRunner
from cospec.titan import policy_config
from cospec.train import checkpoint
from cospec.train.console import Progress
from cospec.train.setup import build_pipeline, build_stages
from cospec.train.state import Part


@dataclass(frozen=True, kw_only=True)
class ExtractConfig:
    data: str
    """jsonl, text, or a `datasets` folder."""
    output: str
    """Folder of the store, new or to be continued."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """`hf_path`, or the sizes of a checkpoint (read from its run's config.json where there is one)."""
    checkpoint: str | None = None
    """A `step-...` folder of a co-training run: its policy is used."""
    tokenizer: str | None = None
    """Folder of the tokenizer; None: `policy.hf_path`. Not needed for data with `input_ids`."""
    split: str | None = None
    max_tokens: int = 2048
    """Longer documents are cut."""
    tap_layers: tuple[int, ...] | None = None
    """0-based; None: layers 1, n//2 - 1 and n - 4."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of the saved features."""
    documents_per_shard: int = 64
    """A shard is what an interruption can lose, and what one rank holds in memory."""
    row_tokens: int = 4096
    """Capacity of a packed row."""
    max_bad_share: float = 0.05
    """A larger share of samples left out ends with exit code 1; the store is kept."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compute_dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    seed: int = 0
    """Of a policy that is neither read from a folder nor from a checkpoint."""


def run(config: ExtractConfig) -> None:
    """Extract on the mesh that torchrun started."""
    for name in ("documents_per_shard", "row_tokens"):
        require(getattr(config, name) >= 1, name, getattr(config, name), "must be >= 1")
    require(
        config.max_tokens >= 2, "max_tokens", config.max_tokens, "must be >= 2: a document needs a token to predict"
    )
    mesh = build_mesh(config.mesh, device=config.device)
    config = replace(config, policy=find_policy(config))
    tokenizer_folder = config.tokenizer or config.policy.hf_path
    samples = open_samples(
        config.data, tokenizer=load_tokenizer(tokenizer_folder), max_tokens=config.max_tokens, split=config.split
    )
    dtype = choose_dtype(config.compute_dtype, mesh.device)
    runner, sizes, taps = build_runner(config, mesh, dtype)
    num_shards = -(-len(samples) // config.documents_per_shard)
    info = describe(config, samples, sizes, taps, tokenizer_folder, dtype)
    writer = extraction.open_writer(config.output, info, mesh, num_shards=num_shards)
    ends = read_ends(config.policy.hf_path) if config.policy.hf_path else gather_ends(runner.parts, mesh, sizes)
    if mesh.world_rank == 0:
        save_ends(config.output, ends)
    show = Show(mesh)
    extraction.extract(
        runner,
        samples,
        writer,
        mesh,
        documents_per_shard=config.documents_per_shard,
        row_tokens=config.row_tokens,
        vocab_size=sizes.vocab_size,
        max_positions=sizes.max_position_embeddings,
        on_progress=show,
    )
    writer.close()
    first_rank = mesh.world_rank == 0
    close_mesh(mesh)
    if first_rank:
        report(config, samples)


def find_policy(config: ExtractConfig) -> PolicyConfig:
    """The sizes of the checkpoint's policy, where its run has left them; else the flags."""
    if config.checkpoint is None:
        return config.policy
    require(config.policy.hf_path is None, "policy.hf_path", config.policy.hf_path, "cannot be given with checkpoint")
    for folder in Path(config.checkpoint).absolute().parents[:2]:
        path = folder / "config.json"
        if path.is_file():
            return replace(policy_config_from_json(json.loads(path.read_text())["policy"]), hf_path=None)
    return config.policy


def build_runner(config: ExtractConfig, mesh: Mesh, dtype: torch.dtype) -> tuple[Runner, PolicyConfig, tuple[int, ...]]:
    """The policy with hooks on its tapped layers, its sizes, and the layers."""
    run = RunConfig(
        seed=config.seed,
        mesh=config.mesh,
        policy=config.policy,
        attention=config.attention,
        pipeline=config.pipeline,
        train=TrainConfig(row_tokens=config.row_tokens),
    )
    stages = build_stages(run, mesh, dtype)
    if config.checkpoint is not None:
        path = Path(config.checkpoint)
        definition = checkpoint.read_manifest(path)["definition"]
        checkpoint.load(path, {"policy": Part(list(stages.values()))}, definition=definition)
    spec = next(iter(stages.values())).config
    sizes = policy_config(spec)
    taps = config.tap_layers if config.tap_layers is not None else default_tap_layers(sizes.num_hidden_layers)
    check_tap_layers(taps, sizes.num_hidden_layers)
    if mesh.pp_size > 1:
        return build_pipeline(run, mesh, stages, taps, dtype), sizes, taps
    return SequentialRunner(stages[0], mesh, config.attention, taps), sizes, taps


def describe(
    config: ExtractConfig,
    samples: Samples,
    sizes: PolicyConfig,
    taps: tuple[int, ...],
    tokenizer_folder: str | None,
    dtype: torch.dtype,
) -> FeatureInfo:
    return FeatureInfo(
        format="cospec",
        last_is_normed=True,
        tap_layers=taps,
        num_taps=len(taps),
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        dtype=config.dtype,
        policy=config.policy.hf_path or config.checkpoint or f"seed {config.seed}",
        tokenizer=None if tokenizer_folder is None else folder_tokenizer_hash(tokenizer_folder),
        policy_config=asdict(sizes),
        settings={
            "data": samples.fingerprint,
            "samples": len(samples),
            "max_tokens": config.max_tokens,
            "documents_per_shard": config.documents_per_shard,
            "row_tokens": config.row_tokens,
            "compute_dtype": str(dtype).removeprefix("torch."),
        },
    )


class Show:
    """Progress on the console of rank 0: shards, documents a second, bytes written, time left."""

    def __init__(self, mesh: Mesh):
        from rich.console import Console

        self.progress = Progress(Console(quiet=mesh.world_rank != 0, highlight=False, soft_wrap=True))
        self.begun = time.perf_counter()

    def __call__(self, p: extraction.Progress) -> None:
        if p.shards_done == 0:
            return
        rate = p.documents / max(time.perf_counter() - self.begun, 1e-9)
        parts = {"documents": p.documents, "a second": rate, "written": size_text(p.bytes)}
        self.progress.update("shards", p.shards_done - 1, p.num_shards, parts)
        if p.shards_done == p.num_shards:
            self.progress.stop()


def size_text(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def report(config: ExtractConfig, samples: Samples) -> None:
    """What is in the store; exit code 1 when too many samples were left out."""
    store = FeatureStore(config.output)
    for name, reason in store.skipped[:20]:
        print(f"  skipped {name}: {reason}")
    if len(store.skipped) > 20:
        print(f"  ... and {len(store.skipped) - 20} more")
    print(
        f"{config.output}: {len(store)} documents, {store.num_tokens} tokens, {size_text(store.num_bytes)}; "
        f"{len(store.skipped)} of {len(samples)} samples skipped"
    )
    if len(store.skipped) > config.max_bad_share * len(samples):
        print(f"error: more than max_bad_share={config.max_bad_share:.1%} were skipped", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    try:
        run(tyro.cli(ExtractConfig, description=__doc__))
    except (ConfigError, StoreError, checkpoint.CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
