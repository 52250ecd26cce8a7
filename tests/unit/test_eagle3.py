"""The draft model and its attachment to a policy."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from cospec import titan
from cospec.config import ConfigError, DraftConfig, Eagle3Config, PolicyConfig, RopeConfig, default_tap_layers
from cospec.draft.attach import attach_draft, check_fits, derive_config
from cospec.draft.eagle3 import Eagle3Draft, RMSNorm, check_eagle3, init_draft
from cospec.draft.rope import cos_sin
from cospec.ops.dense import rotate_halves as rotate

SIZES = {
    "hidden_size": 16,
    "target_hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 20,
    "draft_vocab_size": 12,
    "tap_layers": (1, 2, 4),
}
ROPES = {
    "none": RopeConfig(theta=1e6),
    "linear": RopeConfig(scaling="linear", factor=4.0),
    "llama3": RopeConfig(theta=5e5, scaling="llama3", factor=8.0, original_max_position_embeddings=256),
    "yarn": RopeConfig(scaling="yarn", factor=16.0, original_max_position_embeddings=128),
    "yarn, own factor": RopeConfig(
        scaling="yarn", factor=4.0, attention_factor=1.25, beta_fast=16.0, original_max_position_embeddings=512
    ),
    "yarn, not truncated": RopeConfig(scaling="yarn", factor=4.0, truncate=False, original_max_position_embeddings=512),
}


def hf_llama_config(rope: RopeConfig, head_dim: int, limit: int) -> LlamaConfig:
    parameters = {"rope_type": "default" if rope.scaling == "none" else rope.scaling, "rope_theta": rope.theta}
    if rope.scaling != "none":
        parameters["factor"] = rope.factor
    if rope.scaling in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = rope.original_max_position_embeddings
    if rope.scaling == "llama3":
        parameters |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.scaling == "yarn":
        parameters |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        if rope.attention_factor is not None:
            parameters["attention_factor"] = rope.attention_factor
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=limit,
        rope_parameters=parameters,
    )


@pytest.mark.parametrize("name", ROPES)
def test_rope_is_transformers(name):
    """Known failure 25: every scaling, rotated as transformers does, also past the position limit."""
    rope, head_dim, limit = ROPES[name], 32, 64
    config = hf_llama_config(rope, head_dim, limit)
    embedding = LlamaRotaryEmbedding(config)
    if rope.scaling != "none":
        freq, factor = ROPE_INIT_FUNCTIONS[rope.scaling](config, device=torch.device("cpu"))
        assert torch.equal(embedding.inv_freq, freq)
        assert embedding.attention_scaling == factor
    positions = torch.tensor([0, 1, 5, limit - 1, limit, limit + 8, 5 * limit])
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(len(positions), 4, head_dim, generator=generator) for _ in range(2))
    cos, sin = embedding(q[None], positions[None])
    want_q, want_k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    own_cos, own_sin = cos_sin(rope, head_dim, positions, torch.float32)
    torch.testing.assert_close(rotate(q, own_cos, own_sin), want_q[0].transpose(0, 1), rtol=0, atol=5e-4)
    torch.testing.assert_close(rotate(k, own_cos, own_sin), want_k[0].transpose(0, 1), rtol=0, atol=5e-4)
    near = positions < 10  # float32 angles lose digits with the position; ours are float64
    torch.testing.assert_close(own_cos[near], cos[0][near], rtol=0, atol=2e-6)
    torch.testing.assert_close(own_sin[near], sin[0][near], rtol=0, atol=2e-6)


def test_scores_depend_on_distance_only_at_any_position():
    """Known failure 25: acceptance holds past the limit, for nothing is clamped there."""
    rope = RopeConfig()
    q, k = torch.randn(2, 1, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def score(at: int) -> float:
        tables = [cos_sin(rope, 16, torch.tensor([p]), torch.float64) for p in (at + 7, at)]
        return float((rotate(q, *tables[0]) * rotate(k, *tables[1])).sum())

    assert score(0) != pytest.approx(float((q * k).sum()), rel=1e-3)
    for at in (4096, 10**6):
        assert score(at) == pytest.approx(score(0), rel=1e-8)


def test_names_and_shapes_are_those_of_the_public_files():
    draft = Eagle3Draft(Eagle3Config(**SIZES, fc_norm=True, own_embedding=True, qk_norm=True, attention_bias=True))
    layer = "midlayer."
    expected = {
        "fc.weight": (16, 48),
        "fc_norm.0.weight": (16,),
        "fc_norm.1.weight": (16,),
        "fc_norm.2.weight": (16,),
        "embed_tokens.weight": (20, 16),
        layer + "self_attn.q_proj.weight": (32, 32),
        layer + "self_attn.k_proj.weight": (16, 32),
        layer + "self_attn.v_proj.weight": (16, 32),
        layer + "self_attn.o_proj.weight": (16, 32),
        layer + "self_attn.q_proj.bias": (32,),
        layer + "self_attn.k_proj.bias": (16,),
        layer + "self_attn.v_proj.bias": (16,),
        layer + "self_attn.o_proj.bias": (16,),
        layer + "self_attn.q_norm.weight": (8,),
        layer + "self_attn.k_norm.weight": (8,),
        layer + "mlp.gate_proj.weight": (24, 16),
        layer + "mlp.up_proj.weight": (24, 16),
        layer + "mlp.down_proj.weight": (16, 24),
        layer + "input_layernorm.weight": (16,),
        layer + "hidden_norm.weight": (16,),
        layer + "post_attention_layernorm.weight": (16,),
        "norm.weight": (16,),
        "lm_head.weight": (12, 16),
        "d2t": (12,),
        "t2d": (20,),
    }
    assert {name: tuple(t.shape) for name, t in draft.state_dict().items()} == expected
    plain = Eagle3Draft(Eagle3Config(**SIZES)).state_dict()
    assert set(plain) < set(expected)
    assert "embed_tokens.weight" not in plain


def test_norm_is_computed_in_float32():
    """A bfloat16 sum of squares over 1024 values would be off by more than a per cent."""
    x = torch.full((1, 1024), 300.0, dtype=torch.bfloat16)
    out = RMSNorm(1024, 1e-6)(x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, torch.ones_like(out))


def test_initialised_by_name_and_seed():
    """Other parameters do not change a parameter's values; another seed or name does."""
    small = Eagle3Draft(Eagle3Config(**SIZES))
    large = Eagle3Draft(Eagle3Config(**SIZES, own_embedding=True, fc_norm=True, qk_norm=True, attention_bias=True))
    other = Eagle3Draft(Eagle3Config(**SIZES))
    for draft, seed in ((small, 3), (large, 3), (other, 4)):
        torch.manual_seed(seed)  # must not matter
        init_draft(draft, seed)
    state = large.state_dict()
    for name, tensor in small.named_parameters():
        assert torch.equal(tensor, state[name]), name
        assert torch.equal(tensor, other.state_dict()[name]) == (tensor.ndim == 1), name
    assert not torch.equal(small.midlayer.mlp.gate_proj.weight, small.midlayer.mlp.up_proj.weight)
    assert small.fc.weight.std().item() == pytest.approx(0.02, rel=0.15)
    assert not large.midlayer.self_attn.q_proj.bias.any()


