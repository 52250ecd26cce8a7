"""A policy small enough to enumerate, and drafts of known quality for it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from cospec.config import DraftConfig, PolicyConfig
from cospec.draft.attach import attach_draft
from cospec.layout import PackedLayout
from cospec.policy.attention import PackedContext
from cospec.policy.build import build_policy
from cospec.records import SamplingParams
from cospec.rollout.sampling import distribution, policy_logp
from cospec.titan import head_weight


def tiny_policy(vocab_size=60, layers=2, size=32, seed=1, sharpness=1.0, context=12.0, max_len=128) -> nn.Module:
    """A policy whose logits are spread by `sharpness` (an untrained one is nearly uniform).

    `context` scales what attention adds: the less, the better a draft that sees one token.
    """
    config = PolicyConfig(
        vocab_size=vocab_size,
        hidden_size=size,
        intermediate_size=2 * size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=max_len,
    )
    policy = build_policy(config, seed=seed)
    with torch.no_grad():
        policy.lm_head.weight.mul_(sharpness * 9)
        for layer in policy.layers.values():  # let every block have a say: initial outputs are tiny
            layer.attention.wo.weight.mul_(context)
            layer.feed_forward.w2.weight.mul_(12)
    return policy


def tiny_draft(policy: nn.Module, seed=2, vocab: Tensor | None = None, **settings) -> nn.Module:
    """An untrained Eagle3Draft of the policy."""
    if vocab is not None:
        settings["draft_vocab_size"] = len(vocab)
    draft = attach_draft(policy, DraftConfig(**settings), seed=seed, vocab=vocab)
    with torch.no_grad():
        draft.lm_head.weight.mul_(20)
        draft.midlayer.mlp.down_proj.weight.mul_(10)
        draft.midlayer.self_attn.o_proj.weight.mul_(10)
    return draft


@torch.no_grad()
def full_logits(policy: nn.Module, documents: list[list[int]]) -> list[Tensor]:
    """Logits [T, V] of whole documents through the training path: the oracle of the caches."""
    layout = PackedLayout.from_lengths([len(d) for d in documents])
    positions = layout.positions(0)[None]
    tokens = layout.shard(torch.tensor(list(itertools.chain(*documents))), 0)[None]
    hidden = policy(tokens, positions=positions, attention_masks=PackedContext(layout))
    return list(layout.unshard([hidden[0] @ head_weight(policy).T]).split(layout.lengths))


def joint_distribution(policy: nn.Module, prompt: list[int], steps: int, params: SamplingParams) -> Tensor:
    """Exact probability of every response: float64 [V] * steps, by enumeration."""
    vocab_size = policy.config.vocab_size
    prefixes = [list(p) for p in itertools.product(range(vocab_size), repeat=steps - 1)]
    logits = torch.stack(full_logits(policy, [prompt + p for p in prefixes])).double()
    probs = distribution(policy_logp(logits, params.temperature), params)[:, len(prompt) - 1 :]  # [prefixes, steps, V]
    path = probs[:, :-1].gather(2, torch.tensor(prefixes)[..., None]).prod(1)
    return (path * probs[:, -1]).view([vocab_size] * steps)


def marginal(joint: Tensor, *steps: int) -> Tensor:
    """Sum over every response position but `steps`."""
    rest = tuple(d for d in range(joint.ndim) if d not in steps)
    return joint.sum(rest) if rest else joint


def chi_square_p(observed: Tensor, probs: Tensor) -> float:
    """p-value of counts against probabilities of the same shape; rare cells are pooled."""
    observed, expected = observed.flatten().double(), probs.flatten() * observed.sum()
    if observed[expected == 0].any():
        return 0.0
    order = expected.argsort()
    observed, expected = observed[order], expected[order]
    rare = int((expected < 8).sum())
    if rare:
        while rare < len(expected) and expected[:rare].sum() < 8:
            rare += 1
        observed = torch.cat([observed[:rare].sum()[None], observed[rare:]])
        expected = torch.cat([expected[:rare].sum()[None], expected[rare:]])
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


class TableDraft(nn.Module):
    """A draft that looks at the last token only: logits = table[token].

    It has the interface of Eagle3Draft, its own (one-hot) embedding, and uses no cache.
    """

    policy_ids = None

    def __init__(self, table: Tensor):
        super().__init__()
        size = len(table)
        self.config = SimpleNamespace(
            hidden_size=size,
            num_key_value_heads=1,
            head_dim=2,
            sliding_window=None,
            tap_layers=(0,),
            own_embedding=True,
        )
        self.embed_tokens = nn.Embedding.from_pretrained(torch.eye(size))
        self.lm_head = nn.Identity()
        self.lm_head.weight = nn.Parameter(torch.eye(size))
        self.table = nn.Parameter(table.float())

    def fuse(self, taps):
        return taps[0].new_zeros(len(taps[0]), self.config.hidden_size)

    def layer(self, emb_TD, g_TD, positions_T, attend):
        return emb_TD @ self.table

    def head_input(self, out_TD):
        return out_TD

    def next_input(self, out_TD, normed_TD):
        return out_TD


def table_draft(policy: nn.Module, kind: str) -> TableDraft:
    """good: the policy's mean logits after each token. bad: random. adversarial: mass on what the policy never says."""
    vocab_size = policy.config.vocab_size
    generator = torch.Generator().manual_seed(5)
    if kind == "bad":
        return TableDraft(2 * torch.randn(vocab_size, vocab_size, generator=generator))
    contexts = torch.randint(vocab_size, (16, 4), generator=generator).tolist()
    documents = [context + [token] for token in range(vocab_size) for context in contexts]
    logits = torch.stack(full_logits(policy, documents))[:, -1].view(vocab_size, 16, vocab_size).mean(1)
    return TableDraft(logits if kind == "good" else -8 * logits)


def random_prompts(count: int, vocab_size: int, longest: int, seed=0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]
