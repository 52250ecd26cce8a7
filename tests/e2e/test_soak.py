"""Nothing is kept from one step to the next: tensors, open files, memory. The long version is scripts/soak.py."""

import functools
import gc
import os
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cospec.train import loop
from support.tiny_runs import tiny_rl, tiny_sft

ROOT = Path(__file__).resolve().parents[2]


def live_tensors():
    """All tensors but those of bounded caches (by layout), which fill up in a long run only."""
    objects = gc.get_objects()
    for x in objects:
        if type(x) is functools._lru_cache_wrapper and (x.__module__ or "").startswith("cospec"):
            x.cache_clear()
    del objects
    gc.collect()
    return [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]


@pytest.mark.parametrize("make, run, steps", [(tiny_sft, "run_sft", 12), (tiny_rl, "run_rl", 6)])
def test_tensors_and_files_do_not_add_up(tmp_path, monkeypatch, make, run, steps):
    """Checkpoints (and evaluations) every two steps, so that what they leave behind would show too."""
    config = make(tmp_path, every=2, steps=steps)
    if run == "run_rl":
        config = replace(config, warm_start=replace(config.warm_start, policy_steps=0, draft_steps=0))
    made, seen, step = [], [], loop.cotrain_step

    def watched(*args, **options):
        made.append(None)
        if len(made) in (steps - 4, steps):
            tensors = live_tensors()
            held = sum(x.untyped_storage().nbytes() for x in tensors)
            seen.append((len(tensors), held, len(os.listdir("/proc/self/fd"))))
        return step(*args, **options)

    monkeypatch.setattr(loop, "cotrain_step", watched)
    getattr(loop, run)(config)
    (tensors, held, files), (tensors_later, held_later, files_later) = seen
    # The documents of the step at hand differ in number and size; four steps' worth would be more.
    assert tensors_later <= tensors + 4
    assert held_later <= held + 2**14
    assert files_later <= files


def test_the_script_measures_a_run(capsys, tmp_path):
    script = runpy.run_path(str(ROOT / "scripts" / "soak.py"))
    figures = script["soak"](script["tiny"](str(tmp_path), 12), loop.run_sft)
    assert figures["steps"] == 12
    assert figures["resident_mib_end"] > 0
    assert figures["open_files_end"] <= figures["open_files_settled"]
