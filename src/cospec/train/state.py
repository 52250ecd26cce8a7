"""The state of a run as one flat dict of tensors, as checkpoints hold it.

Names: `<part>.model.<tensor>` and `<part>.optim.<optimizer class>.<parameter>.<key>`. Optimizer
state goes by parameter name, not by number, so that it does not depend on how parameters
are split over optimizers, groups or pipeline stages.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Part:
    """What is saved under one name ("policy", "draft"): modules and the optimizers of their parameters.

    Several modules are the pipeline stages of this rank; their parameter names do not
    overlap. Without optimizers only weights are saved or loaded.
    """

    modules: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer] = ()


@dataclass(frozen=True)
class Room:
    """Tensors that the saved optimizer state of one parameter is read into."""

    optimizer: torch.optim.Optimizer
    param: nn.Parameter
    state: dict[str, Tensor]
    named: dict[str, Tensor]
    """The same tensors by their full names."""


def collect(parts: Mapping[str, Part]) -> dict[str, Tensor]:
    """Weights, buffers and optimizer state of this rank; shares memory with them.

    Raises ValueError for optimizer state that is no tensor, and for an optimizer that holds
    a parameter of another part.
    """
    state = model_state(parts)
    for name, optimizer, param_name, param in _optimized(parts):
        for key, value in optimizer.state.get(param, {}).items():
            if not isinstance(value, Tensor):
                raise ValueError(f"{type(optimizer).__name__} keeps {key}={value!r} of {param_name}: not a tensor")
            state[_optim_key(name, optimizer, param_name, key)] = value
    return state


def model_state(parts: Mapping[str, Part]) -> dict[str, Tensor]:
    return {
        f"{name}.model.{key}": value
        for name, part in parts.items()
        for module in part.modules
        for key, value in module.state_dict().items()
    }


def optimizer_room(parts: Mapping[str, Part], saved: Mapping[str, Mapping[str, Any]]) -> list[Room]:
    """Room for the saved optimizer state, laid out as the parameters are; the optimizers are not changed.

    saved: full name -> {"dtype", "shape"}. Raises ValueError when a parameter was trained
    with an optimizer of another class.
    """
    keys: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for full_name in saved:
        part, _, rest = full_name.partition(".optim.")
        if rest:
            class_name, _, rest = rest.partition(".")
            param_name, _, key = rest.rpartition(".")
            keys.setdefault((part, param_name), []).append((class_name, key))
    rooms = []
    for name, optimizer, param_name, param in _optimized(parts):
        room = Room(optimizer, param, {}, {})
        for class_name, key in keys.get((name, param_name), []):
            ours = type(optimizer).__name__
            if class_name != ours:
                raise ValueError(f"{name} {param_name} was trained with {class_name}, this run uses {ours}")
            full_name = _optim_key(name, optimizer, param_name, key)
            dtype, shape = getattr(torch, saved[full_name]["dtype"]), saved[full_name]["shape"]
            if list(param.shape) == shape:
                tensor = torch.zeros_like(param, dtype=dtype, requires_grad=False)
            else:
                tensor = torch.zeros(shape, dtype=dtype, device=_scalar_device(optimizer, param))
            room.state[key] = room.named[full_name] = tensor
        if room.state:
            rooms.append(room)
    return rooms


def random_state() -> dict[str, Tensor]:
    """Generator states of this process: torch CPU, torch CUDA where there is one, python."""
    _, words, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor(float("nan") if gauss is None else gauss, dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(state["torch"])
    gauss = state["python_gauss"].item()
    random.setstate((3, tuple(state["python"].tolist()), None if gauss != gauss else gauss))
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _optimized(parts: Mapping[str, Part]) -> Iterator[tuple[str, torch.optim.Optimizer, str, nn.Parameter]]:
    """Every parameter that an optimizer holds: part, optimizer, parameter name, parameter."""
    for name, part in parts.items():
        names = {id(p): n for module in part.modules for n, p in module.named_parameters()}
        for optimizer in part.optimizers:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if id(param) not in names:
                        raise ValueError(f"an optimizer of {name} holds a parameter that no module of {name} has")
                    yield name, optimizer, names[id(param)], param


def _optim_key(part: str, optimizer: torch.optim.Optimizer, param_name: str, key: str) -> str:
    return f"{part}.optim.{type(optimizer).__name__}.{param_name}.{key}"


def _scalar_device(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> torch.device:
    """Where torch keeps a step count: with the parameter for fused and capturable optimizers, else on the CPU."""
    group = next(g for g in optimizer.param_groups if any(p is param for p in g["params"]))
    return param.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
