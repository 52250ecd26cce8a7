"""Rollouts for training: prompts spread over ranks, rewards, advantages, documents, refit."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cospec.config import ConfigError, Eagle3Config, RunConfig
from cospec.draft.eagle3 import Eagle3Draft
from cospec.export.eagle3 import save_draft
from cospec.mesh import Mesh
from cospec.policy.stream import IncomingStream, WeightStream
from cospec.policy.weights import save_hf
from cospec.records import Document, Rollout, SamplingParams
from cospec.rl.grpo import group_advantages, length_penalty
from cospec.rl.tasks import Prompt, Task
from cospec.rollout.engine import Elsewhere, Engine, State, acceptance_length, whole_state
from cospec.rollout.native import NativeEngine
from cospec.titan import DecoderConfig, build_config, build_model
from cospec.train.draft_side import DraftSide
from cospec.train.serving import Open, Remote
from cospec.train.step import Learner


@dataclass(frozen=True)
class ScoredRollouts:
    """Rollouts of one step with their rewards, in sample order, the same on every rank."""

    rollouts: list[Rollout]
    rewards: list[float]

    @property
    def reward_mean(self) -> float:
        return sum(self.rewards) / len(self.rewards)

    @property
    def tokens(self) -> int:
        return sum(len(r.token_ids) for r in self.rollouts)


def check_engine(config: RunConfig) -> None:
    """Raises ConfigError for an engine that cannot run here, before any work is done."""
    if config.rollout.engine != "vllm":
        return
    from cospec.rollout.vllm import import_vllm

    try:
        import_vllm()
    except ImportError as error:
        raise ConfigError("rollout.engine", "vllm", str(error)) from error


def build_engine(config: RunConfig, learner: Learner, *, max_prompt: int) -> Engine:
    """A rollout engine with weights of its own on this rank's device, not yet refitted.

    With `mesh.serve` it stands for those of the ranks that serve, else on ranks outside
    `rollout.engine_ranks` for the engines of the others.
    Raises EngineError where vLLM is asked for and samples from a wrong distribution.
    """
    link, draft = learner.mesh.link, None if learner.draft is None else learner.draft.model.config
    if link is not None:
        states = _streams(learner) if config.rollout.engine == "vllm" else None
        return Remote(link, draft, max_prompt=max_prompt, states=states)
    serves = learner.mesh.world_rank in serving_ranks(config, learner.mesh)
    spec = learner.runner.parts[0].config
    if config.rollout.engine == "vllm":
        policy, trained = _streams(learner)
        if not serves:
            elsewhere = Elsewhere()
            elsewhere.refit(policy, trained, 0)  # the others start with weights, which all ranks gather
            return elsewhere
        state, draft_state = whole_state(policy), None if trained is None else whole_state(trained)
        where = {"device": learner.mesh.device, "alone": learner.mesh.world_size == 1}
        return _vllm_engine(config, spec, state, draft, draft_state, max_prompt=max_prompt, **where)
    if not serves:
        return Elsewhere()
    return _native_engine(config, spec, draft, learner.mesh.device, max_prompt=max_prompt)


def build_served_engine(
    config: RunConfig, device: torch.device, call: Open, policy: IncomingStream | None, draft: IncomingStream | None
) -> Engine:
    """The engine of a rank that serves only; see `serving.serve`."""
    spec = build_config(config.policy)
    if policy is not None:
        state = whole_state(policy)
        draft_state = None if draft is None else whole_state(draft)
        where = {"device": device, "alone": False}
        return _vllm_engine(config, spec, state, call.draft, draft_state, max_prompt=call.max_prompt, **where)
    return _native_engine(config, spec, call.draft, device, max_prompt=call.max_prompt)


def _native_engine(
    config: RunConfig, spec: DecoderConfig, draft: Eagle3Config | None, device: torch.device, *, max_prompt: int
) -> Engine:
    return NativeEngine(
        build_model(spec, device=device, dtype=getattr(torch, config.rollout.dtype)),
        None if draft is None else Eagle3Draft(draft).to(device),
        num_draft_tokens=config.rollout.num_draft_tokens if draft is not None else 0,
        max_len=max_prompt + config.rollout.max_new_tokens,
        max_batch=max(1, config.rl.prompts_per_step * config.rl.samples_per_prompt),
    )


def _vllm_engine(
    config: RunConfig,
    spec: DecoderConfig,
    policy_state: dict[str, Tensor],
    draft: Eagle3Config | None,
    draft_state: dict[str, Tensor] | None,
    *,
    max_prompt: int,
    device: torch.device,
    alone: bool,
) -> Engine:
    """vLLM in this process where it is `alone` on a CPU, else in one of its own.

    It starts from folders that are gone afterwards: refits come from memory.
    """
    from cospec.rollout.vllm import VLLMEngine
    from cospec.rollout.vllm_process import VLLMProcess

    check_engine(config)
    build = VLLMEngine if alone and device.type == "cpu" else partial(VLLMProcess, device=device)
    with tempfile.TemporaryDirectory(prefix="cospec-vllm-") as folder:
        save_hf(spec, policy_state, f"{folder}/policy")
        if draft is not None:
            save_draft(Eagle3Draft(draft), f"{folder}/draft", family="vllm", state=draft_state)
        return build(
            f"{folder}/policy",
            spec,
            None if draft is None else f"{folder}/draft",
            draft,
            num_draft_tokens=config.rollout.num_draft_tokens,
            max_len=max_prompt + config.rollout.max_new_tokens,
            max_batch=max(1, config.rl.prompts_per_step * config.rl.samples_per_prompt),
            dtype=config.rollout.dtype,
        )


def serving_ranks(config: RunConfig, mesh: Mesh) -> Sequence[int]:
    """World ranks that hold an engine, in the order in which prompts go to them."""
    if config.rollout.engine_ranks is not None:
        return config.rollout.engine_ranks
    return range(mesh.world_size) if mesh.link is None else mesh.link.serving


def static_draft_ranks(config: RunConfig, mesh: Mesh) -> Sequence[int]:
    """Ranks that keep the static control's weights: those whose engines take it, or the one that sends it."""
    return serving_ranks(config, mesh) if mesh.link is None else (0,)


