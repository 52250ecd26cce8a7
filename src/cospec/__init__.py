"""Train a speculative-decoding draft together with its policy during RL, on torchtitan models.

The public names load on first use, so that `cospec.ops` works where torchtitan is not installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "config": (
        "AttentionConfig CheckpointConfig ConfigError DataConfig DraftConfig Eagle3Config EvalConfig MeshConfig "
        "OfflineConfig OptimConfig PipelineConfig PolicyConfig RLConfig RolloutConfig RopeConfig RunConfig "
        "TrainConfig WarmStartConfig"
    ),
    "records": "Batch Document Rollout SamplingParams StepStats Taps",
    "layout": "PackedLayout",
    "mesh": "Mesh build_mesh close_mesh",
    "ops.ring": "open_trunk trunk_branch_attention",
    "draft.attach": "attach_draft",
    "draft.eagle3": "Eagle3Draft",
    "export.eagle3": "load_draft save_draft",
    "policy.build": "build_policy full_state",
    "rollout.engine": "Engine acceptance_length",
    "rollout.native": "NativeEngine",
    "rl.tasks": "Prompt Task",
    "train.cli": "main",
    "train.setup": "build_learner",
    "train.step": "Learner cotrain_step",
    "train.loop": "run_rl run_sft",
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'cospec' has no attribute {name!r}")
    return getattr(import_module(f"cospec.{_MODULE_OF[name]}"), name)
