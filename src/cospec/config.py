"""Every setting of a run. Each field says its unit and why its default is what it is.

Recipes return a `RunConfig`; command-line flags override single fields
(`--draft.num_passes 5`). train/check.py says which values cannot work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal


class ConfigError(ValueError):
    """A setting that cannot work: names the field, its value and the rule."""

    def __init__(self, name: str, value: object, rule: str):
        super().__init__(f"{name}={value!r}: {rule}")


def require(ok: bool, name: str, value: object, rule: str) -> None:
    if not ok:
        raise ConfigError(name, value, rule)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding, with the names of the Hugging Face configs."""

    theta: float = 10000.0
    """Base of the frequencies."""
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    """Kind of position scaling, as `rope_type` there."""
    factor: float = 1.0
    """Position scale of `linear`, `llama3` and `yarn`."""
    low_freq_factor: float = 1.0
    """`llama3`: below, and above the next, a frequency is scaled and left alone."""
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    """Positions the policy was first trained on."""
    beta_fast: float = 32.0
    """`yarn`: turns at which the ramp between kept and scaled dims begins, and ends (next)."""
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """`yarn`: multiplies cos and sin; None means 0.1 ln(factor) + 1."""
    truncate: bool = True
    """`yarn`: round the correction range to whole dims."""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The policy. Exactly one source is used: `hf_path`, else `flavor`, else the sizes."""

    hf_path: str | None = None
    """Folder with config.json and *.safetensors."""
    flavor: str | None = None
    """A torchtitan spec by name, for example "qwen3/0.6B" or "llama3/debugmodel"."""
    model_type: Literal["qwen3", "qwen3_moe", "llama"] = "qwen3"
    """Architecture of a policy made from the sizes below."""
    vocab_size: int = 256
    """Tokens; RL takes the task's."""
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 12
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    """Divides num_attention_heads."""
    head_dim: int = 32
    max_position_embeddings: int = 4096
    """Longest sequence, in tokens."""
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    """One table for embeddings and head; not with pipeline stages."""
    num_experts: int = 8
    """Mixture only."""
    num_experts_per_tok: int = 2
    """Mixture only."""
    moe_intermediate_size: int = 128
    """Mixture only: of each expert."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """Shape and flags of an EAGLE-3 draft: everything its checkpoint needs to say."""

    hidden_size: int
    target_hidden_size: int
    """Of each tapped layer of the policy."""
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    """The policy's."""
    draft_vocab_size: int
    """Tokens that the draft can propose."""
    tap_layers: tuple[int, ...]
    """0-based decoder layers whose outputs are read, ascending (formats differ: see export)."""
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096
    rope: RopeConfig = field(default_factory=RopeConfig)
    norm_before_residual: bool = False
    """The residual is the normed hidden state instead of the raw one."""
    norm_before_fc: bool = False
    """One RMSNorm over the concatenated taps before `fc`."""
    fc_norm: bool = False
    """One RMSNorm per tap before `fc` (EAGLE-3.1)."""
    norm_output: bool = False
    """The post-norm state, not the raw one, feeds the next pass."""
    qk_norm: bool = False
    """Qwen3-style norms on query and key heads."""
    attention_bias: bool = False
    """Biases on the projections of attention."""
    sliding_window: int | None = None
    """Keys a query sees, itself included; None means all."""
    own_embedding: bool = False
    """The draft carries `embed_tokens`; otherwise it shares the policy's table."""