def refit(engine: Engine, learner: Learner, version: int, *, draft_from: DraftSide | nn.Module | None = None) -> None:
    """Hand the trained weights to the engines, tensor by tensor. Collective.

    draft_from: stands in for the trained draft; a module is whole on `static_draft_ranks`.
    """
    policy_state, trained = _streams(learner, with_draft=draft_from is None)
    draft_state: State | None = trained
    if isinstance(draft_from, DraftSide):
        draft_state = WeightStream(draft_from.parts, learner.mesh, serving_ranks(learner.config, learner.mesh))
    elif draft_from is not None:
        # Where engines are on other ranks, only the first rank's module has weights: it leads its stage, and sends.
        draft_state = WeightStream([draft_from], learner.mesh, ()) if learner.mesh.link else draft_from.state_dict()
    engine.refit(policy_state, draft_state, version)


def _streams(learner: Learner, *, with_draft: bool = True) -> tuple[WeightStream, WeightStream | None]:
    """The weights of policy and draft for the ranks that serve. Collective."""
    serving = serving_ranks(learner.config, learner.mesh)
    policy = WeightStream(learner.runner.parts, learner.mesh, serving)
    if learner.draft is None or not with_draft:
        return policy, None
    return policy, WeightStream(learner.draft.parts, learner.mesh, serving)


def sampling(config: RunConfig, task: Task) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        top_k=config.rollout.top_k,
        top_p=config.rollout.top_p,
        stop_token_ids=(task.stop_token_id,),
        seed=config.seed,
    )


def roll_out(
    engine: Engine,
    task: Task,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    mesh: Mesh,
    *,
    first_sample: int,
    serving: Sequence[int] | None = None,
) -> ScoredRollouts:
    """One rollout per prompt, on every rank that trains, computed by those that serve (None: all) in turns.

    The random numbers of a sample depend on its index only (`first_sample` + position), so
    the tokens do not depend on how many ranks share the work.
    """
    if isinstance(engine, Remote):
        ids = [first_sample + i for i in range(len(prompts))]
        rollouts = engine.generate([prompt.token_ids for prompt in prompts], params, sample_ids=ids)
        return _score(task, prompts, rollouts, mesh)
    servers = range(mesh.world_size) if serving is None else serving
    first = servers.index(mesh.world_rank) if mesh.world_rank in servers else len(prompts)
    mine = range(first, len(prompts), len(servers))
    rollouts = (
        engine.generate([prompts[i].token_ids for i in mine], params, sample_ids=[first_sample + i for i in mine])
        if len(mine)
        else []
    )
    if mesh.world_size > 1:
        shares: list = [None] * mesh.world_size
        dist.all_gather_object(shares, rollouts)
        rollouts = [shares[servers[i % len(servers)]][i // len(servers)] for i in range(len(prompts))]
    return _score(task, prompts, rollouts, mesh)


def _score(task: Task, prompts: Sequence[Prompt], rollouts: list[Rollout], mesh: Mesh) -> ScoredRollouts:
    """The first rank scores for all: a reward that hangs on chance or time must not differ between ranks."""
    rewards: list[float] = []
    if mesh.world_rank == 0:
        rewards = [task.reward(prompt, rollout.token_ids) for prompt, rollout in zip(prompts, rollouts, strict=True)]
    if mesh.world_size > 1:
        box = [rewards]
        dist.broadcast_object_list(box, src=0)
        rewards = box[0]
    return ScoredRollouts(rollouts, rewards)


def to_documents(scored: ScoredRollouts, config: RunConfig) -> list[Document]:
    """Rollouts as training documents: group-normalised advantages on the response tokens."""
    rl = config.rl
    lengths = [len(r.token_ids) for r in scored.rollouts]
    rewards = length_penalty(scored.rewards, lengths, rl.length_penalty, config.rollout.max_new_tokens)
    advantages = group_advantages(rewards, rl.samples_per_prompt)
    documents = []
    for rollout, advantage in zip(scored.rollouts, advantages, strict=True):
        prompt = len(rollout.prompt_ids)
        ids = torch.tensor([*rollout.prompt_ids, *rollout.token_ids], dtype=torch.int64)
        mask = torch.zeros(ids.numel(), dtype=torch.bool)
        mask[prompt:] = True
        logp = torch.zeros(ids.numel())
        logp[prompt:] = torch.tensor(rollout.logp)
        documents.append(Document(ids, mask, float(advantage), logp))
    return documents


def rollout_row(scored: ScoredRollouts, seconds: float) -> dict:
    """The fields of a metrics row that the rollouts know."""
    return {
        "reward_mean": scored.reward_mean,
        "rollout_acceptance_length": acceptance_length(scored.rollouts),
        "rollout_tokens_per_s": scored.tokens / seconds,
        "rollout_s": seconds,
        "policy_version": scored.rollouts[0].policy_version,
    }
