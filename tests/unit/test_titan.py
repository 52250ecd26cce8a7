"""The torchtitan seam: specs, attention swap, initialisation by name, RoPE tables."""

import dataclasses
import subprocess
import sys

import pytest
import torch
import torchtitan.tools.utils
from torchtitan.models import llama3, qwen3

from cospec import hf, titan
from cospec.config import ConfigError, PolicyConfig, RopeConfig
from cospec.policy.build import build_policy, full_state
from cospec.policy.weights import save_hf
from support.dense_context import DenseCausal

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "num_experts": 4,
    "moe_intermediate_size": 16,
}
TOKENS = torch.arange(12)[None]


def small(**changes) -> PolicyConfig:
    return PolicyConfig(**{**SMALL, **changes})


def run(policy, tokens=TOKENS, positions=None, context=None):
    positions = torch.arange(tokens.shape[1])[None] if positions is None else positions
    return policy(tokens, positions=positions, attention_masks=context or DenseCausal())


def test_torchtitan_knows_the_device():
    if torch.cuda.is_available():
        pytest.skip("the device is CUDA")
    assert torchtitan.tools.utils.device_type == "cpu"
    import torchtitan.distributed.utils as copied

    assert copied.device_type == "cpu"
    assert copied.device_module is torch.cpu
    assert copied.get_local_device() == torch.device("cpu")


def test_import_leaves_logging_and_random_state_alone():
    code = (
        "import logging, torch; state = torch.get_rng_state()\n"
        "import cospec.titan\n"
        "assert not logging.getLogger().handlers and logging.getLogger().level == logging.WARNING\n"
        "assert torch.equal(state, torch.get_rng_state())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe", "llama"])
def test_a_policy_returns_normed_hidden_states_and_trains_every_parameter(model_type, tied):
    policy = build_policy(small(model_type=model_type, tie_word_embeddings=tied))
    hidden = run(policy)
    assert hidden.shape == (1, 12, 32)
    assert torch.allclose(hidden.pow(2).mean(-1), torch.ones(1, 12), atol=1e-2)  # the final norm was applied
    logits = hidden @ titan.head_weight(policy).T
    logits.logsumexp(-1).sum().backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
    assert policy.lm_head.weight.grad.abs().sum() > 0


def test_skip_lm_head_can_be_undone():
    policy = build_policy(small())
    titan.skip_lm_head(policy, False)
    assert run(policy).shape == (1, 12, 61)


class Spy(DenseCausal):
    def __init__(self):
        self.calls = []

    def attend(self, layer_id, q_TNH, k_TMH, v_TMH, scale):
        self.calls.append((layer_id, tuple(q_TNH.shape), tuple(k_TMH.shape), tuple(v_TMH.shape), scale))
        return super().attend(layer_id, q_TNH, k_TMH, v_TMH, scale)


def test_the_context_sees_layers_in_order_and_rows_flattened():
    spy = Spy()
    tokens = torch.arange(10).view(2, 5)
    policy = build_policy(small())
    run(policy, tokens, torch.arange(5).expand(2, 5), spy)
    shape = (10, 4, 8), (10, 2, 8), (10, 2, 8)
    assert spy.calls == [(i, *shape, 8**-0.5) for i in range(3)]


def test_a_missing_context_is_named():
    with pytest.raises(TypeError, match=r"attention_masks is a NoneType.*attend"):
        build_policy(small())(TOKENS, positions=TOKENS)


@pytest.mark.parametrize("flavor", ["qwen3/debugmodel", "qwen3/debugmodel_moe", "llama3/debugmodel"])
def test_flavors_build_and_run(flavor):
    config = titan.build_config(PolicyConfig(flavor=flavor))
    config.layers = config.layers[:2]
    policy = titan.build_model(config, device="cpu")
    titan.init_parameters(policy, 0)
    assert torch.isfinite(run(policy)).all()
    assert not any("wqkv" in name or "expert_bias" in name for name in policy.state_dict())


