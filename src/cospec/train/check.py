"""Which settings cannot work, as far as can be seen without doing any work."""

from __future__ import annotations

import math

from cospec.config import OptimConfig, RunConfig, check_expert_parts, check_expert_ranks, require


def check(config: RunConfig) -> None:
    """Raise ConfigError for every value that can be seen to be wrong without doing work."""
    c = config
    require(c.output_dir != "", "output_dir", c.output_dir, "must name a folder")
    require(-(2**63) <= c.seed < 2**63, "seed", c.seed, "must be a signed integer of 64 bits")
    _at_least(1, "mesh", c.mesh, "pp", "dp", "cp", "ep")
    _at_least(0, "mesh", c.mesh, "serve")
    if c.mesh.pp > 1:
        _check_pipeline(c)
    p = c.policy
    check_expert_ranks(c.mesh)
    if p.hf_path is None and p.flavor is None:
        check_expert_parts(c.mesh.ep, p.num_experts if p.model_type == "qwen3_moe" else 0)
    if p.hf_path is None and p.flavor is None:
        _at_least(1, "policy", p, "vocab_size", "hidden_size", "num_hidden_layers")
        _at_least(1, "policy", p, "num_attention_heads", "num_key_value_heads")
        scaled = p.rope.scaling != "none" or p.rope.factor == 1
        require(scaled, "policy.rope.factor", p.rope.factor, "has no effect with policy.rope.scaling none")
        require(
            p.num_attention_heads % p.num_key_value_heads == 0,
            "policy.num_attention_heads",
            p.num_attention_heads,
            f"must be a multiple of policy.num_key_value_heads={p.num_key_value_heads}",
        )
    d = c.draft
    require(1 <= d.num_passes <= 8, "draft.num_passes", d.num_passes, "must be 1..8")
    require(0 < d.pass_decay <= 1, "draft.pass_decay", d.pass_decay, "must be in (0, 1]")
    require(0 < d.share <= 1, "draft.share", d.share, "must be in (0, 1]")
    _at_least(1, "draft", d, "loss_chunk")
    require(
        0 <= c.rollout.num_draft_tokens <= 16, "rollout.num_draft_tokens", c.rollout.num_draft_tokens, "must be 0..16"
    )
    _check_engine_ranks(c)
    _at_least(1, "rollout", c.rollout, "max_new_tokens")
    temperature, rule = c.rollout.temperature, "must be > 0 and finite: RL needs samples"
    require(0 < temperature < math.inf, "rollout.temperature", temperature, rule)
    require(c.rollout.top_k >= 0, "rollout.top_k", c.rollout.top_k, "must be >= 0 (0 = off)")
    require(0 < c.rollout.top_p <= 1, "rollout.top_p", c.rollout.top_p, "must be in (0, 1] (1 = off)")
    _at_least(1, "rl", c.rl, "prompts_per_step", "updates_per_batch")
    require(c.rl.samples_per_prompt >= 2, "rl.samples_per_prompt", c.rl.samples_per_prompt, "must be >= 2: a group")
    require(c.rl.importance_cap > 0, "rl.importance_cap", c.rl.importance_cap, "must be > 0: 0 would undo every loss")
    for name in ("clip_low", "clip_high", "kl_coef", "length_penalty"):
        require(0 <= getattr(c.rl, name) < math.inf, f"rl.{name}", getattr(c.rl, name), "must be >= 0 and finite")
    _at_least(1, "train", c.train, "steps", "batch_documents", "row_tokens", "logit_chunk")
    require(c.train.comm_timeout_s > 0, "train.comm_timeout_s", c.train.comm_timeout_s, "must be > 0 seconds")
    _at_least(0, "warm_start", c.warm_start, "policy_steps", "draft_steps")
    o = c.offline
    require(0 <= o.validation_share < 1, "offline.validation_share", o.validation_share, "must be in [0, 1)")
    require(0 <= o.max_bad_share <= 1, "offline.max_bad_share", o.max_bad_share, "must be in 0..1")
    _at_least(1, "warm_start", c.warm_start, "batch_documents", "draft_batch_documents")
    _at_least(1, "eval", c.eval, "prompts", "speed_batch")
    require(c.eval.every >= 0, "eval.every", c.eval.every, "must be >= 0 (0 = at the start and the end only)")
    require(c.checkpoint.every >= 0, "checkpoint.every", c.checkpoint.every, "must be >= 0 (0 = never)")
    _at_least(1, "checkpoint", c.checkpoint, "keep")
    _at_least(1, "data", c.data, "synthetic_documents")
    for name, optim in (
        ("policy_optim", c.policy_optim),
        ("draft_optim", c.draft_optim),
        ("warm_start.policy_optim", c.warm_start.policy_optim),
        ("warm_start.draft_optim", c.warm_start.draft_optim),
    ):
        _check_optim(name, optim)