def default_tap_layers(num_layers: int) -> tuple[int, ...]:
    """Layers 1, n//2 - 1 and n - 4, as public drafts use; for few layers the nearest distinct ones."""
    require(num_layers >= 1, "policy.num_hidden_layers", num_layers, "must be >= 1")
    count = min(3, num_layers)
    chosen: list[int] = []
    for i, wanted in enumerate((1, num_layers // 2 - 1, num_layers - 4)[:count]):
        low = chosen[-1] + 1 if chosen else 0
        high = num_layers - (count - i)  # leaves room for those that follow
        chosen.append(min(max(wanted, low), high))
    return tuple(chosen)


def check_tap_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Raises ConfigError unless layers are 1 or more distinct, ascending ids in 0..num_layers-1."""
    layers = tuple(int(i) for i in layers)
    ascending = all(a < b for a, b in zip(layers, layers[1:], strict=False))
    in_range = all(0 <= i < num_layers for i in layers)
    rule = f"must be distinct and ascending 0-based layers in 0..{num_layers - 1}"
    require(bool(layers) and ascending and in_range, "draft.tap_layers", layers, rule)
    return layers


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """The draft and its training."""

    enabled: bool = True
    """False trains the policy alone, and rolls out without speculation."""
    init: str | None = None
    """Folder of an EAGLE-3 checkpoint to start from; its shape and flags win."""
    tap_layers: tuple[int, ...] | None = None
    """None: layers 1, n//2 - 1 and n - 4, the three that public drafts read."""
    num_passes: int = 4
    """K of the training-time test, 1..8. Passes beyond the rollout's k cost time only."""
    pass_decay: float = 0.8
    """Weight of pass k is pass_decay**k: later tokens are drafted less often."""
    draft_vocab_size: int | None = None
    """None: that of `vocab_path`, else the policy's whole vocabulary."""
    vocab_path: str | None = None
    """File of scripts/build_draft_vocab.py; with `init` the draft brings its own."""
    hidden_size: int | None = None
    """None: the policy's (needed when its embeddings are shared)."""
    intermediate_size: int | None = None
    """None: the policy's; the head sizes below likewise."""
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    norm_before_residual: bool = False
    """This flag and the next five: see `Eagle3Config`."""
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    share: float = 0.25
    """Share of a step's rollouts the draft trains on; a quarter proved as good as all."""
    renormalise_teacher: bool = False
    """Rescale the teacher inside the draft vocabulary to mass 1."""
    drop_labels_outside_vocab: bool = False
    """Do not count rows whose label the draft cannot propose."""
    loss_chunk: int = 256
    """Teacher rows of a loss chunk, at most: fewer where their logits would take too much memory."""
    checkpoint_passes: bool = False
    """Recompute each pass in backward: less memory, about a third more time."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """One optimizer; policy and draft each have their own."""

    name: Literal["adamw", "muon"] = "adamw"
    """muon: torch's Muon for matrices, AdamW for the rest (embeddings, heads and stacked experts too)."""
    lr: float = 4e-4
    """Learning rate of AdamW."""
    muon_lr: float = 7e-3
    """Learning rate of the Muon matrices."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW."""
    eps: float = 1e-8
    """Of AdamW."""
    weight_decay: float = 0.0
    """Decoupled; of both kinds."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 is not allowed, use a large number to switch it off."""
    warmup_steps: int = 0
    """Linear warm-up, in steps."""
    decay_steps: int = 0
    """Linear decay to `min_lr_ratio` over the last this many steps; 0 is none."""
    min_lr_ratio: float = 0.1
    """Learning rate at the end of the decay, over the full one."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """DeviceMesh axes; their product, and `serve`, is the number of ranks."""

    pp: int = 1
    """Pipeline stages (groups of layers on different ranks); see PipelineConfig."""
    dp: int = 1
    """Ranks that share out the rows of a step; parameters are sharded over dp x cp (FSDP2)."""
    cp: int = 1
    """Ranks that share out each row, see docs/context_parallel.md."""
    ep: int = 1
    """Ranks that share the experts of a mixture, each with a part of them; tokens travel to their
    experts. Not a further axis but another view of dp x cp: it must divide dp * cp, and the
    number of experts. The rest of the policy is sharded over dp x cp as without it."""
    serve: int = 0
    """Ranks beyond those that train, the last ones of the world: they only generate. They need no
    memory for training, and the others none for an engine; each waits while the other works."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How a policy that is split over `mesh.pp` runs, and how its taps travel to the draft."""

    schedule: Literal["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"] = (
        "1F1B"
    )
    """torch's pipeline schedules by name; the last four put two stages on every rank."""
    microbatches: int = 4
    """Rows that one run of the schedule takes; a step has a multiple of it (empty rows fill up)."""
    tap_slots: int | None = None
    """Microbatches whose taps can lie on the draft's rank at once, for each sending stage; None
    is the least that cannot deadlock, computed from the schedule."""
    tap_dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """dtype in which taps travel; auto is the compute dtype (bfloat16 on CUDA)."""
    tap_timeout_s: float = 60.0
    """Seconds to wait for a tap, or for room to send one, before the run ends with an error."""
    defer_draft: bool = False
    """Do the draft's work after the schedule has run instead of beside it: the pipeline never
    waits for the draft, the taps of all microbatches are in memory at once."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    kernel: Literal["auto", "cpu_flash", "cuda_flash", "math"] = "auto"
    """auto picks from device and dtype."""
    cp_mode: Literal["ring", "gather"] = "ring"
    """ring: one shard in flight; gather: less traffic over K passes, more memory."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    engine: Literal["native", "vllm"] = "native"
    """vllm: the real one, beside each rank that serves or, on a single CPU rank, in it; see docs/vllm.md."""
    engine_ranks: tuple[int, ...] | None = None
    """Ranks that hold an engine and generate; None: every rank, which is fastest, or with
    `mesh.serve` those that serve. The others keep no whole copy of the weights, and wait."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the native engine's copy of the weights and its cache. bfloat16 halves both; its
    log-probabilities differ from the trainer's, which `rl.importance_cap` corrects."""
    num_draft_tokens: int = 5
    """k, the chain a draft proposes before a verification, 1..16; 0 switches speculation off."""
    max_new_tokens: int = 96
    """Longest response, in tokens."""
    temperature: float = 1.0
    """Above 0; the policy's loss uses the same."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    """1 is off."""


@dataclass(frozen=True, kw_only=True)
class RLConfig:
    task: str = "count_bits"
    """`count_bits`, or give `run_rl` one of your own."""
    prompts_per_step: int = 8
    samples_per_prompt: int = 8
    """Size of a group, whose mean reward is the baseline; at least 2."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    """Asymmetric clip (DAPO): the upper side is wider so that rare tokens can grow."""
    importance_cap: float = 2.0
    """Truncated importance weight between rollout and trainer probabilities."""
    kl_coef: float = 0.0
    """Weight of the k3 KL estimate to the rollout policy."""
    length_penalty: float = 0.15
    """Taken off the reward at `max_new_tokens`, linear below; without it RL stalled in trials."""
    updates_per_batch: int = 1
    """Optimizer steps on one batch of rollouts; above 1 the clip becomes active."""


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """Supervised phase before RL, on the task's demonstrations."""

    policy_steps: int = 260
    """0 leaves the policy as it is."""
    batch_documents: int = 16
    """Demonstrations of a step."""
    draft_steps: int = 200
    """Draft-only steps after it, on the frozen policy's features."""
    draft_batch_documents: int = 16
    policy_optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(name="muon", lr=2e-3, muon_lr=2e-2, warmup_steps=10, decay_steps=100)
    )
    draft_optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(name="muon", lr=2e-3, muon_lr=2e-2, decay_steps=60)
    )


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    prompts: int = 64
    """Held-out prompts."""
    every: int = 0
    """Steps between evaluations; 0 evaluates at the start and the end only."""
    static_control: bool = True
    """Also roll out with a frozen copy of the starting draft: is co-training worth it here?"""
    speed_batch: int = 16
    """Prompts of the final wall-clock comparison with and without speculation."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Documents of supervised co-training."""

    path: str | None = None
    """jsonl with `input_ids` and optional `loss_mask`, or a folder of `datasets.save_to_disk` with these
    columns; None makes small synthetic documents."""
    synthetic_documents: int = 256
    """How many."""