def test_any_decoder_spec_takes_packed_attention_and_keeps_its_weights():
    """A user's own fused, tied spec: unchanged itself, and its checkpoints fit the changed one."""
    theirs = qwen3.qwen3_configs["debugmodel"](attn_backend="flex")
    theirs.layers = theirs.layers[:2]
    before = repr(theirs)
    ours = titan.with_packed_attention(theirs)
    assert repr(theirs) == before
    with torch.device("meta"):
        names = {n: v.shape for n, v in theirs.build().state_dict().items()}
    model = build_policy(ours)
    assert {n: v.shape for n, v in model.state_dict().items()} == names
    assert [type(m).__name__ for n, m in model.named_modules() if n.endswith("inner_attention")] == [
        "PackedAttention"
    ] * 2
    assert run(build_policy(theirs)).equal(run(model))


def test_specs_that_have_no_hugging_face_form_are_refused():
    config = titan.build_config(small())
    other = titan.DecoderConfig(**{f.name: getattr(config, f.name) for f in dataclasses.fields(config)})
    with pytest.raises(ValueError, match="only Qwen3 and Llama 3"):
        titan.hf_config(other)


@pytest.mark.parametrize("spec", [qwen3.qwen3_configs["0.6B"], llama3.llama3_configs["1B"]], ids=["qwen3", "llama3"])
def test_flavor_tables_equal_the_ones_built_from_their_sizes(spec):
    """Known failure 25: what a torchtitan spec says about RoPE survives the way through PolicyConfig."""
    config = titan.with_packed_attention(spec(attn_backend="flex"))
    sizes = titan.policy_config(config)
    rope, again = config.layers[0].attention.rope, titan.build_config(sizes).layers[0].attention.rope
    rope.max_seq_len = again.max_seq_len = 512
    # Angles are products of up to 512 with float32 frequencies: 512 * 2**-24 at most.
    assert (rope.build().cache - again.build().cache).abs().max() < 1e-4
    assert titan.policy_config(titan.build_config(sizes)) == sizes


def test_initial_values_depend_on_name_and_seed_only():
    whole = dict(build_policy(small(), seed=5).named_parameters())
    fewer = dict(build_policy(small(num_hidden_layers=2), seed=5).named_parameters())
    for name, value in fewer.items():
        if "wo" in name or "w2" in name or "w3" in name:  # scaled by the depth
            assert torch.equal(value / value.std(), whole[name] / whole[name].std()) or torch.allclose(
                value / value.std(), whole[name] / whole[name].std(), rtol=1e-5
            )
        else:
            assert torch.equal(value, whole[name]), name
    other = dict(build_policy(small(), seed=6).named_parameters())
    for name, value in whole.items():
        assert ("norm" in name) == torch.equal(value, other[name]), name
    names = [n for n in whole if "w1" in n]
    assert not torch.equal(whole[names[0]], whole[names[1]])


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_pipeline_stages_in_a_row_are_the_whole_policy(num_stages, tmp_path):
    """Each stage draws, or reads from a folder, the values that the whole policy has there."""
    cfg = small(num_hidden_layers=4)
    whole = build_policy(cfg, seed=1)
    state = full_state(whole)
    save_hf(whole.config, state, tmp_path / "hf")
    for source in (cfg, PolicyConfig(hf_path=str(tmp_path / "hf"))):
        stages = [build_policy(source, seed=1, stage=i, num_stages=num_stages) for i in range(num_stages)]
        names = [name for part in stages for name in part.state_dict()]
        assert sorted(names) == sorted(state)
        assert all(torch.equal(v, state[n]) for part in stages for n, v in part.state_dict().items())
        x = TOKENS
        for part in stages:
            x = run(part, x, torch.arange(12)[None])
        assert torch.equal(x, run(whole))
    if num_stages > 1:
        with pytest.raises(ValueError, match="no head"):
            titan.head_weight(stages[0])
        with pytest.raises(ConfigError, match=r"policy\.tie_word_embeddings"):
            build_policy(small(tie_word_embeddings=True), num_stages=num_stages)
        with pytest.raises(ConfigError, match=r"policy\.num_hidden_layers=1"):
            build_policy(small(num_hidden_layers=1), num_stages=num_stages)


