"""Whole runs small enough for tests: what they are, and what two of them must have in common."""

import json
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file

from cospec.config import (
    CheckpointConfig,
    DraftConfig,
    EvalConfig,
    OptimConfig,
    PolicyConfig,
    RLConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
    WarmStartConfig,
)

POLICY = PolicyConfig(
    vocab_size=64,
    num_hidden_layers=4,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)


def tiny_sft(folder, *, resume=False, every=2, steps=6, draft_optim="muon"):
    """Muon for the draft and a learning rate that follows the step, so that both must come back."""
    return RunConfig(
        output_dir=str(folder),
        policy=POLICY,
        policy_optim=OptimConfig(lr=1e-3, warmup_steps=2, decay_steps=3),
        draft=DraftConfig(num_passes=2, share=0.5),
        draft_optim=OptimConfig(name=draft_optim, lr=1e-3),
        train=TrainConfig(steps=steps, batch_documents=4, row_tokens=128),
        checkpoint=CheckpointConfig(every=every, resume=resume),
    )


def tiny_rl(folder, *, resume=False, every=2, steps=5, warm_steps=4):
    return RunConfig(
        output_dir=str(folder),
        policy=replace(POLICY, vocab_size=256),
        policy_optim=OptimConfig(lr=1e-3),
        draft=DraftConfig(num_passes=2, share=0.5),
        warm_start=WarmStartConfig(
            policy_steps=warm_steps, batch_documents=4, draft_steps=warm_steps, draft_batch_documents=4
        ),
        rl=RLConfig(prompts_per_step=2, samples_per_prompt=4),
        rollout=RolloutConfig(num_draft_tokens=2, max_new_tokens=32),
        train=TrainConfig(steps=steps, row_tokens=256),
        eval=EvalConfig(prompts=2, every=2, speed_batch=2),
        checkpoint=CheckpointConfig(every=every, resume=resume),
    )


def is_timing(name):
    return name.endswith("_s") or name == "rollout_tokens_per_s"


def record(folder):
    """metrics.jsonl and evaluations.jsonl without the clock's figures."""
    found = {}
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        rows = [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]
        found[name] = [{k: v for k, v in row.items() if not is_timing(k)} for row in rows]
    return found


def final_state(folder):
    """Every tensor of the newest checkpoint of a single-rank run, by name; optimizers and random state too."""
    newest = max((Path(folder) / "checkpoints").glob("step-*"))
    state = {}
    for file in newest.glob("*.safetensors"):
        state |= load_file(file)
    return state


def assert_same_run(got, want):
    """Equal to the bit: record and final weights, optimizer and random state."""
    assert record(got) == record(want)
    ours, theirs = final_state(got), final_state(want)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        assert ours[name].numpy().tobytes() == value.numpy().tobytes(), name
