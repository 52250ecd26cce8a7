"""The self-test of a vLLM engine: do its samples have the policy's distribution?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cospec.records import SamplingParams
from cospec.rollout.probe import ProbeResult, chi_square, rank_uniforms

TOP = 20  # log-probabilities per token that the self-test reads: vLLM's own limit
PROBES = (
    SamplingParams(max_new_tokens=6, temperature=0.6, seed=1),
    SamplingParams(max_new_tokens=6, temperature=1.0, top_k=8, top_p=0.9, seed=2),
)


def self_test(
    run: Callable[..., list[Any]], draws: int, probes: Sequence[SamplingParams], *, vocab_size: int, max_len: int
) -> ProbeResult:
    """Tokens of `draws` short responses for each of `probes` against the policy's own distribution.

    run: (prompts, params, sample ids, limits, logprobs=, prompt_logprobs=) -> vLLM's outputs.
    """
    generator = torch.Generator().manual_seed(3)
    lengths = [n for n in (2, 3, 5, 7) if n < max_len] or [1]
    bases = [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]
    prompts = [bases[i % len(bases)] for i in range(draws)]
    worst, tokens, gap = (1.0, 0.0), 0, 0.0
    top = min(TOP, vocab_size)
    for params in probes:
        limits = [min(params.max_new_tokens, max_len - len(p)) for p in prompts]
        outputs = run(prompts, params, torch.arange(draws), limits, logprobs=top)
        rows, ranks = [], []
        for out in outputs:
            for token, known in zip(out.outputs[0].token_ids, out.outputs[0].logprobs, strict=True):
                best = sorted((x.logprob for x in known.values() if x.rank <= top), reverse=True)
                rows.append((best + [-math.inf] * top)[:top])
                ranks.append(known[token].rank)
        u = torch.rand(len(rows), generator=generator, dtype=torch.float64)
        values, forbidden = rank_uniforms(torch.tensor(rows), torch.tensor(ranks), u, params)
        tested = chi_square(values) if forbidden * 500 <= len(rows) else (0.0, math.inf)
        worst = min(worst, tested)
        tokens += len(rows)
        gap = max(gap, _logp_gap(run, outputs[: len(bases)], params))
    return ProbeResult(tokens, *worst, gap)


def _logp_gap(run: Callable[..., list[Any]], outputs: list[Any], params: SamplingParams) -> float:
    """Mean difference of recorded log-probabilities to those of one plain pass over the same tokens."""
    documents = [[*out.prompt_token_ids, *out.outputs[0].token_ids] for out in outputs]
    ids = torch.zeros(len(outputs), dtype=torch.int64)
    scored = run(documents, params, ids, [1] * len(outputs), prompt_logprobs=0)
    gaps = []
    for out, again in zip(outputs, scored, strict=True):
        pairs = zip(out.outputs[0].token_ids, out.outputs[0].logprobs, strict=True)
        for (token, known), plain in zip(pairs, again.prompt_logprobs[len(out.prompt_token_ids) :], strict=True):
            gaps.append(abs(known[token].logprob - plain[token].logprob))
    return sum(gaps) / len(gaps)
