"""The real vLLM against the training code. A job of its own: scripts/test_vllm.sh."""

from __future__ import annotations

import math

import pytest
import torch
from vllm_case import DRAFT_VOCAB, VOCAB, folders, need_vllm, other_policy, prompts, random_draft, train

need_vllm()

from cospec.config import Eagle3Config  # noqa: E402
from cospec.policy.build import full_state  # noqa: E402
from cospec.records import SamplingParams  # noqa: E402
from cospec.rollout import NativeEngine, acceptance_by_position, acceptance_length, vllm_refit  # noqa: E402
from cospec.rollout.probe import chi_square, rank_uniforms  # noqa: E402
from cospec.rollout.replay import chains_of, replay  # noqa: E402
from cospec.rollout.sampling import policy_logp  # noqa: E402
from cospec.rollout.vllm import PROBES, EngineError, VLLMEngine, import_vllm  # noqa: E402
from support.toy_lm import full_logits  # noqa: E402

import_vllm()
import vllm.v1.sample.rejection_sampler as sampler  # noqa: E402

AS_INSTALLED = sampler.expand_batch_to_tokens  # before any engine repairs it

K, MAX_LEN = 3, 64
GREEDY = SamplingParams(max_new_tokens=32, temperature=0)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return train(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def engine(models, tmp_path_factory):
    """With the trained draft; tests that refit it put it back."""
    policy, draft = models
    path, draft_path = folders(tmp_path_factory.mktemp("engine"), policy, draft)
    return VLLMEngine(
        path, policy.config, draft_path, draft.config, num_draft_tokens=K, max_len=MAX_LEN, record_proposals=True
    )


@pytest.fixture
def refit(engine, models):
    """Give the engine other weights for one test."""

    def give(policy=None, draft=None, version=0):
        policy, draft = policy or models[0], draft or models[1]
        engine.refit(full_state(policy), full_state(draft), version)

    yield give
    give()


def outcome(engine, params=GREEDY, count=24):
    rollouts = engine.generate(prompts(count), params)
    return [r.token_ids for r in rollouts], [r.logp for r in rollouts], [(r.proposed, r.accepted) for r in rollouts]


def trainer_logp(policy, rollouts, temperature):
    """Of the response tokens: log-probabilities [T, V] of the training path, one tensor per rollout."""
    logits = full_logits(policy, [[*r.prompt_ids, *r.token_ids] for r in rollouts])
    return [policy_logp(x[len(r.prompt_ids) - 1 : -1], temperature) for x, r in zip(logits, rollouts, strict=True)]


def test_it_starts_lossless_and_says_what_it_repaired(engine):
    assert engine.probe.lossless
    assert engine.probe.tokens > 2000
    assert engine.probe.logp_gap < 1e-4
    assert engine.stats()["probe"] == engine.probe


def test_proposals_are_those_of_the_training_code(engine, models):
    """Known failures 26 and 43: 200 proposals and more, varied prompts and positions, a small draft vocabulary."""
    rollouts = engine.generate(prompts(40, longest=20, seed=3), GREEDY)
    found = replay(*models, chains_of(rollouts, engine.proposals), GREEDY, draft_filters=False)
    print(found)
    assert DRAFT_VOCAB < VOCAB
    assert found.proposals >= 1000
    assert found.agrees, found
    assert acceptance_length(rollouts) > 1.5


def test_sampled_acceptances_are_as_many_as_the_training_code_says(engine, models):
    for filters in ({}, {"top_k": 20, "top_p": 0.9}):
        params = SamplingParams(max_new_tokens=24, temperature=0.8, seed=5, **filters)
        chains = chains_of(engine.generate(prompts(64, seed=4), params), engine.proposals)
        found = replay(*models, chains, params, draft_filters=False)
        print(filters, found)
        assert found.tested > 1000
        assert found.agrees, found


def test_greedy_output_does_not_depend_on_the_draft(engine, models, refit, tmp_path):
    policy, draft = models
    trained = engine.generate(prompts(40), GREEDY)
    with engine.speculation(0):
        plain = engine.generate(prompts(40), GREEDY)
    with engine.speculation(2):
        shorter = engine.generate(prompts(40), GREEDY)
    refit(draft=random_draft(draft))
    guessing = engine.generate(prompts(40), GREEDY)
    oracle = NativeEngine(policy, max_len=MAX_LEN).generate(prompts(40), GREEDY)
    for other in (trained, plain, shorter, guessing):
        assert [r.token_ids for r in other] == [r.token_ids for r in oracle]
    assert acceptance_length(plain) == 1
    assert acceptance_length(guessing) < 1.2 < 1.5 < acceptance_length(trained)
    assert max(len(r.proposed) for r in shorter) == 2


def test_refits_there_and_back_restore_everything(engine, models, refit):
    """Known failures 23 and 40."""
    policy, draft = models
    start = outcome(engine)
    refit(version=3)
    assert outcome(engine) == start  # a refit that changes nothing changes nothing
    assert engine.generate(prompts(1), GREEDY)[0].policy_version == engine.policy_version == 3
    refit(policy=other_policy(policy), version=4)
    changed = outcome(engine)
    assert changed[0] != start[0]
    expected = NativeEngine(other_policy(policy), max_len=MAX_LEN).generate(prompts(24), GREEDY)
    assert changed[0] == [r.token_ids for r in expected]
    refit(version=5)
    assert outcome(engine) == start
    refit(draft=random_draft(draft), version=6)
    tokens, logp, counts = outcome(engine)
    assert (tokens, logp) == start[:2]  # to the bit: the policy does not feel its draft
    assert counts != start[2]
    engine.refit(full_state(policy), None, 7)
    assert outcome(engine)[2] == counts  # None keeps the draft
    refit(version=8)
    assert outcome(engine) == start


def test_a_draft_follows_its_policys_embeddings(engine, models, refit):
    """After a refit of the policy the proposals are those of the draft on the new taps and embeddings."""
    other = other_policy(models[0])
    refit(policy=other)
    rollouts = engine.generate(prompts(30, seed=6), GREEDY)
    found = replay(other, models[1], chains_of(rollouts, engine.proposals), GREEDY, draft_filters=False)
    assert found.proposals > 500
    assert found.agrees, found


@pytest.mark.parametrize("filters", [{}, {"top_k": 12, "top_p": 0.8}], ids=["plain", "filtered"])
@pytest.mark.parametrize("temperature", [0, 0.7, 1.0])
def test_log_probabilities_are_the_trainers(engine, models, temperature, filters):
    """Before top-k and top-p, at the sampling temperature."""
    params = SamplingParams(max_new_tokens=32, temperature=temperature, seed=2, **filters)
    rollouts = engine.generate(prompts(32, seed=8), params)
    worst = 0.0
    for rollout, logp in zip(rollouts, trainer_logp(models[0], rollouts, temperature), strict=True):
        own = logp.gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        worst = max(worst, float((own - torch.tensor(rollout.logp)).abs().max()))
    print(worst)
    assert worst < 1e-4


FILTERS = {"plain": {}, "filtered": {"top_k": 12, "top_p": 0.9}}
SAMPLINGS = [
    pytest.param(temperature, filters, quality, marks=() if quick else pytest.mark.slow)
    for temperature in (0.7, 1.0)
    for filters in FILTERS
    for quality in ("good", "bad")
    for quick in [(temperature, filters, quality) in ((0.7, "plain", "bad"), (1.0, "filtered", "good"))]
]


@pytest.mark.parametrize("temperature, filters, quality", SAMPLINGS)
def test_samples_have_the_policys_distribution(engine, models, refit, temperature, filters, quality):
    """Known failure 42: every response position 1..6, against distributions of the training code."""
    if quality == "bad":
        refit(draft=random_draft(models[1]))
    params = SamplingParams(max_new_tokens=6, temperature=temperature, seed=9, **FILTERS[filters])
    rollouts = engine.generate(prompts(4, longest=6, seed=10) * 250, params)
    p_values, z = position_tests(models[0], rollouts, params)
    print(p_values, z)
    assert min(p_values) > 1e-4


def position_tests(policy, rollouts, params):
    """(p-values of each position and of all together, z of all)."""
    logp = torch.stack(trainer_logp(policy, rollouts, params.temperature))  # [R, 6, V]
    token = torch.tensor([r.token_ids for r in rollouts])[..., None]
    rank = (logp > logp.gather(2, token)).sum(2) + 1
    ordered = logp.sort(-1, descending=True).values
    u = torch.rand(rank.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p_values = []
    for position in [slice(i, i + 1) for i in range(rank.shape[1])] + [slice(None)]:
        known = ordered[:, position].flatten(0, 1)
        values, forbidden = rank_uniforms(known, rank[:, position].flatten(), u[:, position].flatten(), params)
        assert forbidden <= len(known) // 1000  # a tie at the edge of top-p
        p, z = chi_square(values)
        p_values.append(p)
    return p_values, z


def test_the_fault_of_the_installed_version_is_found_refused_and_repaired(engine, models, monkeypatch, tmp_path):
    """vllm#55005. On a version without the fault nothing was replaced, and the engine is lossless as it is."""
    path, draft_path = folders(tmp_path, *models)
    options = {"num_draft_tokens": K, "max_len": MAX_LEN, "repair": False, "self_test": False}
    unrepaired = VLLMEngine(path, models[0].config, draft_path, models[1].config, **options)
    assert unrepaired.repaired == []
    assert unrepaired.require_lossless().lossless  # the repair of this process is in force
    monkeypatch.setattr(sampler, "expand_batch_to_tokens", AS_INSTALLED)
    if "expand_batch_to_tokens" not in engine.repaired:
        assert unrepaired.require_lossless().lossless
        return
    result = unrepaired.self_test(probes=PROBES[:1])
    print(result)
    assert not result.lossless
    assert result.z > 20
    with pytest.raises(EngineError, match="samples from a wrong distribution|died"):  # a wild top-k ends it
        unrepaired.require_lossless()


def test_acceptance_is_the_native_engines(engine, models):
    """Same prompts and weights, sampled: equal within what sampling explains; greedy: the same counts."""
    policy, draft = models
    native = NativeEngine(policy, draft, num_draft_tokens=K, max_len=MAX_LEN)
    ours, theirs = (e.generate(prompts(40), GREEDY) for e in (native, engine))
    assert [(r.proposed, r.accepted, r.verify_steps) for r in theirs] == [
        (r.proposed, r.accepted, r.verify_steps) for r in ours
    ]
    params = SamplingParams(max_new_tokens=32, temperature=1.0, seed=3)
    a, b = (e.generate(prompts(200, seed=12), params) for e in (native, engine))
    per_rollout = torch.tensor([[sum(r.accepted) / r.verify_steps for r in x] for x in (a, b)])
    error = math.sqrt(float(per_rollout.var(1).sum()) / 200)
    print(acceptance_length(a), acceptance_length(b), error, acceptance_by_position(a), acceptance_by_position(b))
    assert abs(acceptance_length(a) - acceptance_length(b)) < 4 * error


def test_requests_end_where_they_should(engine):
    """Known failure 41: stop tokens, token limits and the last window before max_len."""
    start = engine.generate(prompts(12), GREEDY)
    stop = start[0].token_ids[4]
    params = SamplingParams(max_new_tokens=32, temperature=0, stop_token_ids=(stop,))
    for before, after in zip(start, engine.generate(prompts(12), params), strict=True):
        end = before.token_ids.index(stop) + 1 if stop in before.token_ids else 32
        assert after.token_ids == before.token_ids[:end]
        assert after.finish_reason == ("stop" if end < 32 else before.finish_reason)
    full = [list(range(MAX_LEN - n)) for n in (1, 2, 3, 4, 5)]
    for n, rollout in zip(
        (1, 2, 3, 4, 5), engine.generate([[t % VOCAB for t in p] for p in full], GREEDY), strict=True
    ):
        assert (len(rollout.token_ids), rollout.finish_reason) == (n, "length")
        assert sum(rollout.accepted) + rollout.verify_steps + 1 == n


def test_a_sequence_near_the_limit_does_not_end_everybodys_speculation(engine, models):
    """Known failure 41: all run into max_len, at different steps, and all chains are the training code's."""
    params = SamplingParams(max_new_tokens=MAX_LEN, temperature=0)
    rollouts = engine.generate(prompts(24, longest=40, seed=14), params)
    assert {len(r.prompt_ids) + len(r.token_ids) for r in rollouts} == {MAX_LEN}
    found = replay(*models, chains_of(rollouts, engine.proposals), params, draft_filters=False)
    assert found.agrees, found


def test_same_request_same_rollouts(engine):
    params = SamplingParams(max_new_tokens=16, temperature=1.0, seed=6)
    first = engine.generate(prompts(8), params)
    torch.rand(5)
    state = torch.get_rng_state()
    assert engine.generate(prompts(8), params) == first
    assert torch.equal(torch.get_rng_state(), state)  # the trainer's random numbers are its own
    other = engine.generate(prompts(8), params, sample_ids=list(range(100, 108)))
    assert [r.token_ids for r in other] != [r.token_ids for r in first]


def test_wrong_weights_are_refused_before_anything_changes(engine, models):
    policy, draft = models
    start = outcome(engine)
    good, draft_good = full_state(other_policy(policy)), full_state(random_draft(draft))
    name = "layers.0.attention.wo.weight"
    lacking = {k: v for k, v in good.items() if k != name}
    with pytest.raises(ValueError, match="lacks"):
        engine.refit(lacking, draft_good, 9)
    with pytest.raises(ValueError, match=r"layers.0.attention.wo.weight has shape"):
        engine.refit(good | {name: good[name][:-1]}, draft_good, 9)
    with pytest.raises(ValueError, match="fc.weight"):
        engine.refit(good, {k: v for k, v in draft_good.items() if k != "fc.weight"}, 9)
    with pytest.raises(ValueError, match="lm_head.weight.*shape"):
        engine.refit(good, draft_good | {"lm_head.weight": draft_good["lm_head.weight"][1:]}, 9)
    with pytest.raises(ValueError, match="d2t"):
        engine.refit(good, draft_good | {"d2t": draft_good["d2t"] + 50}, 9)
    assert outcome(engine) == start
    assert engine.policy_version != 9


def test_a_draft_that_does_not_fit_is_refused_before_vllm_starts(models, tmp_path):
    policy, draft = models
    wrong = Eagle3Config(**vars(draft.config) | {"vocab_size": 61, "own_embedding": True})
    with pytest.raises(ValueError, match="vocab_size"):
        VLLMEngine(tmp_path, policy.config, tmp_path, wrong, max_len=MAX_LEN)
    wrong = Eagle3Config(**vars(draft.config) | {"tap_layers": (1, 2, 4)})
    with pytest.raises(ValueError, match="tap_layers"):
        VLLMEngine(tmp_path, policy.config, tmp_path, wrong, max_len=MAX_LEN)


FAMILIES = {
    "vllm, whole vocabulary": ("vllm", None, {}),
    "vllm, qwen3 norms": ("vllm", DRAFT_VOCAB, {"qk_norm": True}),
    "vllm, every norm": ("vllm", DRAFT_VOCAB, {"norm_before_residual": True, "fc_norm": True, "norm_output": True}),
    "vllm, own width": ("vllm", DRAFT_VOCAB, {"hidden_size": 96, "norm_before_fc": True}),
    "speculators": ("speculators", DRAFT_VOCAB, {"norm_before_residual": True}),
}


QUICK = ("vllm, qwen3 norms", "speculators")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
def test_both_families_propose_as_trained(models, tmp_path, name):
    family, draft_vocab, settings = FAMILIES[name]
    policy, draft = train(tmp_path, draft_vocab, steps=15, policy=models[0], **settings)
    path, draft_path = folders(tmp_path, policy, draft, family)
    options = {"num_draft_tokens": K, "max_len": MAX_LEN, "record_proposals": True, "self_test": False}
    engine = VLLMEngine(path, policy.config, draft_path, draft.config, **options)
    for other in (draft, random_draft(draft), draft):
        engine.refit(full_state(policy), full_state(other), 0)
        rollouts = engine.generate(prompts(24), GREEDY)
        found = replay(policy, other, chains_of(rollouts, engine.proposals), GREEDY, draft_filters=False)
        print(name, acceptance_length(rollouts), found)
        assert found.proposals >= 200
        assert found.agrees, found


def test_a_dead_engine_says_so(models, tmp_path, monkeypatch):
    policy, draft = models
    path, draft_path = folders(tmp_path, *models)
    options = {"num_draft_tokens": 0, "max_len": MAX_LEN, "self_test": False}
    engine = VLLMEngine(path, policy.config, draft_path, draft.config, **options)
    engine.refit(full_state(policy), full_state(draft), 1)  # a draft that is trained and not used
    rollouts = engine.generate(prompts(10), GREEDY)
    oracle = NativeEngine(policy, max_len=MAX_LEN).generate(prompts(10), GREEDY)
    assert [r.token_ids for r in rollouts] == [r.token_ids for r in oracle]

    def fail(*args, **kwargs):
        raise MemoryError("no blocks left")

    state = full_state(policy)
    monkeypatch.setattr(engine._llm, "generate", fail)
    with pytest.raises(EngineError, match="died .MemoryError: no blocks left"):
        engine.generate(prompts(2), GREEDY)
    monkeypatch.undo()
    with pytest.raises(EngineError, match="died earlier"):
        engine.generate(prompts(2), GREEDY)
    with pytest.raises(EngineError, match="died earlier"):
        engine.refit(state, None, 1)
    engine._dead = None

    def full(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(vllm_refit.HandOver, "send", full)
    with pytest.raises(OSError, match="disk full"):
        engine.refit(state, None, 1)
    with pytest.raises(EngineError, match="died earlier .its refit broke off: OSError: disk full"):
        engine.generate(prompts(2), GREEDY)
    assert all(torch.equal(v, full_state(policy)[k]) for k, v in state.items())
