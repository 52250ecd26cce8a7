"""Recompute an engine's proposals and acceptances with the training code.

What a draft learns is the training-time test (`draft.ttt`); what it is judged by is what an
engine does with it. Both must be the same computation: known failure 43 is a draft that is
good in training and accepted nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cospec.data.packing import make_batch, plan
from cospec.draft.eagle3 import Eagle3Draft
from cospec.draft.ttt import unroll
from cospec.policy.attention import PackedContext
from cospec.policy.taps import TapRecorder
from cospec.records import Document, Rollout, SamplingParams
from cospec.rollout.sampling import distribution, policy_logp
from cospec.titan import head_weight


@dataclass(frozen=True)
class Chain:
    """One verification: prefix (>= 2 tokens), the tokens proposed after it, how many the engine kept (None: not
    known, or the response could have ended there)."""

    prefix: list[int]
    proposed: list[int]
    kept: int | None


@dataclass(frozen=True)
class Parity:
    """What replaying found.

    chains, proposals: how many were compared. proposals_differ: proposals that the training
    code would not make (greedy only), least_margin: the smallest gap of logits among those
    that agree with it, for judging differences. kept_differ: chains of which it would keep
    another number (greedy only). tested, accepted, expected, z: proposals that were tried,
    those accepted, the sum of their acceptance probabilities, and the difference in standard
    deviations (sampled only).
    """

    chains: int = 0
    proposals: int = 0
    proposals_differ: int = 0
    least_margin: float = math.inf
    kept_differ: int = 0
    tested: int = 0
    accepted: int = 0
    expected: float = 0.0
    z: float = 0.0

    @property
    def agrees(self) -> bool:
        return self.chains > 0 and not self.proposals_differ and not self.kept_differ and abs(self.z) < 4.5


def chains_of(rollouts: Sequence[Rollout], proposals: Sequence[Sequence[tuple[int, list[int]]]]) -> list[Chain]:
    """The verifications of an engine's `generate` and its `proposals`, in order.

    Which chains have a known `kept` depends on where they start, not on their outcome:
    leaving out just those that reached the end would leave out the longest.
    """
    chains = []
    for rollout, recorded in zip(rollouts, proposals, strict=True):
        tokens = [*rollout.prompt_ids, *rollout.token_ids]
        ends = [position for position, _ in recorded[1:]] + [len(tokens)]
        longest = max((len(proposed) for _, proposed in recorded), default=0)
        for i, (position, proposed) in enumerate(recorded):
            inside = position + longest < len(tokens)
            stopped = i + 1 == len(recorded) and rollout.finish_reason == "stop"
            kept = ends[i] - position - 1 if inside and not stopped else None
            if proposed and position >= 2:
                chains.append(Chain(tokens[:position], list(proposed), kept))
    return chains


@torch.no_grad()
def replay(
    policy: nn.Module,
    draft: Eagle3Draft,
    chains: Sequence[Chain],
    params: SamplingParams,
    *,
    draft_filters: bool = True,
    row_tokens: int = 4096,
) -> Parity:
    """Compare recorded chains with what the training code computes from the same weights.

    Greedy (temperature 0): every proposal and every count of kept tokens must be equal. With
    sampling the recorded proposals are given, and the number of accepted ones is compared
    with its expectation.

    draft_filters: whether the engine's draft samples under top-k and top-p (the native
    engine's does, vLLM's only follows the temperature).
    """
    found = Parity()
    variance = 0.0
    draft_params = params if draft_filters else replace(params, top_k=0, top_p=1.0)
    for chain, draft_KU, policy_QV in _scores(policy, draft, chains, row_tokens):
        ids, proposed = draft.policy_ids, torch.tensor(chain.proposed)
        found = replace(found, chains=found.chains + 1, proposals=found.proposals + len(proposed))
        if params.temperature == 0:
            best = draft_KU.topk(2, -1)
            own = best.indices[:, 0] if ids is None else ids[best.indices[:, 0]]
            same = own == proposed
            margins = (best.values[:, 0] - best.values[:, 1])[same].tolist()
            kept = int((policy_QV[:-1].argmax(-1) == proposed).cumprod(0).sum())
            found = replace(
                found,
                proposals_differ=found.proposals_differ + int((~same).sum()),
                least_margin=min([found.least_margin, *margins]),
                kept_differ=found.kept_differ + (chain.kept is not None and kept != chain.kept),
            )
        elif chain.kept is not None:
            p_KV = distribution(policy_logp(policy_QV[:-1], params.temperature), params).double()
            q_KU = distribution(policy_logp(draft_KU, params.temperature), draft_params).double()
            q_KV = q_KU if ids is None else torch.zeros_like(p_KV).index_copy_(1, ids, q_KU)
            row = torch.arange(len(proposed))
            ratio = (p_KV[row, proposed] / q_KV[row, proposed]).clamp(max=1)[: chain.kept + 1]
            found = replace(
                found,
                tested=found.tested + len(ratio),
                accepted=found.accepted + chain.kept,
                expected=found.expected + float(ratio.sum()),
            )
            variance += float((ratio * (1 - ratio)).sum())
    if found.tested:
        found = replace(found, z=(found.accepted - found.expected) / max(math.sqrt(variance), 1e-9))
    return found


def _scores(
    policy: nn.Module, draft: Eagle3Draft, chains: Sequence[Chain], row_tokens: int
) -> Iterator[tuple[Chain, Tensor, Tensor]]:
    """For each chain of k: draft logits [k, U] and policy logits [k + 1, V] at its positions.

    A chain is a document of its own, prefix and proposals: in training, pass j of row t reads
    the token t+j+1 of the document, in serving the draft's own proposal. Row `position - 2`
    of this document therefore is the engine's chain.
    """
    recorder = TapRecorder(policy, draft.config.tap_layers)
    head_VD = head_weight(policy)
    longest = max((len(c.proposed) for c in chains), default=1)
    documents = []
    for chain in chains:
        ids = torch.tensor([*chain.prefix, *chain.proposed])
        documents.append(Document(ids, torch.ones(len(ids), dtype=torch.bool)))
    for row in plan([len(d.input_ids) for d in documents], row_tokens):
        batch = make_batch([documents[i] for i in row])
        with recorder.recording() as recording:
            hidden = policy(
                batch.input_ids[None], positions=batch.positions[None], attention_masks=PackedContext(batch.layout)
            )
        states_KTD = torch.stack(unroll(draft, recording.take(hidden), batch, num_passes=longest))
        for i, start in zip(row, batch.layout.doc_ends[:-1], strict=False):
            chain = chains[i]
            k, at = len(chain.proposed), start + len(chain.prefix)
            draft_KU = draft.lm_head(states_KTD[:k, at - 2])
            yield chain, draft_KU, F.linear(hidden[0, at - 1 : at + k], head_VD)
