"""The native engine: caches, limits, refit, randomness, and agreement with the training code."""

import pytest
import torch

from cospec.draft.ttt import unroll
from cospec.layout import PackedLayout
from cospec.policy.attention import PackedContext
from cospec.policy.taps import TapRecorder
from cospec.records import Batch, SamplingParams
from cospec.rollout import NativeEngine, acceptance_by_position, acceptance_length
from cospec.rollout.sampling import PROPOSE, distribution, draw, policy_logp, stream_keys, uniforms
from support.toy_lm import full_logits, random_prompts, table_draft, tiny_draft, tiny_policy

VOCAB = 40


@pytest.fixture(scope="module")
def policy():
    return tiny_policy(vocab_size=VOCAB, layers=3, sharpness=2.0, context=3.0)


def engine_of(policy, draft=None, **options):
    return NativeEngine(policy, draft, **{"num_draft_tokens": 4, "max_batch": 8, "max_len": 48, **options})


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("speculative", [False, True])
def test_logp_is_that_of_the_training_path(policy, temperature, speculative):
    """Caches, compaction and rollback give the logits of a whole forward pass; logp ignores top-k and top-p."""
    draft = table_draft(policy, "good") if speculative else None
    prompts = random_prompts(21, VOCAB, longest=24)
    params = SamplingParams(max_new_tokens=20, temperature=temperature, top_k=9, top_p=0.95, stop_token_ids=(3, 5))
    rollouts = engine_of(policy, draft).generate(prompts, params)
    logits = full_logits(policy, [r.prompt_ids + r.token_ids for r in rollouts])
    for rollout, prompt, logits_TV in zip(rollouts, prompts, logits, strict=True):
        assert rollout.prompt_ids == prompt
        logp_TV = policy_logp(logits_TV[len(prompt) - 1 : -1], temperature)
        expected = logp_TV.gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(rollout.logp), expected, rtol=0, atol=3e-4)
        if temperature == 0:
            assert rollout.token_ids == logp_TV.argmax(-1).tolist()


def test_a_sample_does_not_depend_on_its_batch(policy):
    draft = table_draft(policy, "good")
    prompts = random_prompts(13, VOCAB, longest=12)
    params = SamplingParams(max_new_tokens=16, seed=3)
    together = engine_of(policy, draft, max_batch=13).generate(prompts, params, list(range(100, 113)))
    order = [7, 2, 11, 0]
    some = engine_of(policy, draft, max_batch=3).generate([prompts[i] for i in order], params, [100 + i for i in order])
    assert [r.token_ids for r in some] == [together[i].token_ids for i in order]
    assert [r.accepted for r in some] == [together[i].accepted for i in order]
    repeated = engine_of(policy, draft).generate([prompts[0]] * 6, params)
    assert len({tuple(r.token_ids) for r in repeated}) == 6
    other_seed = engine_of(policy, draft).generate([prompts[0]], SamplingParams(max_new_tokens=16, seed=4), [100])
    assert other_seed[0].token_ids != together[0].token_ids


@pytest.mark.parametrize("max_new, max_len", [(1, 48), (2, 48), (6, 48), (40, 25), (40, 21)])
def test_nothing_is_proposed_past_the_limit(policy, max_new, max_len):
    """Known failure 41: the last window is clamped."""
    prompts = random_prompts(12, VOCAB, longest=20)
    engine = engine_of(policy, table_draft(policy, "good"), max_len=max_len, record_proposals=True)
    params = SamplingParams(max_new_tokens=max_new, temperature=0)
    rollouts = engine.generate(prompts, params)
    plain = engine_of(policy, max_len=max_len).generate(prompts, params)
    for prompt, rollout, chains, same in zip(prompts, rollouts, engine.proposals, plain, strict=True):
        limit = min(max_new, max_len - len(prompt))
        assert len(rollout.token_ids) == limit
        assert rollout.finish_reason == "length"
        assert rollout.token_ids == same.token_ids
        for start, chain in chains:
            # One token follows a fully accepted chain.
            assert start + len(chain) <= len(prompt) + limit - 1
        assert rollout.proposed == [sum(len(c) > j for _, c in chains) for j in range(len(rollout.proposed))]


def test_stop_tokens_cut_accepted_chains(policy):
    draft = table_draft(policy, "good")
    prompts = random_prompts(30, VOCAB, longest=10)
    free = engine_of(policy, draft).generate(prompts, SamplingParams(max_new_tokens=24, seed=1))
    stops = (1, 8, 20)
    cut = engine_of(policy, draft).generate(prompts, SamplingParams(max_new_tokens=24, seed=1, stop_token_ids=stops))
    assert any(r.finish_reason == "stop" for r in cut)
    for a, b in zip(cut, free, strict=True):
        n = next((i + 1 for i, t in enumerate(b.token_ids) if t in stops), 24)
        assert a.token_ids == b.token_ids[:n]
        assert a.finish_reason == ("stop" if a.token_ids[-1] in stops else "length")
        assert len(a.logp) == len(a.token_ids)
        # Every token comes from the prefill, from the draft, or is the one that a verification adds.
        assert len(a.token_ids) in (1 + sum(a.accepted) + a.verify_steps, sum(a.accepted) + a.verify_steps)


