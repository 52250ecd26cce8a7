"""Documents with features into packed rows: the counterpart of `data.packing` for saved features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from cospec.config import ConfigError
from cospec.data.packing import make_batch, plan
from cospec.features.source import BadSample, BadSamples, FeatureDocument, FeatureInfo, FeatureSource
from cospec.features.teacher import PolicyEnds
from cospec.mesh import Mesh
from cospec.records import Batch, Document, Taps


@dataclass(frozen=True)
class FeatureRow:
    """One packed row as one rank holds it. taps_TC: [T, P * Dt]; last_TD: [T, Dt]; 0 on padding."""

    batch: Batch
    taps_TC: Tensor
    last_TD: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> FeatureRow:
        return FeatureRow(self.batch.to(device), self.taps_TC.to(device, dtype), self.last_TD.to(device, dtype))

    def taps(self, info: FeatureInfo, ends: PolicyEnds) -> Taps:
        """What the draft reads, as a run of the policy would have given it (padding rows aside)."""
        return Taps(
            hidden=tuple(self.taps_TC.split(ends.config.hidden_size, dim=1)),
            embeddings=ends.embed_VD[self.batch.input_ids],
            final_hidden=ends.final_hidden(self.last_TD, bool(info.last_is_normed)),
        )


def load_rows(
    source: FeatureSource, indices: Sequence[int], row_tokens: int, mesh: Mesh, bad: BadSamples
) -> list[FeatureRow]:
    """This rank's rows of the documents `indices`, equally many on every dp rank; bad samples are left out.

    A collective call over all ranks, which agree on what is bad: each looks at a share of the
    samples and reads the features of its own rows only. Empty when no document is left.

    Raises ConfigError: too many bad samples, or a document that no row has room for.
    """
    documents = _readable(source, indices, mesh, bad)
    if not documents:
        return []
    chosen = [i for i in indices if i in documents]  # twice where a batch reaches into the next epoch
    try:
        rows = plan(
            [documents[i].input_ids.numel() for i in chosen], row_tokens, cp_size=mesh.cp_size, dp_size=mesh.dp_size
        )
    except ValueError as error:
        longest = max(chosen, key=lambda i: documents[i].input_ids.numel())
        raise ConfigError("train.row_tokens", row_tokens, f"{source.name(longest)}: {error}") from error
    mine = rows[mesh.dp_rank :: mesh.dp_size]
    return [make_row([source[chosen[i]] for i in row], mesh, source.info) for row in mine]


def make_row(documents: Sequence[FeatureDocument], mesh: Mesh, info: FeatureInfo) -> FeatureRow:
    """One packed row; no documents make a row that supervises nothing."""
    batch = make_batch([Document(d.input_ids, d.loss_mask) for d in documents], mesh.cp_size, mesh.cp_rank)
    if documents:
        taps = torch.cat([d.taps for d in documents])
        last = torch.cat([d.last_hidden for d in documents if d.last_hidden is not None])
    else:
        size = int(info.hidden_size or 0)
        taps, last = torch.zeros(1, int(info.num_taps or 0) * size), torch.zeros(1, size)
    layout = batch.layout
    return FeatureRow(batch, layout.shard(taps, mesh.cp_rank), layout.shard(last, mesh.cp_rank))


def _readable(source: FeatureSource, indices: Sequence[int], mesh: Mesh, bad: BadSamples) -> dict[int, Document]:
    """index -> tokens of the samples that can be read, the same on every rank."""
    unique = list(dict.fromkeys(indices))
    found: dict[int, Document | str] = {}
    shared = not source.verified and mesh.world_size > 1
    for i in unique[mesh.world_rank :: mesh.world_size] if shared else unique:
        try:
            found[i] = source.tokens(i)
        except BadSample as error:
            found[i] = str(error)
    if shared:
        shares: list[dict[int, Document | str]] = [{} for _ in range(mesh.world_size)]
        dist.all_gather_object(shares, found)
        found = {i: value for share in shares for i, value in share.items()}
    documents: dict[int, Document] = {}
    for i in unique:
        value = found[i]
        bad.add(i, value if isinstance(value, str) else None)
        if not isinstance(value, str):
            documents[i] = value
    bad.check()
    return documents
