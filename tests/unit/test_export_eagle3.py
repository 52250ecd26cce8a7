"""EAGLE-3 folders of every family: what is written, what is read back, what is refused."""

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from cospec.config import ConfigError, Eagle3Config, RopeConfig
from cospec.draft.eagle3 import Eagle3Draft, init_draft
from cospec.draft.vocab import vocab_maps
from cospec.export.eagle3 import load_draft, save_draft
from cospec.export.eagle3_config import UNSERVED, config_json, read_config

FAMILIES = ("sglang", "vllm", "speculators")
IDS = "eagle_aux_hidden_state_layer_ids"
YARN = RopeConfig(theta=1e6, scaling="yarn", factor=4.0, original_max_position_embeddings=32, attention_factor=1.1)
LLAMA3 = RopeConfig(theta=5e5, scaling="llama3", factor=8.0, high_freq_factor=3.0, original_max_position_embeddings=99)


def make_config(**changes) -> Eagle3Config:
    sizes = {
        "hidden_size": 8,
        "target_hidden_size": 8,
        "intermediate_size": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "vocab_size": 20,
        "draft_vocab_size": 5,
        "tap_layers": (1, 5, 8),
        "rms_norm_eps": 3e-6,
        "max_position_embeddings": 321,
        "rope": RopeConfig(theta=777.0),
    }
    return Eagle3Config(**{**sizes, **changes})


def make_draft(seed: int = 0, **changes) -> Eagle3Draft:
    draft = Eagle3Draft(make_config(**changes))
    init_draft(draft, seed)
    if draft.config.draft_vocab_size == 5:
        d2t, t2d = vocab_maps(torch.tensor([1, 4, 7, 8, 19]), 20)
        draft.d2t.copy_(d2t)
        draft.t2d.copy_(t2d)
    with torch.no_grad():  # as training would: every parameter moves
        for parameter in draft.parameters():
            parameter += 0.01
    return draft


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope": YARN, "sliding_window": 7, "norm_before_residual": True, "norm_before_fc": True},
        {"rope": LLAMA3, "fc_norm": True, "norm_output": True, "attention_bias": True},
        {"own_embedding": True, "hidden_size": 6, "tap_layers": (0, 3)},
        {"draft_vocab_size": 20},
    ],
)
def test_round_trip(tmp_path, family, changes):
    """Known failures 21 and 25: config, flags, RoPE, map and every value come back."""
    draft, unserved = make_draft(**changes), UNSERVED if family == "sglang" else ()
    save_draft(draft, tmp_path / "draft", family=family, ignore=unserved)
    again = load_draft(tmp_path / "draft")
    assert again.config == draft.config
    state, expected = again.state_dict(), draft.state_dict()
    assert state.keys() == expected.keys()
    for name in expected:
        assert torch.equal(state[name], expected[name]), name
    save_draft(again, tmp_path / "twice", family=family, ignore=unserved)
    for name in ("model.safetensors", "config.json", "README.md"):
        assert (tmp_path / "twice" / name).read_bytes() == (tmp_path / "draft" / name).read_bytes()


@pytest.mark.parametrize("family", ["vllm", "speculators"])
def test_query_and_key_norms(tmp_path, family):
    save_draft(make_draft(qk_norm=True), tmp_path / "draft", family=family)
    assert load_draft(tmp_path / "draft").config.qk_norm
    raw = json.loads((tmp_path / "draft/config.json").read_text())
    if family == "vllm":
        assert raw["architectures"] == ["Eagle3Qwen3ForCausalLM"]
    with pytest.raises(ConfigError, match="qk_norm.*SGLang"):
        save_draft(make_draft(qk_norm=True), tmp_path / "other", family="sglang")