@pytest.mark.parametrize(
    "change, named",
    [
        ({"draft_vocab_size": 21}, "draft_vocab_size=21.*20"),
        ({"draft_vocab_size": 0}, "draft_vocab_size=0"),
        ({"hidden_size": 8}, "hidden_size=8.*target_hidden_size=16"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3.*4"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"tap_layers": (2, 1, 4)}, r"tap_layers=\(2, 1, 4\)"),
        ({"tap_layers": (1, 1)}, r"tap_layers=\(1, 1\)"),
        ({"tap_layers": ()}, r"tap_layers=\(\)"),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc"),
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"rope": RopeConfig(scaling="dynamic")}, "rope.scaling='dynamic'"),  # type: ignore[arg-type]
    ],
)
def test_bad_shapes_and_flags_are_named(change, named):
    with pytest.raises(ConfigError, match=named):
        Eagle3Draft(Eagle3Config(**{**SIZES, **change}))


def test_wrong_number_of_taps_is_named():
    draft = Eagle3Draft(Eagle3Config(**SIZES))
    with pytest.raises(ValueError, match=r"got 2 taps.*\(1, 2, 4\)"):
        draft.fuse([torch.zeros(3, 16)] * 2)


@pytest.mark.parametrize("layers", range(1, 64))
def test_default_taps(layers):
    taps = default_tap_layers(layers)
    assert len(taps) == min(3, layers)
    assert list(taps) == sorted(set(taps))
    assert taps[0] >= 0
    assert taps[-1] < layers
    if layers >= 8:
        assert taps == (1, layers // 2 - 1, layers - 4)


POLICY = PolicyConfig(
    vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=6, num_attention_heads=4, head_dim=8
)


def policy_of(cfg: PolicyConfig) -> SimpleNamespace:
    return SimpleNamespace(config=titan.build_config(cfg))  # the draft reads nothing else


def test_sizes_come_from_the_policy():
    rope = RopeConfig(theta=12345.0, scaling="yarn", factor=2.0, original_max_position_embeddings=64)
    cfg = dataclasses.replace(POLICY, rope=rope, rms_norm_eps=3e-5, max_position_embeddings=777)
    config = attach_draft(policy_of(cfg), DraftConfig()).config
    assert config == Eagle3Config(
        **{**SIZES, "draft_vocab_size": 20, "tap_layers": default_tap_layers(6)},
        rope=rope,
        rms_norm_eps=3e-5,
        max_position_embeddings=777,
    )


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "llama3/debugmodel", "qwen3/0.6B"])
def test_attaches_to_any_decoder(kind):
    cfg = PolicyConfig(flavor=kind) if "/" in kind else dataclasses.replace(POLICY, model_type=kind)
    policy = policy_of(cfg)
    config = derive_config(policy.config, DraftConfig())
    check_fits(config, policy.config)
    check_eagle3(config)
    assert config.target_hidden_size == policy.config.dim
    assert config.rope.theta == policy.config.layers[0].attention.rope.theta


