"""Do an engine's proposals and acceptances equal what the training code computes?

    .venv-vllm/bin/python scripts/replay_parity.py --policy POLICY --draft DRAFT [--engine vllm] [--temperature 1]

Rolls out from a policy (Hugging Face folder) and a draft (EAGLE-3 folder), records every
chain of proposals, and recomputes them with the training-time test (cospec.rollout.replay).
At temperature 0 every proposal and every acceptance must be equal; else the number of
accepted proposals must be what the probabilities say. Ends with code 1 when they disagree.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from cospec.config import PolicyConfig
from cospec.export.eagle3 import load_draft
from cospec.policy.build import build_policy
from cospec.records import SamplingParams
from cospec.rollout.engine import acceptance_by_position, acceptance_length
from cospec.rollout.native import NativeEngine
from cospec.rollout.replay import chains_of, replay


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    policy = build_policy(PolicyConfig(hf_path=args.policy)).requires_grad_(False)
    draft = load_draft(args.draft)
    prompts = read_prompts(args, policy.config.vocab_size)
    longest = max(map(len, prompts)) + args.max_new_tokens
    options = {"num_draft_tokens": args.num_draft_tokens, "max_len": longest, "record_proposals": True}
    if args.engine == "vllm":
        from cospec.rollout.vllm import VLLMEngine

        engine = VLLMEngine(args.policy, policy.config, args.draft, draft.config, **options)
    else:
        engine = NativeEngine(policy, draft, **options)
    params = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=args.seed)
    rollouts = engine.generate(prompts, params)
    found = replay(policy, draft, chains_of(rollouts, engine.proposals), params, draft_filters=args.engine == "native")
    summary = asdict(found) | {
        "engine": args.engine,
        "agrees": found.agrees,
        "acceptance_length": acceptance_length(rollouts),
        "acceptance_by_position": acceptance_by_position(rollouts),
    }
    print(json.dumps(summary, indent=2))
    return 0 if found.agrees else 1


def read_prompts(args: argparse.Namespace, vocab_size: int) -> list[list[int]]:
    """A jsonl file with `prompt_ids` (or `input_ids`) in each line, or random prompts of 2..16 tokens."""
    if args.prompts is not None:
        lines = [json.loads(line) for line in Path(args.prompts).read_text().splitlines() if line.strip()]
        return [line.get("prompt_ids", line.get("input_ids")) for line in lines]
    generator = torch.Generator().manual_seed(args.seed)
    lengths = torch.randint(2, 17, (args.num_prompts,), generator=generator).tolist()
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--engine", choices=("native", "vllm"), default="vllm")
    parser.add_argument("--prompts", help="jsonl; without it random prompts")
    parser.add_argument("--num_prompts", type=int, default=24)
    parser.add_argument("--max_new_tokens", type=int, default=24)
    parser.add_argument("--num_draft_tokens", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
