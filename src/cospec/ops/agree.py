"""Bad input is an error on every rank: the ranks compare what they hold before they exchange it.

A rank that raises alone would leave its peers waiting for its message. So a check runs on
every rank and its outcome is exchanged: once for each layout object and kind of call, which
finds what a program does wrong without a message per layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from cospec.layout import PackedLayout


def check_together(
    point: tuple,
    layout: PackedLayout,
    cp_group: dist.ProcessGroup | None,
    check: Callable[[], None],
    description: str,
) -> None:
    """Run `check` on every rank of the group; if it raises on one, or the ranks disagree, all raise.

    Args:
        point: names the call; it is exchanged the first time that `layout` meets it. Later
            calls check locally only.
        check: raises ValueError for what this rank can see alone.
        description: what must be the same on every rank, in words.

    Raises ValueError: on every rank the same problem, or what each rank holds where they disagree.
    """
    problem: ValueError | None = None
    try:
        check()
    except ValueError as error:
        problem = error
    if cp_group is not None and dist.get_world_size(cp_group) > 1:
        key = (point, tuple(dist.get_process_group_ranks(cp_group)))
        if key not in layout.agreed:
            layout.agreed.add(key)
            _compare(str(point[0]), layout, cp_group, problem, description)
    if problem is not None:
        raise problem


def _compare(
    name: str, layout: PackedLayout, cp_group: dist.ProcessGroup, problem: ValueError | None, description: str
) -> None:
    mine = (None if problem is None else str(problem), (layout.lengths, layout.num_rows, layout.cp_size), description)
    everyone: list = [None] * dist.get_world_size(cp_group)
    dist.all_gather_object(everyone, mine, group=cp_group)
    if problem is not None:
        return  # the caller raises its own
    for rank, (text, _, _) in enumerate(everyone):
        if text is not None:
            raise ValueError(f"{name} on cp rank {rank}: {text}")
    for rank, (_, sizes, text) in enumerate(everyone):
        for what, value, first in (("layouts", sizes, everyone[0][1]), ("inputs", text, everyone[0][2])):
            if value != first:
                raise ValueError(f"{name}: the ranks have different {what}: rank 0 {first}, rank {rank} {value}")