def _at_least(least: int, section: str, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(value >= least, f"{section}.{name}", value, f"must be >= {least}")


def _check_optim(name: str, optim: OptimConfig) -> None:
    for field_name in ("lr", "muon_lr", "weight_decay", "min_lr_ratio"):
        value = getattr(optim, field_name)
        require(0 <= value <= 1e30, f"{name}.{field_name}", value, "must be >= 0 and at most 1e30: float32 overflows")
    require(0 < optim.eps < math.inf, f"{name}.eps", optim.eps, "must be > 0 and finite: a gradient may be 0")
    require(optim.clip_norm > 0, f"{name}.clip_norm", optim.clip_norm, "must be > 0 (a large number switches it off)")
    require(all(0 <= b < 1 for b in optim.betas), f"{name}.betas", optim.betas, "both must be in [0, 1)")
    _at_least(0, name, optim, "warmup_steps", "decay_steps")


def _check_engine_ranks(c: RunConfig) -> None:
    serving, ranks = c.rollout.engine_ranks, c.mesh.pp * c.mesh.dp * c.mesh.cp
    if serving is None:
        return
    if c.mesh.serve:
        own = range(ranks, ranks + c.mesh.serve)
        rule = f"must be None or all of {', '.join(map(str, own))}: with mesh.serve={c.mesh.serve} those ranks serve"
        for rank in serving:
            if 0 <= rank < ranks:
                pp, rest = divmod(rank, c.mesh.dp * c.mesh.cp)
                dp, cp = divmod(rest, c.mesh.cp)
                rule += f" and nothing else does; rank {rank} trains (pp {pp}, dp {dp}, cp {cp})"
                break
        require(sorted(serving) == list(own), "rollout.engine_ranks", serving, rule)
        return
    rule = f"must be one or more different ranks in 0..{ranks - 1}: mesh.pp * mesh.dp * mesh.cp is {ranks}"
    fits = len(serving) > 0 and len(set(serving)) == len(serving) and all(0 <= r < ranks for r in serving)
    require(fits, "rollout.engine_ranks", serving, rule)


def _check_pipeline(c: RunConfig) -> None:
    pipeline, pp = c.pipeline, c.mesh.pp
    least = pp if pipeline.schedule == "1F1B" else 1
    rule = f"must be >= {least}" + (f", the number of stages of 1F1B with mesh.pp={pp}" if least > 1 else "")
    require(pipeline.microbatches >= least, "pipeline.microbatches", pipeline.microbatches, rule)
    rule = "must be >= 1 (None: the least that the schedule allows)"
    require(pipeline.tap_slots is None or pipeline.tap_slots >= 1, "pipeline.tap_slots", pipeline.tap_slots, rule)
    require(pipeline.tap_timeout_s > 0, "pipeline.tap_timeout_s", pipeline.tap_timeout_s, "must be > 0 seconds")
    step = 2 * c.mesh.cp
    rule = f"must be a multiple of 2 * mesh.cp = {step}: the rows of a pipeline are equal"
    require(c.train.row_tokens % step == 0, "train.row_tokens", c.train.row_tokens, rule)
    rule = "must be false with mesh.pp > 1: embeddings and head are on different ranks"
    require(not c.policy.tie_word_embeddings, "policy.tie_word_embeddings", True, rule)
    if c.policy.hf_path is None and c.policy.flavor is None:
        rule = f"must be <= policy.num_hidden_layers={c.policy.num_hidden_layers}: a stage has a layer at least"
        require(pp <= c.policy.num_hidden_layers, "mesh.pp", pp, rule)