def test_initialisation_keeps_the_global_generator():
    policy = build_policy(small())
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    titan.init_parameters(policy, 0)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("tied", [False, True])
def test_initial_scales_are_sound(tied):
    policy = build_policy(small(hidden_size=256, vocab_size=999, tie_word_embeddings=tied))
    deep = 0.02 / (2 * 3) ** 0.5
    for name, value in policy.named_parameters():
        if "norm" in name:
            assert torch.equal(value, torch.ones_like(value))
        else:
            expected = deep if any(part in name for part in (".wo.", ".w2.", ".w3.")) else 0.02
            assert value.std().item() == pytest.approx(expected, rel=0.05), name
    assert (policy.tok_embeddings.weight is policy.lm_head.weight) == tied


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_tables_are_shared_by_layers_and_kept_by_dtype(model_type):
    model = titan.build_model(titan.build_config(small(model_type=model_type)), device="cpu", dtype=torch.bfloat16)
    caches = [block.attention.rope.cache for block in model.layers.values()]
    assert all(cache is caches[0] for cache in caches)
    assert caches[0].dtype in (torch.float32, torch.complex64)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    titan.init_parameters(model, 0)
    assert run(model).dtype == torch.bfloat16


@pytest.mark.parametrize("rope", [RopeConfig(), RopeConfig(scaling="linear", factor=2.0)], ids=["none", "linear"])
@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_rope_follows_positions(model_type, rope):
    """Scores depend on differences of positions; rows come in any order (zigzag shards)."""
    policy = build_policy(small(model_type=model_type, rope=rope))
    base = run(policy)
    moved = run(policy, positions=torch.arange(12)[None] + 40)
    assert torch.allclose(base, moved, atol=1e-4)
    stretched = run(policy, positions=torch.arange(12)[None] * 3)
    assert not torch.allclose(base, stretched, atol=1e-3)


def test_positions_beyond_the_table_are_an_error():
    policy = build_policy(small(max_position_embeddings=8))
    with pytest.raises(RuntimeError, match="position"):
        run(policy)


def test_state_loads_into_a_plain_copy_bit_equal():
    """What a rollout engine's own policy does at a refit."""
    for tied in (False, True):
        policy = build_policy(small(tie_word_embeddings=tied), seed=2)
        copy_ = titan.build_model(policy.config, device="cpu")
        copy_.load_state_dict(full_state(policy), strict=True)
        assert torch.equal(run(copy_), run(policy))
        assert torch.equal(titan.head_weight(copy_), titan.head_weight(policy))


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"num_attention_heads": 3}, "policy.num_attention_heads=3"),
        ({"head_dim": 7}, "policy.head_dim=7"),
        ({"vocab_size": 0}, "policy.vocab_size=0"),
        ({"num_hidden_layers": 0}, "policy.num_hidden_layers=0"),
        ({"rms_norm_eps": 0.0}, "policy.rms_norm_eps=0.0"),
        ({"model_type": "gpt"}, "policy.model_type='gpt'"),
        ({"model_type": "qwen3_moe", "num_experts_per_tok": 5}, "policy.num_experts_per_tok=5"),
        ({"model_type": "qwen3_moe", "moe_intermediate_size": 20}, "policy.moe_intermediate_size=20"),
        ({"model_type": "qwen3_moe", "hidden_size": 36}, "policy.hidden_size=36"),
        ({"flavor": "qwen3/9000B"}, "policy.flavor='qwen3/9000B'"),
        ({"flavor": "qwen3/0.6B", "hf_path": "x"}, "not both"),
        ({"hf_path": "/nowhere"}, "policy.hf_path='/nowhere'"),
        ({"rope": RopeConfig(theta=0.0)}, "policy.rope.theta=0.0"),
        ({"rope": RopeConfig(scaling="yarn", factor=0.5)}, "policy.rope.factor=0.5"),
        ({"rope": RopeConfig(scaling="dynamic")}, "policy.rope.scaling='dynamic'"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_settings_that_cannot_work_are_named(changes, named):
    """Known failure 39."""
    with pytest.raises(ConfigError) as error:
        titan.build_config(small(**changes))
    assert named in str(error.value)


def test_rope_frequencies_of_equal_parameters_are_equal():
    assert hf.rope_frequencies(RopeConfig(scaling="linear", factor=1.0), 8)[0].equal(
        hf.rope_frequencies(RopeConfig(), 8)[0]
    )
