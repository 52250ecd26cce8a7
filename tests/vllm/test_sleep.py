"""Sleep and wake where the platform has them: the calls that vLLM gets (no GPU here to make them)."""

from vllm_case import need_vllm

need_vllm()

from cospec.rollout.vllm import VLLMEngine  # noqa: E402


class FakeLLM:
    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


def bare_engine(can_sleep):
    engine = VLLMEngine.__new__(VLLMEngine)
    engine._llm, engine._dead, engine.can_sleep = FakeLLM(), None, can_sleep
    return engine


def test_weights_go_to_host_memory_and_the_prefix_cache_is_emptied():
    """Known failure 40: level 2 would lose the draft."""
    engine = bare_engine(True)
    assert engine.sleep()
    engine.wake_up()
    assert engine._llm.calls == [("sleep", (), {"level": 1}), ("wake_up", (), {}), ("reset_prefix_cache", (), {})]


def test_nothing_happens_where_vllm_cannot():
    engine = bare_engine(False)
    assert not engine.sleep()
    engine.wake_up()
    assert engine._llm.calls == []
