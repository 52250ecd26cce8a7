"""Bad input on one rank, or on all, ends in the same clear error on every rank: nobody waits for ever."""

import re

import pytest
import torch
import torch.distributed as dist

from cospec.layout import PackedLayout
from cospec.ops.ring import open_trunk, trunk_branch_attention
from cospec.ops.shift import with_halo

ROWS, HEADS, KEY_HEADS, WIDTH = 8, 4, 2, 8
LENGTHS = (7, 8)


def attend(rank, bad_ranks, change):
    """One pass on two ranks; `change` alters the arguments on the bad ranks."""
    case = {
        "lengths": LENGTHS,
        "cp_size": 2,
        "mode": "ring",
        "q": torch.zeros(ROWS, HEADS, WIDTH),
        "k": torch.zeros(ROWS, KEY_HEADS, WIDTH),
        "v": torch.zeros(ROWS, KEY_HEADS, WIDTH),
        "k_branches": [torch.zeros(ROWS, KEY_HEADS, WIDTH)],
        "v_branches": [torch.zeros(ROWS, KEY_HEADS, WIDTH)],
    }
    if rank in bad_ranks:
        case |= change
    layout = PackedLayout(case["lengths"], case["cp_size"])
    trunk = open_trunk(case["k"], case["v"], layout, cp_group=dist.group.WORLD, mode=case["mode"])
    trunk_branch_attention(case["q"], trunk, case["k_branches"], case["v_branches"])


def shift_rows(rank, bad_ranks, change):
    case = {"lengths": LENGTHS, "cp_size": 2, "x": torch.zeros(ROWS, 3), "extent": 2}
    if rank in bad_ranks:
        case |= change
    layout = PackedLayout(case["lengths"], case["cp_size"])
    with_halo(case["x"], layout, case["extent"], cp_group=dist.group.WORLD)


def keys(rows=ROWS, heads=KEY_HEADS, width=WIDTH, **kind):
    return torch.zeros(rows, heads, width, **kind)


CASES = {
    "layout and keys": (attend, {"k": keys(6), "v": keys(6)}, "k has 6 rows, the layout has 8"),
    "layout and queries": (attend, {"q": keys(6, HEADS)}, "q has 6 rows, the layout has 8"),
    "other group size": (attend, {"cp_size": 4}, "cp_group has 2 ranks, the layout has cp_size=4"),
    "k unlike v": (attend, {"v": keys(ROWS, 1)}, r"\(8, 2, 8\) and \(8, 1, 8\)"),
    "heads not divisible": (attend, {"q": keys(ROWS, 3)}, "q has 3 heads, no multiple of the trunk's 2"),
    "other head dim": (attend, {"q": keys(ROWS, HEADS, 4)}, r"\[T, N, 8\] as the trunk's keys, got \(8, 4, 4\)"),
    "branch rows": (attend, {"k_branches": [keys(6)]}, r"k_branches\[0\] has shape \(6, 2, 8\), expected \(8, 2, 8\)"),
    "branch counts": (attend, {"v_branches": []}, "1 k_branches and 0 v_branches"),
    "dtype of v": (attend, {"v": keys(dtype=torch.float64)}, "k has dtype torch.float32, v has torch.float64"),
    "dtype of q": (attend, {"q": keys(heads=HEADS, dtype=torch.float64)}, "q has dtype torch.float64, the trunk has"),
    "dtype of a branch": (attend, {"k_branches": [keys(dtype=torch.bfloat16)]}, "bfloat16, q has torch.float32"),
    "device of v": (attend, {"v": keys(device="meta")}, "k is on cpu, v on meta"),
    "device of q": (attend, {"q": keys(heads=HEADS, device="meta")}, "q is on meta, the trunk on cpu"),
    "unknown mode": (attend, {"mode": "star"}, "mode='star': choose 'ring' or 'gather'"),
    "rows of a shift": (shift_rows, {"x": torch.zeros(5, 3)}, "x has 5 rows, the layout has 8"),
    "group of a shift": (shift_rows, {"cp_size": 4}, "cp_group has 2 ranks, the layout has cp_size=4"),
}

DISAGREEMENTS = {
    "layouts": (
        attend,
        {"lengths": (8, 7)},
        r"different layouts: rank 0 \(\(7, 8\), 16, 2\), rank 1 \(\(8, 7\), 16, 2\)",
    ),
    "modes": (attend, {"mode": "gather"}, "different inputs: rank 0 .* mode ring, rank 1 .* mode gather"),
    "key heads": (
        attend,
        {"k": keys(heads=1), "v": keys(heads=1)},
        r"rank 0 k and v \(8, 2, 8\).*rank 1 .*\(8, 1, 8\)",
    ),
    "passes": (attend, {"k_branches": [], "v_branches": []}, "rank 0 .* 1 branches.*rank 1 .* 0 branches"),
    "widths of a shift": (shift_rows, {"x": torch.zeros(ROWS, 4)}, r"rank 0 x \[T, 3\].*rank 1 x \[T, 4\]"),
    "layouts of a shift": (shift_rows, {"lengths": (12, 4)}, "different layouts"),
}


def refusals(rank, names, bad_ranks):
    """What each case ends in; the ranks go on together after an error."""
    messages = []
    for name in names:
        function, change, _ = {**CASES, **DISAGREEMENTS}[name]
        try:
            function(rank, bad_ranks, change)
            messages.append("no error")
        except ValueError as error:
            messages.append(str(error))
    function, _, _ = CASES["dtype of q"]
    function(rank, (), {})  # and still work
    return messages


@pytest.mark.parametrize("bad_ranks", [(0,), (1,), (0, 1)])
def test_the_same_error_on_every_rank(ranks, bad_ranks):
    """Known failure 37: an error on one rank reaches every rank, and names both values."""
    for messages in ranks.run(2, refusals, list(CASES), bad_ranks, timeout_s=30):
        for name, message in zip(CASES, messages, strict=True):
            assert re.search(CASES[name][2], message), f"{name}: {message}"


def test_ranks_that_disagree(ranks):
    """Each rank is right by itself, together they are not."""
    for messages in ranks.run(2, refusals, list(DISAGREEMENTS), (1,), timeout_s=30):
        for name, message in zip(DISAGREEMENTS, messages, strict=True):
            assert re.search(DISAGREEMENTS[name][2], message, re.S), f"{name}: {message}"
