"""The seam to torchtitan: the only package that imports it.

Turns a `PolicyConfig` (or any torchtitan decoder spec) into a torchtitan model whose
inner attention asks the caller's attention context, initialises it by name and seed, and
moves its weights to and from Hugging Face folders.
"""

from cospec.titan.device import set_device  # first: the others import torchtitan's models
from cospec.titan.model import (
    assign,
    build_meta,
    build_model,
    cut_stage,
    head_weight,
    init_parameters,
    materialise,
    plain_name,
    skip_lm_head,
    spread_experts,
    stage_layers,
)
from cospec.titan.modules import PackedAttention
from cospec.titan.spec import (
    INIT_STD,
    DecoderConfig,
    build_config,
    hf_adapter,
    hf_config,
    num_experts,
    policy_config,
    policy_config_from_hf,
    rope_settings,
    with_packed_attention,
)

__all__ = [
    "DecoderConfig",
    "INIT_STD",
    "PackedAttention",
    "assign",
    "build_config",
    "build_meta",
    "build_model",
    "cut_stage",
    "head_weight",
    "hf_adapter",
    "hf_config",
    "init_parameters",
    "materialise",
    "num_experts",
    "plain_name",
    "policy_config",
    "policy_config_from_hf",
    "rope_settings",
    "set_device",
    "skip_lm_head",
    "spread_experts",
    "stage_layers",
    "with_packed_attention",
]
