"""torchtitan taken to the device that is there; imported before anything else of torchtitan."""

from __future__ import annotations

import logging
import sys
import warnings

import torch
import torchtitan.tools.utils  # noqa: F401  (decides on the device; set_device corrects it)


def set_device(device: torch.device) -> None:
    """Tell torchtitan which device it runs on.

    It decides that while it is imported, and takes a machine without an accelerator for
    a CUDA one; its modules copy the answer, so the copies are set too.
    """
    values = {
        "device_type": device.type,
        "device_module": torch.get_device_module(device.type),
        "get_local_device": lambda: device,
    }
    for name, module in list(sys.modules.items()):
        if name == "torchtitan" or name.startswith("torchtitan."):
            for key, value in values.items():
                if key in vars(module):
                    setattr(module, key, value)


if not torch.cuda.is_available():
    set_device(torch.device("cpu"))  # before torchtitan's models are imported: they read it once
from torchtitan.distributed.utils import set_spmd_backend  # noqa: E402

set_spmd_backend("partial_dtensor")  # shards are plain DTensors; its own meshes and their types are not set up
logging.getLogger("torchtitan").setLevel(logging.WARNING)
# Experts are gathered over one axis of ranks, then the other; torch warns of the order of sums, and there is none.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
# Its router asks for a float32 autocast, which the CPU has no need of.
warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype is not supported")
