"""What a refit sends to vLLM (vLLM's side of it: tests/vllm)."""

import pytest
import torch

from cospec.config import DraftConfig, PolicyConfig
from cospec.draft.attach import attach_draft
from cospec.mesh import Mesh
from cospec.policy.build import build_policy, full_state
from cospec.policy.stream import WeightStream
from cospec.policy.weights import to_hf
from cospec.rollout.vllm_refit import translate

SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
POLICIES = {
    "qwen3": PolicyConfig(**SIZES, **HEADS),
    "tied": PolicyConfig(**SIZES, **HEADS, tie_word_embeddings=True),
    "mixture": PolicyConfig(model_type="qwen3_moe", **SIZES, **HEADS, **EXPERTS),
}


class Watched(WeightStream):
    """Says whether it was read."""

    read = False

    def items(self):
        self.read = True
        return super().items()


def stream(module):
    return Watched([module], Mesh(torch.device("cpu")))


@pytest.mark.parametrize("name", POLICIES)
def test_a_stream_becomes_what_a_state_dict_becomes(name):
    policy = build_policy(POLICIES[name], seed=1)
    draft = attach_draft(policy, DraftConfig(), seed=2)
    sent, draft_tensors = translate(policy.config, draft, stream(policy), stream(draft))
    assert sent.passing
    got = [(key, value.clone()) for key, value in sent.tensors]
    assert sent.declared == [(key, tuple(value.shape), value.dtype) for key, value in got]
    expected = to_hf(policy.config, full_state(policy))
    assert dict(got).keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in got)
    whole = {key for key, _ in draft_tensors().tensors}
    assert whole == set(draft.state_dict()) - {"d2t", "t2d"}  # its vocabulary is the policy's: no map
    kept = translate(policy.config, draft, full_state(policy), full_state(draft))[0]
    assert dict(kept.tensors).keys() == expected.keys()
    assert not kept.passing


def test_what_does_not_fit_is_refused_before_a_tensor_is_read():
    policy = build_policy(POLICIES["qwen3"], seed=1)
    draft = attach_draft(policy, DraftConfig(), seed=2)
    other = build_policy(PolicyConfig(**SIZES | {"hidden_size": 48}, **HEADS), seed=1)
    short = build_policy(PolicyConfig(**SIZES | {"num_hidden_layers": 3}, **HEADS), seed=1)
    own = attach_draft(policy, DraftConfig(fc_norm=True), seed=2)
    for weights, speculator, message in (
        (other, draft, r"has shape \[40, 48\], the policy needs \[40, 32\]"),
        (short, draft, "state lacks tensors: layers.3"),
        (policy, own, r"draft_state: missing \[\], unknown"),
    ):
        streams = stream(weights), stream(speculator)
        with pytest.raises(ValueError, match=message):
            translate(policy.config, draft, *streams)
        assert not any(s.read for s in streams)
    with pytest.raises(ValueError, match="built without a draft"):
        translate(policy.config, None, stream(policy), stream(draft))


def test_a_vocabulary_that_does_not_fit_is_refused():
    policy = build_policy(POLICIES["qwen3"], seed=1)
    draft = attach_draft(policy, DraftConfig(draft_vocab_size=20), seed=2, vocab=torch.arange(0, 40, 2))
    wrong = full_state(draft) | {"d2t": full_state(draft)["d2t"] + 50}
    with pytest.raises(ValueError, match="d2t"):
        translate(policy.config, draft, full_state(policy), wrong)
