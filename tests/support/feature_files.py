"""Features made up for tests: documents, a store of them, and the folder of a policy's ends."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import torch

from cospec.features.source import FeatureDocument, FeatureInfo
from cospec.features.store import StoreWriter

DT, P, V = 8, 3, 50


def make_info(**changes) -> FeatureInfo:
    values = {
        "format": "cospec",
        "last_is_normed": True,
        "tap_layers": (0, 1, 2),
        "num_taps": P,
        "hidden_size": DT,
        "vocab_size": V,
        "dtype": "float32",
        "policy": "tiny",
        "settings": {"documents_per_shard": 4},
    }
    return FeatureInfo(**{**values, **changes})


def make_feature_document(i: int, length: int | None = None, *, taps: int = P, size: int = DT) -> FeatureDocument:
    generator = torch.Generator().manual_seed(1000 + i)
    length = 3 + i % 7 if length is None else length
    return FeatureDocument(
        input_ids=torch.randint(V, (length,), generator=generator),
        loss_mask=torch.arange(length) >= min(2, length - 1),
        taps=torch.randn(length, taps * size, generator=generator),
        last_hidden=torch.randn(length, size, generator=generator),
        name=f"sample {i}",
    )


def write_store(folder, count: int = 10, per_shard: int = 4, **changes) -> list[FeatureDocument]:
    info = make_info(**changes)
    documents = [make_feature_document(i) for i in range(count)]
    shards = -(-count // per_shard)
    writer = StoreWriter(folder, info, num_shards=shards)
    for shard in range(shards):
        chosen = range(shard * per_shard, min(count, (shard + 1) * per_shard))
        writer.write_shard(shard, [(i, documents[i]) for i in chosen])
    writer.finish()
    writer.close()
    return documents


def save(content: object, path: Path) -> None:
    """torch.save, compressed where the name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(content, buffer)
    path.write_bytes(gzip.compress(buffer.getvalue()) if path.suffix == ".gz" else buffer.getvalue())
