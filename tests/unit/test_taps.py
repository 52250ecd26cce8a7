"""Tap recorder: the right tensors, detached, once per forward, silent otherwise."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cospec.config import ConfigError, PolicyConfig, check_tap_layers, default_tap_layers
from cospec.policy.build import build_policy
from cospec.policy.taps import TapRecorder
from support.dense_context import DenseCausal

TOKENS = torch.arange(9)[None]


def policy_of(layers: int = 4):
    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": layers}
    return build_policy(PolicyConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=8))


def run(policy):
    return policy(TOKENS, positions=TOKENS, attention_masks=DenseCausal())


def test_taps_are_the_residual_stream_after_each_layer():
    """Known failure 26: layer ids are 0-based outputs. Checked by feeding the taps to the rest of the policy."""
    policy = policy_of()
    recorder = TapRecorder(policy, (0, 2))
    with recorder.recording() as recording:
        hidden = run(policy)
    taps = recording.take(hidden)
    with torch.no_grad():
        x = policy.tok_embeddings(TOKENS)
        assert torch.equal(taps.embeddings, x[0])
        for i in range(4):
            x = policy.layers[str(i)](x, DenseCausal(), TOKENS)
            if i in (0, 2):
                assert torch.equal(taps.hidden[(0, 2).index(i)], x[0])
        assert torch.equal(taps.final_hidden, policy.norm(x)[0])


def test_taps_are_detached():
    """Known failure 10."""
    policy = policy_of()
    recorder = TapRecorder(policy, (1,))
    with recorder.recording() as recording:
        hidden = run(policy)
    taps = recording.take(hidden)
    for tap in (*taps.hidden, taps.embeddings, taps.final_hidden):
        assert not tap.requires_grad
        assert tap.shape == (9, 16)
    assert hidden.requires_grad


def test_recording_leaves_outputs_and_gradients_bit_equal():
    plain, tapped = policy_of(), policy_of()
    recorder = TapRecorder(tapped, (0, 1, 3))
    run(plain).sum().backward()
    with recorder.recording():
        hidden = run(tapped)
    hidden.sum().backward()
    for (name, a), b in zip(plain.named_parameters(), tapped.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad), name


def test_nothing_is_recorded_outside_and_recompute_records_nothing():
    """Known failure 13: checkpointed blocks run again in backward."""
    policy = policy_of()
    recorder = TapRecorder(policy, (1, 2))
    calls = []
    block = policy.layers["1"]
    inner = block.forward
    block.forward = lambda *args: checkpoint(inner, *args, use_reentrant=False)
    block.attention.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        run(policy)  # evaluation
    calls.clear()
    with recorder.recording() as recording:
        hidden = run(policy)
    taken = recording.take(hidden)
    before = [t.clone() for t in taken.hidden]
    hidden.sum().backward()
    assert len(calls) == 2  # it did run again
    assert all(torch.equal(a, b) for a, b in zip(before, taken.hidden, strict=True))


def test_misuse_is_named():
    policy = policy_of()
    recorder = TapRecorder(policy, (1, 2))
    with recorder.recording() as recording:
        pass
    with pytest.raises(RuntimeError, match=r"layers \[1, 2\]"):
        recording.take(torch.zeros(1, 9, 16))
    with recorder.recording(), pytest.raises(RuntimeError, match="already active"), recorder.recording():
        pass
    with recorder.recording():
        run(policy)
        with pytest.raises(RuntimeError, match="twice"):
            run(policy)
    with recorder.recording() as recording:  # usable again after errors
        hidden = run(policy)
    recording.take(hidden)


def test_removed_hooks_record_nothing():
    policy = policy_of()
    recorder = TapRecorder(policy, (1,))
    recorder.remove()
    with recorder.recording() as recording:
        hidden = run(policy)
    with pytest.raises(RuntimeError, match="was recorded"):
        recording.take(hidden)


@pytest.mark.parametrize("layers", [(), (1, 1), (2, 1), (-1, 2), (1, 4)])
def test_bad_layers_are_named(layers):
    with pytest.raises(ConfigError, match=r"draft\.tap_layers=.*distinct and ascending.*0\.\.3"):
        check_tap_layers(layers, 4)
    with pytest.raises(ConfigError):
        TapRecorder(policy_of(), layers)


def test_default_layers():
    assert default_tap_layers(36) == (1, 17, 32)
    assert default_tap_layers(28) == (1, 13, 24)
    assert default_tap_layers(12) == (1, 5, 8)
    for n in range(1, 60):
        layers = default_tap_layers(n)
        assert len(layers) == min(3, n)
        assert check_tap_layers(layers, n) == layers
        if n >= 7:
            assert layers == (1, n // 2 - 1, n - 4)
    with pytest.raises(ConfigError):
        default_tap_layers(0)