def test_acceptance_counts():
    policy = tiny_policy(vocab_size=VOCAB)
    draft = table_draft(policy, "good")
    rollouts = engine_of(policy, draft).generate(random_prompts(9, VOCAB, 9), SamplingParams(max_new_tokens=30))
    for r in rollouts:
        assert len(r.token_ids) == 1 + r.verify_steps + sum(r.accepted)
        assert r.proposed[0] >= r.verify_steps - 1  # the last step may have no room for a chain
    tokens, steps = sum(len(r.token_ids) - 1 for r in rollouts), sum(r.verify_steps for r in rollouts)
    assert acceptance_length(rollouts) == pytest.approx(tokens / steps)
    rates = acceptance_by_position(rollouts)
    assert rates == sorted(rates, reverse=True)
    plain = engine_of(policy).generate(random_prompts(9, VOCAB, 9), SamplingParams(max_new_tokens=30))
    assert acceptance_length(plain) == 1
    assert all(r.verify_steps == 29 and r.proposed == [] for r in plain)


@pytest.mark.parametrize(
    "prompts, sample_ids, message",
    [
        ([], None, r"prompts=\[\]"),
        ([[1], []], None, r"prompts\[1\]=\[\]"),
        ([[1] * 48], None, r"prompts\[0\] has 48 tokens.*max_len=48"),
        ([[1, 40]], None, r"token 40.*0\.\.39"),
        ([[1], [2]], [0], "sample_ids has 1 entries"),
    ],
)
def test_bad_requests_name_field_value_and_rule(policy, prompts, sample_ids, message):
    with pytest.raises(ValueError, match=message):
        engine_of(policy).generate(prompts, SamplingParams(), sample_ids)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_draft_tokens": 17}, "num_draft_tokens=17"),
        ({"max_batch": 0}, "max_batch=0"),
        ({"max_len": 129}, "max_len"),
    ],
)
def test_bad_sizes_are_refused(policy, options, message):
    with pytest.raises(ValueError, match=message):
        engine_of(policy, **options)


def test_a_broken_policy_is_an_error():
    policy = tiny_policy(vocab_size=VOCAB)
    engine = engine_of(policy, tiny_draft(policy))
    engine.refit(state_of(policy), None, version=1)
    with torch.no_grad():
        policy.norm.weight[3] = float("nan")
    with pytest.raises(RuntimeError, match=r"prompts\[0\]: the policy's logits .* not finite"):
        engine.generate([[1, 2]], SamplingParams())


def test_speculation_can_be_switched_for_a_comparison(policy):
    engine = engine_of(policy, table_draft(policy, "good"))
    prompts, params = random_prompts(5, VOCAB, 9), SamplingParams(max_new_tokens=12, temperature=0)
    usual = engine.generate(prompts, params)
    with engine.speculation(0):
        plain = engine.generate(prompts, params)
    with engine.speculation(2):
        short = engine.generate(prompts, params)
    assert [r.token_ids for r in plain] == [r.token_ids for r in usual] == [r.token_ids for r in short]
    assert [max(len(r.proposed) for r in rs) for rs in (usual, plain, short)] == [4, 0, 2]
    assert engine.generate(prompts, params) == usual
    with pytest.raises(ValueError, match="num_draft_tokens=1"), engine_of(policy).speculation(1):
        pass


def state_of(module, change=None):
    state = {name: value.clone() for name, value in module.state_dict().items()}
    if change is not None:
        for name, value in state.items():
            if value.is_floating_point() and change in name:
                value += 0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(8))
    return state


def test_refit():
    """Known failures 23 and 40: the draft survives, and its weights do not touch the policy's answers."""
    policy, other = (tiny_policy(vocab_size=VOCAB, seed=s, context=3.0) for s in (1, 2))
    draft = tiny_draft(policy)
    engine = engine_of(policy, draft)
    prompts, params = random_prompts(8, VOCAB, 9), SamplingParams(max_new_tokens=12, temperature=0.8)
    greedy = SamplingParams(max_new_tokens=12, temperature=0)
    before = engine.generate(prompts, params)
    assert sum(sum(r.accepted) for r in before) > 0
    engine.refit(state_of(policy), state_of(draft), version=1)
    after = engine.generate(prompts, params)
    assert [r.token_ids for r in after] == [r.token_ids for r in before]
    assert [r.accepted for r in after] == [r.accepted for r in before]
    assert {r.policy_version for r in before} == {0}
    assert {r.policy_version for r in after} == {1}

    answers = engine.generate(prompts, greedy)
    engine.refit(state_of(policy), state_of(draft, change="weight"), version=2)
    assert [r.token_ids for r in engine.generate(prompts, greedy)] == [r.token_ids for r in answers]

    engine.refit(state_of(other), None, version=3)
    fresh = engine_of(other, draft).generate(prompts, params)
    assert [r.token_ids for r in engine.generate(prompts, params)] == [r.token_ids for r in fresh]
    stats = engine.stats()
    assert (stats["refits"], stats["policy_version"]) == (3, 3)
    assert stats["tokens"] == 5 * 8 * 12
    assert stats["tokens_per_s"] > 0


