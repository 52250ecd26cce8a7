"""A small trained policy, drafts for it, and an engine of the real vLLM around them."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch

from cospec.config import DraftConfig, OptimConfig, PolicyConfig, RunConfig, TrainConfig
from cospec.draft.vocab import choose_vocab, count_tokens
from cospec.export.eagle3 import save_draft
from cospec.features.vocab import save_vocab
from cospec.mesh import Mesh
from cospec.policy.build import build_policy, full_state
from cospec.policy.weights import save_hf
from cospec.records import Document
from cospec.train.setup import build_learner
from cospec.train.step import cotrain_step

VOCAB, DRAFT_VOCAB, STEPS = 60, 40, 50
POLICY = PolicyConfig(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    max_position_embeddings=256,
)


def need_vllm() -> None:
    spec = importlib.util.find_spec("vllm")  # this folder's own name is no package
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed: scripts/test_vllm.sh installs it and runs these", allow_module_level=True)


class Language:
    """Sequences in which each token has four likely successors: learnable in seconds, not deterministic."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)
        self.table = torch.randint(VOCAB, (VOCAB, 4), generator=self.generator)

    def sequence(self, length: int) -> list[int]:
        tokens = torch.randint(VOCAB, (2,), generator=self.generator).tolist()
        shares = torch.tensor([0.6, 0.2, 0.15, 0.05])
        while len(tokens) < length:
            choice = int(torch.multinomial(shares, 1, generator=self.generator))
            tokens.append((int(self.table[tokens[-1], choice]) + tokens[-2] % 2) % VOCAB)
        return tokens

    def documents(self, count: int = 12, length: int = 40) -> list[Document]:
        return [
            Document(torch.tensor(self.sequence(length)), torch.ones(length, dtype=torch.bool)) for _ in range(count)
        ]


def run_config(path, draft_vocab: int | None = DRAFT_VOCAB, **draft_settings) -> RunConfig:
    if draft_vocab is not None:
        counts = count_tokens([d.input_ids for d in Language().documents(40)], VOCAB)
        draft_settings["vocab_path"] = str(path / "vocab.safetensors")
        save_vocab(draft_settings["vocab_path"], choose_vocab(counts, draft_vocab), counts, tokenizer=None, policy=None)
    return RunConfig(
        policy=POLICY,
        policy_optim=OptimConfig(lr=4e-3),
        draft=DraftConfig(num_passes=3, **draft_settings),
        draft_optim=OptimConfig(lr=4e-3),
        train=TrainConfig(row_tokens=1024),
    )


def train(path, draft_vocab: int | None = DRAFT_VOCAB, steps: int = STEPS, policy=None, **draft_settings):
    """(policy, draft) after some steps of co-training; `policy` given: the draft alone is new and trained."""
    language = Language()
    learner = build_learner(run_config(path, draft_vocab, **draft_settings), Mesh(torch.device("cpu")))
    if policy is not None:
        learner.runner.policy.load_state_dict(policy.state_dict())
    for step in range(steps):
        cotrain_step(learner, language.documents(), step=step, train_policy=policy is None)
    return learner.runner.policy.requires_grad_(False), learner.draft.model.requires_grad_(False)


def random_draft(draft, seed: int = 7):
    """The same shape and vocabulary, other weights."""
    other = copy.deepcopy(draft)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return other


def other_policy(policy, seed: int = 5):
    other = build_policy(POLICY, seed=seed)
    other.load_state_dict({k: v + 0.02 * torch.sin(3 * v + 1) for k, v in policy.state_dict().items()})
    return other.requires_grad_(False)


def folders(path, policy, draft, family: str = "vllm"):
    """(policy folder, draft folder)."""
    save_hf(policy.config, full_state(policy), path / "policy", overwrite=True)
    save_draft(draft, path / f"draft-{family}", family=family, verifier=str(path / "policy"), overwrite=True)
    return path / "policy", path / f"draft-{family}"


def prompts(count: int, longest: int = 12, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]