def test_own_width_brings_an_own_table():
    draft = attach_draft(policy_of(POLICY), DraftConfig(hidden_size=8, head_dim=4))
    assert draft.config.own_embedding
    assert draft.embed_tokens.weight.shape == (20, 8)


def test_vocabulary_is_set():
    draft = attach_draft(policy_of(POLICY), DraftConfig(draft_vocab_size=3), vocab=torch.tensor([2, 5, 19]))
    assert draft.policy_ids.tolist() == [2, 5, 19]
    assert draft.t2d.nonzero().squeeze(1).tolist() == [2, 5, 19]
    assert attach_draft(policy_of(POLICY), DraftConfig()).policy_ids is None


@pytest.mark.parametrize(
    "draft_cfg, named",
    [
        (DraftConfig(draft_vocab_size=21), "draft_vocab_size=21.*20"),
        (DraftConfig(draft_vocab_size=3), "draft_vocab_size=3.*give the ids"),
        (DraftConfig(tap_layers=(1, 6)), r"draft.tap_layers=\(1, 6\).*0\.\.5"),
        (DraftConfig(tap_layers=(3, 1)), r"draft.tap_layers=\(3, 1\)"),
        (DraftConfig(hidden_size=0), "hidden_size=0"),
        (DraftConfig(draft_vocab_size=0), "draft_vocab_size=0"),
        (DraftConfig(num_passes=9), "num_passes=9"),
        (DraftConfig(num_passes=0), "num_passes=0"),
        (DraftConfig(sliding_window=3, num_passes=4), "sliding_window=3.*num_passes=4"),
        (DraftConfig(init="/nowhere"), "draft.init='/nowhere'"),
    ],
)
def test_settings_that_do_not_fit_the_policy_are_named(draft_cfg, named):
    with pytest.raises(ConfigError, match=named):
        attach_draft(policy_of(POLICY), draft_cfg)


@pytest.mark.parametrize(
    "change, named",
    [
        ({"vocab_size": 21}, "vocab_size=21.*20"),
        ({"target_hidden_size": 8, "own_embedding": True}, "target_hidden_size=8.*16"),
        ({"tap_layers": (1, 2, 6)}, r"tap_layers=\(1, 2, 6\)"),
    ],
)
def test_a_checkpoint_of_another_policy_is_refused(change, named):
    """Known failures 21 and 26."""
    checkpoint = Eagle3Draft(Eagle3Config(**{**SIZES, **change}))
    with pytest.raises(ConfigError, match=named):
        attach_draft(policy_of(POLICY), DraftConfig(init="folder"), checkpoint=checkpoint)


def test_a_checkpoint_keeps_its_shape_and_values():
    checkpoint = Eagle3Draft(Eagle3Config(**SIZES, norm_output=True))
    init_draft(checkpoint, 8)
    draft = attach_draft(policy_of(POLICY), DraftConfig(init="folder", norm_output=False), checkpoint=checkpoint)
    assert draft.config.norm_output
    again = Eagle3Draft(Eagle3Config(**SIZES))
    init_draft(again, 8)
    assert torch.equal(draft.lm_head.weight, again.lm_head.weight)


def test_parameters_are_float32_but_float64_for_float64():
    for dtype, stored in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        draft = attach_draft(policy_of(POLICY), DraftConfig(), dtype=dtype)
        assert {p.dtype for p in draft.parameters()} == {stored}
