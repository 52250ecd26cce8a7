"""A policy and transformers agree: same folder, same logits, in both directions."""

import dataclasses
import json

import pytest
import torch
import transformers
from safetensors.torch import save_file

from cospec import hf, titan
from cospec.config import ConfigError, PolicyConfig, RopeConfig
from cospec.policy.build import build_policy, full_state, head_weight
from cospec.policy.weights import from_hf, load_hf, save_hf, to_hf
from cospec.tensor_writer import TensorWriter
from support.dense_context import DenseCausal

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
ROPES = {
    "none": RopeConfig(theta=5000.0),
    "linear": RopeConfig(scaling="linear", factor=4.0),
    "llama3": RopeConfig(theta=500.0, scaling="llama3", factor=8.0, original_max_position_embeddings=16),
    "yarn": RopeConfig(theta=1000.0, scaling="yarn", factor=4.0, original_max_position_embeddings=16),
}
TOKENS = torch.randint(0, 97, (1, 40), generator=torch.Generator().manual_seed(1))


def tiny(model_type: str, **changes) -> PolicyConfig:
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return PolicyConfig(model_type=model_type, **{**SIZES, **(moe if model_type == "qwen3_moe" else {}), **changes})


def logits_of(policy) -> torch.Tensor:
    positions = torch.arange(TOKENS.shape[1])[None]
    with torch.no_grad():
        hidden = policy(TOKENS, positions=positions, attention_masks=DenseCausal())
        return hidden @ head_weight(policy).T


def theirs(folder) -> torch.nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return model.eval()


def random_theirs(cfg: PolicyConfig, folder) -> None:
    """A random transformers model of these sizes, with norms that are not all one, in `folder`."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**hf.policy_json(cfg))
    config.initializer_range = 0.2
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)


CASES = [
    tiny("qwen3"),
    tiny("qwen3", tie_word_embeddings=True, rms_norm_eps=1e-3),
    tiny("qwen3", num_key_value_heads=4, head_dim=12, rope=ROPES["linear"]),
    tiny("qwen3", rope=ROPES["yarn"]),
    tiny("llama", rope=ROPES["llama3"]),
    tiny("llama", tie_word_embeddings=True, num_key_value_heads=1, rope=ROPES["yarn"]),
    tiny("llama", rope=ROPES["none"], head_dim=12),
    tiny("qwen3_moe"),
]
IDS = [f"{c.model_type}-{c.rope.scaling}{'-tied' if c.tie_word_embeddings else ''}" for c in CASES]
# torchtitan multiplies experts in bfloat16, whatever the dtype of the model.
TOLERANCE = {"qwen3": 1e-6, "llama": 5e-6, "qwen3_moe": 2e-2}


@pytest.mark.parametrize("cfg", CASES, ids=IDS)
def test_logits_equal_transformers_both_ways(cfg, tmp_path):
    """Known failures 24 (tied embeddings) and 25 (RoPE lost): the files alone carry the model."""
    random_theirs(cfg, tmp_path / "theirs")
    policy = build_policy(PolicyConfig(hf_path=str(tmp_path / "theirs")))
    assert titan.policy_config(policy.config) == dataclasses.replace(
        cfg, intermediate_size=titan.policy_config(policy.config).intermediate_size
    )
    with torch.no_grad():
        expected = theirs(tmp_path / "theirs")(TOKENS).logits[0]
    ours = logits_of(policy)[0]
    scale = expected.abs().max()
    assert scale > 0.5
    assert (ours - expected).abs().max() <= TOLERANCE[cfg.model_type] * scale

    save_hf(policy.config, full_state(policy), tmp_path / "ours")
    with torch.no_grad():
        again = theirs(tmp_path / "ours")(TOKENS).logits[0]
    assert torch.equal(again, expected)  # the tensors went through two conversions unchanged


@pytest.mark.parametrize("cfg", CASES, ids=IDS)
def test_round_trip_is_bit_equal(cfg, tmp_path):
    policy = build_policy(cfg, seed=3)
    state = full_state(policy)
    save_hf(policy.config, state, tmp_path / "out", max_shard_bytes=20_000)
    assert (tmp_path / "out" / hf.INDEX).is_file()
    again = build_policy(PolicyConfig(hf_path=str(tmp_path / "out")), seed=4)
    for name, value in full_state(again).items():
        assert torch.equal(value, state[name]), name
    back = from_hf(policy.config, to_hf(policy.config, state))
    assert set(back) == set(state)
    assert all(torch.equal(back[name], state[name]) for name in state)
    assert titan.hf_config(again.config) == titan.hf_config(policy.config)


@pytest.mark.parametrize("scaling", ROPES)
def test_rope_tables_equal_transformers(scaling):
    """Known failure 25: every scaling, to the bit."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    cfg = tiny("llama", rope=ROPES[scaling], head_dim=64)
    rotary = LlamaRotaryEmbedding(transformers.AutoConfig.for_model(**hf.policy_json(cfg)))
    frequencies, factor = hf.rope_frequencies(cfg.rope, 64)
    assert torch.equal(frequencies, rotary.inv_freq)
    assert factor == rotary.attention_scaling


