"""Small drafts and packed documents for the tests of the training-time test."""

from __future__ import annotations

import torch

from cospec.config import Eagle3Config, RopeConfig
from cospec.draft.eagle3 import Eagle3Draft, init_draft
from cospec.draft.vocab import vocab_maps
from cospec.layout import PackedLayout
from cospec.records import Batch, Taps
from support.ttt_oracle import OracleDocument

D, V = 12, 17


def make_draft(seed: int = 0, dtype=torch.float64, vocab=(0, 3, 4, 8, 11, 16), **flags) -> Eagle3Draft:
    sizes = {
        "hidden_size": D,
        "target_hidden_size": D,
        "intermediate_size": 10,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "vocab_size": V,
        "draft_vocab_size": len(vocab),
        "tap_layers": (0, 2, 3),
        "rope": RopeConfig(theta=50.0),
    }
    draft = Eagle3Draft(Eagle3Config(**{**sizes, **flags}))
    init_draft(draft, seed, std=0.4)  # large enough that every part matters
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for parameter in draft.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    d2t, t2d = vocab_maps(torch.tensor(vocab), V)
    draft.d2t.copy_(d2t)
    draft.t2d.copy_(t2d)
    return draft.to(dtype)


def make_documents(lengths, seed: int = 0, mask: str = "random", dtype=torch.float64) -> list[OracleDocument]:
    docs = []
    for i, n in enumerate(lengths):
        generator = torch.Generator().manual_seed(1000 * seed + i)

        def draw(generator=generator, n=n) -> torch.Tensor:
            return torch.randn(n, D, generator=generator, dtype=torch.float64).to(dtype)

        ids = torch.randint(V, (n,), generator=generator)
        keep = {
            "all": torch.ones(n, dtype=torch.bool),
            "none": torch.zeros(n, dtype=torch.bool),
            "response": torch.arange(n) >= n // 2,
            "random": torch.rand(n, generator=generator) < 0.6,
        }[mask]
        docs.append(OracleDocument(ids, keep, [draw() for _ in range(3)], draw(), draw()))
    return docs


def pack(
    docs: list[OracleDocument], pad_to: int | None = None, cp_size: int = 1, cp_rank: int = 0
) -> tuple[Taps, Batch]:
    """One rank's share of the documents in a packed row."""
    layout = PackedLayout([d.ids.numel() for d in docs], cp_size, pad_to)

    def rows(parts, fill=0):
        return layout.shard(torch.cat(list(parts)), cp_rank, fill=fill)

    taps = Taps(
        tuple(rows(d.taps[p] for d in docs) for p in range(3)),
        rows(d.embeddings for d in docs),
        rows(d.final for d in docs),
    )
    ids, zeros = rows(d.ids for d in docs), torch.zeros(layout.num_local_rows)
    batch = Batch(layout, cp_rank, ids, layout.positions(cp_rank), rows((d.mask for d in docs), False), zeros, zeros)
    return taps, batch


def pass_coefficients(rows_KS: torch.Tensor, decay: float) -> torch.Tensor:
    weights = decay ** torch.arange(rows_KS.shape[0], dtype=torch.float64)
    return weights / (rows_KS >= 0).sum(1).clamp(min=1) / weights.sum()
