"""Give a policy a draft: sizes from the policy, weights drawn or loaded, sharded on the mesh."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from cospec.config import (
    ConfigError,
    DraftConfig,
    Eagle3Config,
    check_tap_layers,
    default_tap_layers,
    require,
)
from cospec.draft.eagle3 import Eagle3Draft, init_draft
from cospec.draft.vocab import check_vocab, vocab_maps
from cospec.mesh import Mesh
from cospec.titan import rope_settings


def attach_draft(
    policy: nn.Module,
    draft_cfg: DraftConfig,
    *,
    mesh: Mesh | None = None,
    seed: int = 0,
    vocab: Tensor | None = None,
    checkpoint: Eagle3Draft | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Eagle3Draft:
    """A draft for any torchtitan decoder, ready to train.

    Args:
        policy: read for its `config` only; with pipeline stages any stage will do.
        vocab: int64 [U] ascending policy ids (`draft.vocab.choose_vocab`); needed when
            `draft_cfg.draft_vocab_size` is smaller than the policy's vocabulary.
        checkpoint: the draft read from `draft_cfg.init` (`export.eagle3.load_draft`); its
            shape and flags win over `draft_cfg`. Without one the weights are drawn by
            name and seed.
        dtype: compute dtype of the policy. The draft computes in the dtype of its taps;
            its parameters are float32 (float64 for float64).

    Sharding: with more than one rank on dp x cp one FSDP2 group over all of them; the
    gradients are summed, not averaged, for the loss carries the global count.
    Raises ConfigError naming the setting that does not fit the policy.
    """
    require(
        (draft_cfg.init is None) == (checkpoint is None),
        "draft.init",
        draft_cfg.init,
        "and a loaded checkpoint go together: read the folder with export.eagle3.load_draft",
    )
    require(1 <= draft_cfg.num_passes <= 8, "draft.num_passes", draft_cfg.num_passes, "must be 1..8")
    window = draft_cfg.sliding_window if checkpoint is None else checkpoint.config.sliding_window
    require(
        window is None or window >= draft_cfg.num_passes,
        "draft.sliding_window",
        window,
        f"must be >= num_passes={draft_cfg.num_passes}: the last pass sees that many keys of its own row",
    )
    if checkpoint is not None:
        draft = checkpoint
        check_fits(draft.config, policy.config)
        check_vocab(draft.d2t, draft.t2d, draft.config.vocab_size, draft.config.draft_vocab_size)
    else:
        config = derive_config(policy.config, draft_cfg)
        check_fits(config, policy.config)
        draft = Eagle3Draft(config)
        init_draft(draft, seed)
        _set_vocab(draft, vocab)
    draft.to(device=device, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    if mesh is not None and mesh.fsdp_mesh is not None:
        # One group that stays gathered from the forward of the root to its backward: all
        # K passes and the loss on the head's weight run on plain tensors in between.
        fully_shard(draft, mesh=mesh.fsdp_mesh, reshard_after_forward=False)
        draft.set_gradient_divide_factor(1.0)
        draft.set_force_sum_reduction_for_comms(True)  # gloo has neither AVG nor PREMUL_SUM
    return draft


def derive_config(policy_config, draft_cfg: DraftConfig) -> Eagle3Config:
    """The draft's shape: what `draft_cfg` leaves open is the policy's own."""
    attention = next(layer.attention for layer in policy_config.layers if getattr(layer, "attention", None) is not None)
    ffn = next((f for layer in policy_config.layers if (f := getattr(layer, "feed_forward", None)) is not None), None)
    dim = policy_config.dim

    def chosen(name: str, *defaults: int | None) -> int:
        return next(v for v in (getattr(draft_cfg, name), *defaults) if v is not None)

    heads = chosen("num_attention_heads", attention.n_heads)
    hidden = chosen("hidden_size", dim)
    # A mixture has no dense width to copy; four times the hidden size is what public drafts take.
    intermediate = chosen("intermediate_size", ffn.w1.out_features if ffn is not None else 4 * dim)
    kv_heads = chosen("num_key_value_heads", getattr(attention, "n_kv_heads", None), heads)
    head_dim = chosen("head_dim", getattr(attention, "head_dim", None), hidden // max(heads, 1))
    taps = draft_cfg.tap_layers
    return Eagle3Config(
        hidden_size=hidden,
        target_hidden_size=dim,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=policy_config.vocab_size,
        draft_vocab_size=chosen("draft_vocab_size", policy_config.vocab_size),
        tap_layers=tuple(taps) if taps is not None else default_tap_layers(len(policy_config.layers)),
        rms_norm_eps=policy_config.norm.eps,
        max_position_embeddings=attention.rope.max_seq_len,
        rope=rope_settings(attention.rope),
        norm_before_residual=draft_cfg.norm_before_residual,
        norm_before_fc=draft_cfg.norm_before_fc,
        fc_norm=draft_cfg.fc_norm,
        norm_output=draft_cfg.norm_output,
        qk_norm=draft_cfg.qk_norm,
        sliding_window=draft_cfg.sliding_window,
        own_embedding=hidden != dim,
    )


def check_fits(config: Eagle3Config, policy_config) -> None:
    """Raise ConfigError when a draft cannot serve this policy."""
    c = config
    require(
        c.target_hidden_size == policy_config.dim,
        "draft.target_hidden_size",
        c.target_hidden_size,
        f"the policy's hidden size is {policy_config.dim}",
    )
    require(
        c.vocab_size == policy_config.vocab_size,
        "draft.vocab_size",
        c.vocab_size,
        f"the policy's vocabulary has {policy_config.vocab_size} tokens: the draft was made for another policy",
    )
    check_tap_layers(c.tap_layers, len(policy_config.layers))


def _set_vocab(draft: Eagle3Draft, vocab: Tensor | None) -> None:
    c = draft.config
    if c.draft_vocab_size == c.vocab_size and vocab is None:
        return
    if vocab is None:
        rule = f"is smaller than the policy's {c.vocab_size}: give the ids of its tokens as vocab"
        raise ConfigError("draft.draft_vocab_size", c.draft_vocab_size, rule)
    require(
        vocab.numel() == c.draft_vocab_size,
        "draft.draft_vocab_size",
        c.draft_vocab_size,
        f"vocab names {vocab.numel()} tokens",
    )
    d2t, t2d = vocab_maps(vocab, c.vocab_size)
    draft.d2t.copy_(d2t)
    draft.t2d.copy_(t2d)
