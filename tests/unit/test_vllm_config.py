"""rollout.engine=vllm where it cannot run: one message before any work (the engine itself: tests/vllm)."""

import importlib.util

import pytest

from cospec.config import ConfigError, RolloutConfig, RunConfig
from cospec.rollout.vllm import VLLMEngine, import_vllm
from cospec.train.rollouts import check_engine
from support.toy_lm import tiny_policy

spec = importlib.util.find_spec("vllm")
INSTALLED = spec is not None and spec.origin is not None


@pytest.mark.skipif(INSTALLED, reason="vLLM is installed")
def test_a_missing_vllm_names_what_installs_it():
    with pytest.raises(ImportError, match="scripts/install_vllm_cpu.sh"):
        import_vllm()
    with pytest.raises(ConfigError, match="rollout.engine='vllm'.*scripts/install_vllm_cpu.sh"):
        check_engine(RunConfig(rollout=RolloutConfig(engine="vllm")))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_len": 1000}, "max_len=1000: must be in 2..128"),
        ({"max_len": 117, "draft_folder": "x"}, "max_len=117: must be in 2..116"),
        ({"max_len": 64, "num_draft_tokens": 17}, "num_draft_tokens=17"),
        ({"max_len": 64, "max_batch": 0}, "max_batch=0"),
        ({"max_len": 64, "draft_folder": "x"}, "give both or neither"),
    ],
)
def test_sizes_are_checked_before_vllm_is_asked(options, message):
    with pytest.raises(ValueError, match=message):
        VLLMEngine("policy", tiny_policy().config, **options)
