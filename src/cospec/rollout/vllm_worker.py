"""What runs inside vLLM: the repair of its sampler on CPUs, its chains, its log-probabilities.

The functions with `worker` as first argument are called by `LLM.collective_rpc`. vLLM is
imported where it is used, so that this module imports without it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Tensor:
    """Each x[b] as often as request b has draft tokens [num_tokens], `replace_from` replaced.

    cu_num_tokens: int [B], cumulative. What vLLM's function of this name is specified to do.
    """
    if replace_from != replace_to:
        x = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1).long())
    return x.repeat_interleave(counts, output_size=num_tokens)


def repair_sampling(worker: Any) -> list[str]:
    """Replace what the installed vLLM does wrong in verification; returns the names of what was replaced.

    Two faults of its CPU build (vllm#55005): `expand_batch_to_tokens` throws its result away,
    so that temperature, top-k and top-p of a verification are whatever memory held; and a
    step without draft tokens fails in `apply_sampling_constraints`. Each function is tried
    first, on the worker's device, and kept when it is right: the repair ends with the fault.
    """
    import vllm.v1.sample.rejection_sampler as sampler

    repaired, device = [], worker.device
    if not expands_rightly(sampler.expand_batch_to_tokens, device):
        sampler.expand_batch_to_tokens = expand_batch_to_tokens
        repaired.append("expand_batch_to_tokens")
    upstream = sampler.apply_sampling_constraints
    if not _takes_no_tokens(upstream, device):

        def apply_sampling_constraints(logits: Tensor, cu_num_draft_tokens: Tensor, sampling_metadata: Any) -> Tensor:
            return upstream(logits, cu_num_draft_tokens, sampling_metadata) if logits.shape[0] else logits

        sampler.apply_sampling_constraints = apply_sampling_constraints
        repaired.append("apply_sampling_constraints")
    return repaired


def expands_rightly(expand: Callable[..., Tensor], device: torch.device | str = "cpu") -> bool:
    """Whether `expand` does what `expand_batch_to_tokens` is for, on random numbers that no stale memory holds."""
    for trial in range(4):  # every other time with a value to replace
        values = [random.random() + 1 for _ in range(3)]
        counts = (2, 0, 3)
        expected = [0.5 if trial % 2 and b == 0 else values[b] for b in range(3) for _ in range(counts[b])]
        x = torch.tensor([0.0 if trial % 2 else values[0], *values[1:]], device=device)
        got = expand(x, torch.tensor([2, 2, 5], dtype=torch.int32, device=device), 5, 0, 0.5 if trial % 2 else 0)
        if not torch.equal(got.cpu(), torch.tensor(expected)):
            return False
    return True


def _takes_no_tokens(constrain: Callable[..., Tensor], device: torch.device) -> bool:
    one = torch.ones(1, device=device)
    try:
        for top_k, top_p in ((one.int(), None), (None, one / 2), (one.int(), one / 2)):
            metadata = SimpleNamespace(all_greedy=False, temperature=one, top_k=top_k, top_p=top_p)
            constrain(torch.empty(0, 4, device=device), (one - one).int(), metadata)
        return True
    except Exception:  # whatever it is, it would end a rollout
        return False


def record_logprobs_at(worker: Any, temperature: float) -> None:
    """Let vLLM's raw log-probabilities be those of the policy at `temperature` (0 means 1).

    With `logprobs_mode="raw_logprobs"` every path of its samplers takes them from logits
    before temperature, top-k and top-p through this one method.
    """
    sampler = worker.model_runner.sampler
    scale = temperature if temperature > 0 else 1.0
    sampler.compute_logprobs = lambda logits: (logits.float() / scale).log_softmax(-1)


def skip_draft(worker: Any, skip: bool) -> None:
    """Leave the draft out of every step; without this it runs (and proposes nothing) at k = 0 too."""
    runner = worker.model_runner
    if skip:
        runner.propose_draft_token_ids = lambda *_, **__: torch.empty(
            len(runner.input_batch.req_ids), 0, dtype=torch.int64
        )
    else:
        vars(runner).pop("propose_draft_token_ids", None)


def set_chain(scheduler: Any, num_draft_tokens: int | None) -> None:
    """Propose this many tokens in each step; None: as many as the engine was started with."""
    full = num_draft_tokens is None or num_draft_tokens == scheduler.num_spec_tokens
    # vLLM's own table of chain lengths by number of running requests.
    scheduler.dynamic_sd_lookup = None if full else [num_draft_tokens] * (scheduler.max_num_running_reqs + 2)


def record_chains(scheduler: Any, sink: Callable[[str, int, list[int], int], None]) -> None:
    """Tell `sink(request id, position of the chain's first token, chain, tokens generated)` of each verification."""
    update = scheduler.update_from_output

    def update_from_output(scheduled: Any, output: Any) -> Any:
        for request_id, chain in scheduled.scheduled_spec_decode_tokens.items():
            request = scheduler.requests.get(request_id)
            row = output.req_id_to_index.get(request_id)
            if request is not None and row is not None and output.sampled_token_ids:
                sink(request_id, request.num_tokens, list(chain), len(output.sampled_token_ids[row]))
        return update(scheduled, output)

    scheduler.update_from_output = update_from_output