def test_both_rope_schemas_are_read():
    for rope in ROPES.values():
        raw = {"max_position_embeddings": 64, **hf.rope_json(rope)}
        old = {k: v for k, v in raw.items() if k != "rope_parameters"}
        new = {k: v for k, v in raw.items() if k not in ("rope_theta", "rope_scaling")}
        assert hf.read_rope(raw) == hf.read_rope(old) == hf.read_rope(new) == rope
    assert hf.read_rope({"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0}}).factor == 2.0


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"use_sliding_window": True},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"model_type": "mamba"},
        {"quantization_config": {"bits": 4}},
        {"rope_parameters": {"rope_type": "longrope"}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}},
        {"partial_rotary_factor": 0.5},
    ],
    ids=lambda c: next(iter(c)),
)
def test_settings_that_would_not_be_followed_are_refused(change, tmp_path):
    raw = {**hf.policy_json(tiny("qwen3")), **change}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError):
        titan.policy_config_from_hf(tmp_path)


def test_router_without_norm_topk_prob_is_refused(tmp_path):
    raw = hf.policy_json(tiny("qwen3_moe"))
    for value in ({"norm_topk_prob": False}, {}):
        changed = {k: v for k, v in raw.items() if k != "norm_topk_prob"} | value
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ConfigError, match="norm_topk_prob"):
            titan.policy_config_from_hf(tmp_path)


def write_folder(folder, config, tensors):
    folder.mkdir()
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(titan.hf_config(config)))
    return folder


def test_wrong_folders_are_named(tmp_path):
    """Known failures 22 (absent tensor), 29 (truncated), 34 (pickles are not read)."""
    cfg = tiny("qwen3")
    policy = build_policy(cfg)
    config, state = policy.config, full_state(policy)
    tensors = to_hf(config, state)
    key = "model.layers.1.mlp.up_proj.weight"

    def write(name, changed):
        return write_folder(tmp_path / name, config, changed)

    with pytest.raises(ValueError, match=f"lacks tensors: {key}"):
        load_hf(policy, write("missing", {k: v for k, v in tensors.items() if k != key}))
    with pytest.raises(ValueError, match=r"unknown tensors: model\.extra"):
        load_hf(policy, write("extra", {**tensors, "model.extra": torch.zeros(1)}))
    with pytest.raises(ValueError, match=rf"{key} has shape \[3, 48\], the policy needs \[80, 48\]"):
        load_hf(policy, write("shape", {**tensors, key: torch.zeros(3, 48)}))
    cut = write("cut", tensors) / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        load_hf(policy, cut.parent)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    torch.save(tensors, pickled / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickled weights are not read"):
        load_hf(policy, pickled)
    with pytest.raises(ValueError, match="lacks tensors"):
        save_hf(config, {k: v for k, v in state.items() if k != "norm.weight"}, tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_a_tied_head_in_the_file_must_equal_the_table(tmp_path):
    policy = build_policy(tiny("llama", tie_word_embeddings=True))
    tensors = to_hf(policy.config, full_state(policy))
    assert "lm_head.weight" not in tensors
    table = tensors["model.embed_tokens.weight"]
    from_hf(policy.config, {**tensors, "lm_head.weight": table.clone()})
    with pytest.raises(ValueError, match=r"unknown tensors: lm_head\.weight"):
        from_hf(policy.config, {**tensors, "lm_head.weight": table + 1})


def test_old_rope_tables_in_files_are_passed_over(tmp_path):
    policy = build_policy(tiny("llama"))
    tensors = to_hf(policy.config, full_state(policy))
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    write_folder(tmp_path / "old", policy.config, tensors)
    load_hf(policy, tmp_path / "old")


def test_saving_is_all_or_nothing(tmp_path, monkeypatch):
    """Known failures 30 and 37: a folder has its name only when it is complete."""
    policy = build_policy(tiny("qwen3"))
    state = full_state(policy)
    write = TensorWriter.write

    def failing(self, name, tensor):
        if self._next == 5:
            raise OSError("disk full")
        write(self, name, tensor)

    monkeypatch.setattr(TensorWriter, "write", failing)
    with pytest.raises(OSError, match="disk full"):
        save_hf(policy.config, state, tmp_path / "out", max_shard_bytes=20_000)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    save_hf(policy.config, state, tmp_path / "out")
    with pytest.raises(FileExistsError):
        save_hf(policy.config, state, tmp_path / "out")
    save_hf(policy.config, state, tmp_path / "out", overwrite=True, dtype=torch.bfloat16)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert hf.TensorFolder(tmp_path / "out")["model.norm.weight"].dtype == torch.bfloat16
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