def test_what_each_family_writes(tmp_path):
    """Known failure 26: ids are explicit, one convention each; names and maps as servers expect them."""
    raw, names = {}, {}
    for family in FAMILIES:
        save_draft(make_draft(rope=YARN), tmp_path / family, family=family, verifier="org/policy")
        raw[family] = json.loads((tmp_path / family / "config.json").read_text())
        names[family] = set(load_file(tmp_path / family / "model.safetensors"))
    assert raw["sglang"]["eagle_config"] == {IDS: [1, 5, 8], "use_aux_hidden_state": True}
    assert IDS not in raw["sglang"]
    for family in ("vllm", "speculators"):
        assert raw[family][IDS] == [2, 6, 9]
        assert "eagle_config" not in raw[family]
    assert raw["sglang"]["architectures"] == raw["vllm"]["architectures"] == ["LlamaForCausalLMEagle3"]
    assert raw["speculators"]["architectures"] == ["Eagle3Speculator"]
    assert raw["speculators"]["speculators_model_type"] == "eagle3"
    assert raw["speculators"]["speculators_config"]["algorithm"] == "eagle3"
    assert raw["speculators"]["speculators_config"]["verifier"]["name_or_path"] == "org/policy"
    assert "speculators_config" not in raw["vllm"]
    for settings in (raw["sglang"], raw["vllm"], raw["speculators"]["transformer_layer_config"]):
        assert settings["rope_theta"] == settings["rope_parameters"]["rope_theta"] == 1e6
        assert settings["rope_scaling"]["factor"] == settings["rope_parameters"]["factor"] == 4.0
        assert settings["max_position_embeddings"] == 321
    for family, prefix in (("sglang", "midlayer."), ("vllm", "layers.0."), ("speculators", "layers.0.")):
        assert prefix + "hidden_norm.weight" in names[family]
        assert sum(name.startswith(prefix) for name in names[family]) == 10
        assert {"d2t", "t2d", "lm_head.weight", "fc.weight", "norm.weight"} < names[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_vocabulary_has_no_map(tmp_path, family):
    save_draft(make_draft(draft_vocab_size=20), tmp_path / "draft", family=family)
    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "draft/model.safetensors"))


def test_dtype_of_the_file(tmp_path):
    draft = make_draft()
    save_draft(draft, tmp_path / "draft", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "draft/model.safetensors")
    assert stored["fc.weight"].dtype == torch.bfloat16
    assert stored["d2t"].dtype == torch.int64
    assert json.loads((tmp_path / "draft/config.json").read_text())["torch_dtype"] == "bfloat16"
    again = load_draft(tmp_path / "draft")
    assert torch.equal(again.fc.weight, draft.fc.weight.bfloat16().float())