@dataclass(frozen=True, kw_only=True)
class OfflineConfig:
    """Draft training on saved features."""

    features: str | None = None
    """Folder: a store of scripts/extract_features.py, or one of SpecForge or speculators."""
    validation_share: float = 0.05
    """Share of the documents held out, by a hash of their tokens; 0 evaluates nothing."""
    max_bad_share: float = 0.05
    """Larger share of samples that had to be skipped ends the run with their names."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: int = 0
    """Steps between checkpoints; 0 keeps none."""
    keep: int = 2
    """Newest good checkpoints to keep."""
    resume: bool = False
    """Continue from the newest good checkpoint in `output_dir`; without one, start anew."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    steps: int = 50
    """Optimizer steps, without the warm start."""
    batch_documents: int = 16
    """Documents of one optimizer step over all ranks (supervised training)."""
    row_tokens: int = 1024
    """Capacity of a packed row (one microbatch), in tokens; a document must fit."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is CUDA where there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Compute dtype; auto is bfloat16 on CUDA and float32 on CPU. Parameters stay float32."""
    deterministic: bool = False
    """Deterministic kernels on CUDA, so that bit-equal claims hold there too."""
    logit_chunk: int = 1024
    """Rows of logits that the policy loss holds at once."""
    activation_checkpoint: bool = False
    """Recompute every block of the policy in backward: memory for about a third more time."""
    comm_timeout_s: float = 300.0
    """Seconds a collective may wait for a peer before the run ends with an error."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run."""

    output_dir: str = "runs/latest"
    """Folder of the run: must hold no other one."""
    seed: int = 0
    """Fixes initial weights, data order and samples."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    policy_optim: OptimConfig = field(default_factory=OptimConfig)
    draft_optim: OptimConfig = field(default_factory=lambda: OptimConfig(name="muon", lr=7e-4))
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    data: DataConfig = field(default_factory=DataConfig)
    offline: OfflineConfig = field(default_factory=OfflineConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    wandb: bool = False
    """Log to Weights & Biases; offline (no network call) unless a key is set."""


def check_expert_ranks(mesh: MeshConfig) -> None:
    """Raises ConfigError unless mesh.ep divides the ranks of a pipeline stage."""
    ranks = mesh.dp * mesh.cp
    rule = f"must be >= 1 and divide mesh.dp * mesh.cp = {ranks}: those ranks share the experts"
    require(mesh.ep >= 1 and ranks % mesh.ep == 0, "mesh.ep", mesh.ep, rule)


def check_expert_parts(ep: int, num_experts: int) -> None:
    """Raises ConfigError unless `ep` ranks can share out the experts of a policy; a dense one has 0."""
    require(ep == 1 or num_experts > 0, "mesh.ep", ep, "must be 1: the policy is dense, it has no experts to share out")
    rule = f"must divide the policy's {num_experts} experts: each rank holds as many"
    require(num_experts % ep == 0, "mesh.ep", ep, rule)