def test_refit_checks_everything_before_it_changes_anything():
    policy = tiny_policy(vocab_size=VOCAB)
    draft = tiny_draft(policy)
    engine = engine_of(policy, draft)
    old_policy, old_draft = state_of(policy), state_of(draft)
    good = state_of(policy, change="weight")
    missing, unknown, misshapen = state_of(draft), state_of(draft), state_of(draft)
    missing.pop("d2t")
    unknown["midlayer.extra"] = torch.zeros(1)
    misshapen["lm_head.weight"] = torch.zeros(3, 3)
    for state, message in [(missing, "missing .*d2t"), (unknown, "unknown .*extra"), (misshapen, "lm_head.*shape")]:
        with pytest.raises(ValueError, match=message):
            engine.refit(good, state, version=1)
    with pytest.raises(ValueError, match="policy_state"):
        engine.refit({}, old_draft, version=1)
    with pytest.raises(ValueError, match="without a draft"):
        engine_of(policy).refit(good, old_draft, version=1)
    for module, old in ((policy, old_policy), (draft, old_draft)):
        assert all(torch.equal(value, old[name]) for name, value in module.state_dict().items())
    assert engine.stats()["policy_version"] == 0


SETTINGS = {
    "plain": {},
    "norm_output": {"norm_output": True, "qk_norm": True, "fc_norm": True},
    "norm_before": {"norm_before_residual": True, "norm_before_fc": True},
    "window": {"sliding_window": 5},
    "narrow": {"hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12},  # own embedding
    "vocabulary": {"vocab": torch.tensor([0, 1, 4, 9, 10, 11, 20, 23, 31, 32, 39])},
}


@pytest.mark.parametrize("name", list(SETTINGS))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_training_code_predicts_what_is_served(policy, name, temperature):
    """Known failures 3 and 43: the training-time test, run on what was proposed, proposes the same.

    Each served chain becomes a document: the tokens before it and the chain. Row t of pass j,
    t two before the chain's start, holds the draft's state for the chain's token j.
    """
    draft = tiny_draft(policy, **SETTINGS[name])
    engine = engine_of(policy, draft, record_proposals=True)
    prompts = random_prompts(10, VOCAB, longest=14)
    params = SamplingParams(max_new_tokens=14, temperature=temperature, seed=6)
    rollouts = engine.generate(prompts, params)
    if temperature > 0:
        assert sum(sum(r.accepted) for r in rollouts) > 0

    keys = stream_keys(params.seed, torch.arange(len(prompts))).tolist()
    documents, chains = [], []
    for key, rollout, proposals in zip(keys, rollouts, engine.proposals, strict=True):
        tokens = rollout.prompt_ids + rollout.token_ids
        for start, chain in proposals:
            documents.append(tokens[:start] + chain)
            chains.append((key, start, chain))
    assert len(chains) > 30

    layout = PackedLayout.from_lengths([len(d) for d in documents])
    ids = layout.shard(torch.tensor([t for d in documents for t in d]), 0)
    blank = torch.zeros(layout.num_local_rows)
    batch = Batch(layout, 0, ids, layout.positions(0), blank.bool(), blank, blank)
    recorder = TapRecorder(policy, draft.config.tap_layers)
    with torch.no_grad():
        with recorder.recording() as recording:
            hidden = policy(ids[None], positions=batch.positions[None], attention_masks=PackedContext(layout))
        states_KTD = unroll(draft, recording.take(hidden), batch, num_passes=4)
        logits_KTU = [draft.lm_head(state) for state in states_KTD]
    recorder.remove()

    wrong = []
    for i, (key, start, chain) in enumerate(chains):
        row = layout.doc_ends[i] + start - 2
        for j, token in enumerate(chain):
            probs = distribution(policy_logp(logits_KTU[j][row], temperature), params)
            u = uniforms(torch.tensor(key), torch.tensor(start + j), PROPOSE)
            predicted = draw(probs, u, params)
            predicted = predicted if draft.policy_ids is None else draft.policy_ids[predicted]
            wrong += [(i, j)] if predicted != token else []
    assert not wrong
