"""Run a policy over samples and save its features, on any mesh; an interrupted run goes on where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from cospec.config import ConfigError
from cospec.data.packing import make_batch, plan
from cospec.features.samples import Samples, check_document
from cospec.features.source import BadSample, FeatureDocument, FeatureInfo
from cospec.features.store import StoreError, StoreWriter
from cospec.mesh import Mesh
from cospec.policy.runner import Runner
from cospec.records import Batch, Document, Taps


@dataclass(frozen=True)
class Progress:
    """Of all ranks: shards that are there of all, and what this run has written."""

    shards_done: int
    num_shards: int
    documents: int
    bytes: int


@dataclass(frozen=True)
class _Item:
    sample: int
    name: str
    document: Document


def open_writer(folder: str | Path, info: FeatureInfo, mesh: Mesh, *, num_shards: int) -> StoreWriter:
    """A writer on every rank; what rank 0 finds wrong is raised on all. Collective."""
    writer, problem = None, None
    if mesh.world_rank == 0:
        try:
            writer = StoreWriter(folder, info, num_shards=num_shards)
        except (ConfigError, StoreError) as error:
            problem = error
    _together((None if problem is None else str(problem), 0, 0), mesh, problem)
    return writer if writer is not None else StoreWriter(folder, info, num_shards=num_shards, first=False)


def extract(
    runner: Runner,
    samples: Samples,
    writer: StoreWriter,
    mesh: Mesh,
    *,
    documents_per_shard: int,
    row_tokens: int,
    vocab_size: int,
    max_positions: int,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> None:
    """Write the shards that are missing, then the index. Collective.

    The dp ranks work on one shard each; a shard's rows hold its own documents only, so its
    content does not depend on what else runs.

    Args:
        documents_per_shard: samples of a shard.
        row_tokens: capacity of a packed row, in tokens.

    Raises StoreError on every rank when any rank cannot write.
    """
    missing = _from_first_rank(writer.missing(), mesh)
    done, documents, size = writer.num_shards - len(missing), 0, 0
    step = 2 * mesh.cp_size
    longest = min(row_tokens // step * step, max_positions)
    on_progress(Progress(done, writer.num_shards, 0, 0))
    for start in range(0, len(missing), mesh.dp_size):
        wave = missing[start : start + mesh.dp_size]
        shard = wave[mesh.dp_rank] if mesh.dp_rank < len(wave) else None
        items, skipped = [], []
        if shard is not None:
            first = shard * documents_per_shard
            items, skipped = read_shard(
                samples, range(first, min(len(samples), first + documents_per_shard)), vocab_size, longest
            )
        features = run_shard(runner, items, writer, mesh, row_tokens)
        error, written = None, 0
        if features is not None and shard is not None:
            try:
                written = writer.write_shard(shard, features, skipped)
            except StoreError as e:
                error = str(e)
        counts = _together((error, len(features or ()), written), mesh)
        done, documents, size = done + len(wave), documents + counts[0], size + counts[1]
        on_progress(Progress(done, writer.num_shards, documents, size))
    problem: Exception | None = None
    if mesh.world_rank == 0:
        try:
            writer.finish()
        except Exception as e:
            problem = e
    _together((None if problem is None else str(problem), 0, 0), mesh, problem)


def read_shard(
    samples: Samples, indices: Sequence[int], vocab_size: int, longest: int
) -> tuple[list[_Item], list[tuple[str, str]]]:
    """The documents of these samples, and (name, reason) of those left out."""
    items: list[_Item] = []
    skipped: list[tuple[str, str]] = []
    for i in indices:
        try:
            found = samples.documents(i)
            for document in found:
                check_document(document, samples.name(i), vocab_size, longest)
        except BadSample as error:
            skipped.append((error.name, error.reason))
        else:
            items += [_Item(i, samples.name(i), document) for document in found]
    return items, skipped


def run_shard(
    runner: Runner, items: Sequence[_Item], writer: StoreWriter, mesh: Mesh, row_tokens: int
) -> list[tuple[int, FeatureDocument]] | None:
    """Features of the documents, in order, on the rank that writes them; None on the others. Collective."""
    lengths = [item.document.input_ids.numel() for item in items]
    rows = plan(lengths, row_tokens, cp_size=mesh.cp_size) if items else []
    count = max(_largest(len(rows), mesh), 1)  # every rank runs the same collectives
    multiple = runner.microbatches or 1
    rows += [[] for _ in range(-(-count // multiple) * multiple - len(rows))]
    step = 2 * mesh.cp_size
    pad_to = row_tokens // step * step if runner.microbatches is not None else None
    batches = [
        make_batch([items[i].document for i in row], mesh.cp_size, mesh.cp_rank, pad_to).to(mesh.device) for row in rows
    ]
    found: dict[int, FeatureDocument] = {}

    def on_taps(index: int, taps: Taps) -> None:
        local_TC = torch.cat([*taps.hidden, taps.final_hidden], dim=1).to(writer.dtype)
        whole_SC = _gather(local_TC, batches[index], mesh)
        if whole_SC is None or not rows[index]:
            return
        width = taps.final_hidden.shape[1]
        for i, part_SC in zip(rows[index], whole_SC.split(batches[index].layout.lengths), strict=True):
            item = items[i]
            taps_SC, last_SD = part_SC[:, :-width].clone(), part_SC[:, -width:].clone()
            found[i] = FeatureDocument(item.document.input_ids, item.document.loss_mask, taps_SC, last_SD, item.name)

    runner.run(batches, [True] * len(batches), lambda _, hidden_TD: hidden_TD, on_taps, backward=False)
    if not runner.last_stage or mesh.cp_rank != 0:
        return None
    return [(items[i].sample, found[i]) for i in range(len(items))]


def _gather(local_TC: Tensor, batch: Batch, mesh: Mesh) -> Tensor | None:
    """The unpadded rows of all cp ranks on the first of them, on the CPU."""
    if mesh.cp_group is None:
        return batch.layout.unshard([local_TC.cpu()])
    raw = local_TC.contiguous().view(torch.uint8)  # gloo does not know every dtype
    shards = [torch.empty_like(raw) for _ in range(mesh.cp_size)] if mesh.cp_rank == 0 else None
    dist.gather(raw, shards, group=mesh.cp_group, group_dst=0)
    if shards is None:
        return None
    return batch.layout.unshard([s.view(local_TC.dtype).cpu() for s in shards])


def _largest(value: int, mesh: Mesh) -> int:
    if mesh.world_size == 1:
        return value
    values: list[int] = [0] * mesh.world_size
    dist.all_gather_object(values, value)
    return max(values)


def _from_first_rank(value: list[int], mesh: Mesh) -> list[int]:
    if mesh.world_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def _together(result: tuple[str | None, int, int], mesh: Mesh, problem: Exception | None = None) -> tuple[int, int]:
    """Sums of the two numbers over the ranks; StoreError on all when one has an error text."""
    results = [result]
    if mesh.world_size > 1:
        results = [(None, 0, 0)] * mesh.world_size
        dist.all_gather_object(results, result)
    if problem is not None:
        raise problem
    for rank, (error, _, _) in enumerate(results):
        if error is not None:
            raise StoreError(error if mesh.world_size == 1 else f"{error} (rank {rank})")
    return sum(r[1] for r in results), sum(r[2] for r in results)