def test_never_overwrites_unasked(tmp_path):
    """Known failure 30: nor does a refused export leave anything behind."""
    save_draft(make_draft(), tmp_path / "draft")
    before = (tmp_path / "draft/model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match="draft"):
        save_draft(make_draft(seed=1), tmp_path / "draft")
    broken = make_draft(seed=1)
    with torch.no_grad():
        broken.fc.weight[0, 0] = float("nan")
    with pytest.raises(ConfigError, match="fc.weight.*NaN"):
        save_draft(broken, tmp_path / "draft", overwrite=True)
    assert (tmp_path / "draft/model.safetensors").read_bytes() == before
    save_draft(make_draft(seed=1), tmp_path / "draft", overwrite=True)
    assert (tmp_path / "draft/model.safetensors").read_bytes() != before
    assert [p.name for p in tmp_path.iterdir()] == ["draft"]


@pytest.mark.parametrize("name", ["lm_head.weight", "fc.weight", "midlayer.mlp.up_proj.weight", "embed_tokens.weight"])
def test_an_untrained_tensor_is_not_exported(tmp_path, name):
    """Known failure 22: still the initial draw, all zero, or absent."""
    draft = make_draft(own_embedding=True)
    fresh = Eagle3Draft(draft.config)
    init_draft(fresh, 0)
    states = {
        "initialised with": {**draft.state_dict(), name: fresh.state_dict()[name]},
        "one value everywhere": {**draft.state_dict(), name: torch.zeros_like(draft.state_dict()[name])},
        "is missing": {k: v for k, v in draft.state_dict().items() if k != name},
    }
    for reason, state in states.items():
        with pytest.raises(ConfigError, match=f"{name}.*{reason}"):
            save_draft(draft, tmp_path / "draft", state=state)
    assert not list(tmp_path.iterdir())
    save_draft(draft, tmp_path / "draft", state=draft.state_dict())


def rewrite(folder, *, config=None, tensors=None, drop=()):
    """Change entries of a written folder (None removes a config key)."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    for key, value in (config or {}).items():
        raw.pop(key, None) if value is None else raw.__setitem__(key, value)
    path.write_text(json.dumps(raw))
    stored = {**load_file(folder / "model.safetensors"), **(tensors or {})}
    save_file({k: v for k, v in stored.items() if k not in drop}, folder / "model.safetensors")


@pytest.mark.parametrize(
    "change, named",
    [
        ({"drop": ["lm_head.weight"]}, r"lm_head.weight.*is missing"),
        ({"drop": ["layers.0.hidden_norm.weight"]}, "midlayer.hidden_norm.weight.*is missing"),
        ({"drop": ["d2t"]}, "d2t.*is missing"),
        ({"tensors": {"lm_head.weight": torch.zeros(5, 8)}}, "lm_head.weight.*never trained"),
        ({"tensors": {"lm_head.weight": torch.ones(4, 8)}}, r"shape of lm_head.weight=\(4, 8\).*\(5, 8\)"),
        ({"tensors": {"fc.weight": torch.ones(8, 16)}}, r"shape of fc.weight=\(8, 16\)"),
        ({"tensors": {"fc.weight": torch.ones(8, 24, dtype=torch.int8)}}, "dtype of fc.weight=torch.int8"),
        ({"tensors": {"norm.weight": torch.full((8,), float("inf"))}}, "norm.weight.*infinity"),
        ({"tensors": {"midlayer.hidden_norm.weight": torch.ones(8)}}, "midlayer.hidden_norm.weight.*twice"),
        ({"tensors": {"layers.1.mlp.up_proj.weight": torch.ones(8)}}, "layers.1.mlp.up_proj.weight.*not understood"),
        ({"tensors": {"d2t": torch.full((5,), 17)}}, "d2t"),
        ({"tensors": {"t2d": torch.arange(20) < 5}}, "t2d"),
        ({"config": {"draft_vocab_size": 6}}, "lm_head.weight|d2t"),
        ({"config": {"draft_vocab_size": 0}}, "draft_vocab_size=0"),
        ({"config": {"vocab_size": 24}}, "t2d"),
        ({"config": {"target_hidden_size": 16}}, "hidden_size"),
        ({"config": {"qkv_scale": 2.0}}, "qkv_scale=2.0: is not understood"),
        ({"config": {"quantization_config": {"bits": 4}}}, "quantization_config.*not understood"),
        ({"config": {"hidden_act": "gelu"}}, "hidden_act='gelu'"),
        ({"config": {"num_hidden_layers": 2}}, "num_hidden_layers=2"),
        ({"config": {"tie_word_embeddings": True}}, "tie_word_embeddings=True"),
        ({"config": {"norm_output": "yes"}}, "norm_output='yes'"),
        ({"config": {"architectures": ["LlamaForCausalLM"]}}, "architectures=.*LlamaForCausalLM'"),
        ({"config": {"model_type": "mamba"}}, "model_type='mamba'"),
        ({"config": {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}}}, "mrope_section"),
        ({"config": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}}, "dynamic"),
        ({"config": {"rope_theta": 5.0}}, "rope_theta=5.0.*disagrees.*777"),
        ({"config": {"sliding_window": 512}}, "sliding_window=512.*use_sliding_window"),
        ({"config": {"layer_types": ["sliding_attention"]}}, "sliding_window=None"),
        ({"config": {"layer_types": ["chunked_attention"]}}, "chunked_attention"),
        ({"config": {IDS: None}}, "norm_output=False.*SpecForge"),
        ({"config": {IDS: None, "norm_output": None}}, f"{IDS}=None.*give tap_layers"),
        ({"config": {IDS: [0, 3, 5]}}, "names the embedding"),
        ({"config": {"eagle_config": {IDS: [2, 6, 9]}}}, "disagrees"),
        ({"config": {"eagle_config": {"use_aux_hidden_state": False}}}, "use_aux_hidden_state=False"),
        ({"config": {"eagle_config": {"top_k": 3}}}, "eagle_config.top_k=3"),
        ({"config": {"rms_norm_eps": None}}, "rms_norm_eps=None"),
    ],
)
def test_refused_by_name(tmp_path, change, named):
    """Known failures 21, 22, 24-26: wrong names, shapes, maps, flags and ids are errors that say which."""
    save_draft(make_draft(), tmp_path / "draft")
    load_draft(tmp_path / "draft")
    rewrite(tmp_path / "draft", **change)
    with pytest.raises(ConfigError, match=named):
        load_draft(tmp_path / "draft")


def test_nothing_is_unpickled(tmp_path):
    """Known failure 34."""

    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("a pickle ran",))

    save_draft(make_draft(), tmp_path / "draft")
    (tmp_path / "draft/model.safetensors").unlink()
    (tmp_path / "draft/pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match="pickled weights are not read"):
        load_draft(tmp_path / "draft")
    with pytest.raises(ConfigError, match="config.json"):
        load_draft(tmp_path / "absent")


def test_ids_can_be_given_and_a_key_can_be_waved_through(tmp_path):
    save_draft(make_draft(), tmp_path / "draft", family="sglang")
    rewrite(tmp_path / "draft", config={"eagle_config": None, "note": "mine"})
    draft = load_draft(tmp_path / "draft", tap_layers=(0, 2, 4), ignore=["note"])
    assert draft.config.tap_layers == (0, 2, 4)
    save_draft(draft, tmp_path / "again", family="sglang")
    assert json.loads((tmp_path / "again/config.json").read_text())["note"] == "mine"


def test_t2d_follows_from_d2t(tmp_path):
    """vLLM needs d2t alone, and files without t2d exist."""
    save_draft(make_draft(), tmp_path / "draft")
    rewrite(tmp_path / "draft", drop=["t2d"])
    assert torch.equal(load_draft(tmp_path / "draft").t2d, make_draft().t2d)


FLAT = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 7,
    "eos_token_id": [8, 9],
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "max_window_layers": 24,
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "vocab_size": 300,
    "draft_vocab_size": 100,
    "eagle_config": {IDS: [1, 11, 21], "use_aux_hidden_state": True},
}
NESTED = {
    "architectures": ["Eagle3Speculator"],
    "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "draft_vocab_size": 100,
    IDS: [2, 12, 22],
    "embed_requires_grad": False,
    "has_no_defaults_at_init": False,
    "norm_before_residual": True,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.0}],
        "verifier": {"name_or_path": "org/policy", "architectures": ["LlamaForCausalLM"]},
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.5.0",
    "target_hidden_size": None,
    "transformer_layer_config": {
        **{k: FLAT[k] for k in ("hidden_act", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")},
        "head_dim": 16,
        "layer_types": ["sliding_attention"],
        "max_position_embeddings": 4096,
        "mlp_bias": False,
        "model_type": "llama",
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "sliding_window": 2048,
    },
}
PUBLIC = {
    "limit and theta by default": FLAT,
    "theta, no scaling": {**FLAT, "rope_theta": 1000000.0, "rope_scaling": None, "head_dim": 16},
    "a window that is off": {**FLAT, "sliding_window": 32768, "use_sliding_window": False},
    "no window": {**FLAT, "sliding_window": None, "use_sliding_window": False},
    "full attention in words": {**FLAT, "layer_types": ["full_attention"], "sliding_window": 99},
    "model type of another family": {**FLAT, "model_type": "qwen2"},
    "EAGLE-3.1": {**FLAT, "fc_norm": True, "norm_output": True},
    "llama3": {
        **FLAT,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "llama3",
        },
    },
    "speculators": NESTED,
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_configs_come_back_with_nothing_lost(name):
    raw = PUBLIC[name]
    config, family, kept = read_config(raw)
    written = json.loads(json.dumps(config_json(config, family, kept=kept)))

    def kept_in(old, new, path=""):
        for key, value in old.items():
            if isinstance(value, dict):
                kept_in(value, new[key], f"{path}{key}.")
            elif value is not None or key in new:
                assert new[key] == value or (key == "target_hidden_size" and value is None), path + key

    kept_in(raw, written)
    assert read_config(written) == (config, family, kept)
    for other in FAMILIES:  # and the draft is the same one in the other families' words
        again, read_as, _ = read_config(json.loads(json.dumps(config_json(config, other, kept=kept, ignore=UNSERVED))))
        assert again == config
        assert read_as == other


def test_what_public_configs_mean():
    flat, nested = read_config(FLAT)[0], read_config(NESTED)[0]
    assert flat.tap_layers == nested.tap_layers == (1, 11, 21)
    assert flat.head_dim == 8
    assert flat.target_hidden_size == 64
    assert flat.rope == RopeConfig(theta=10000.0)
    assert flat.sliding_window is None
    assert nested.sliding_window == 2048
    assert nested.norm_before_residual
    assert not flat.norm_before_residual
    assert nested.num_key_value_heads == 8
    assert read_config(PUBLIC["llama3"])[0].rope.scaling == "llama3"


@pytest.mark.parametrize(
    "change, named",
    [
        ({"speculators_model_type": "dflash"}, "speculators_model_type='dflash'"),
        ({"transformer_layer_config": None}, "transformer_layer_config"),
        ({"num_layers_x": 4}, "num_layers_x=4"),
        ({"transformer_layer_config": {**NESTED["transformer_layer_config"], "model_type": "mamba"}}, "mamba"),
        ({"transformer_layer_config": {**NESTED["transformer_layer_config"], "gate": 1}}, "gate=1"),
        ({IDS: None}, "give tap_layers"),
    ],
)
def test_nested_configs_are_refused_by_name(change, named):
    with pytest.raises(ConfigError, match=named):
        read_config({**NESTED, **change})
