"""How long ranks wait for each other: Accelerate is told, and leaves out nothing of it."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from toolkit.engines.rank_calls import ticking, wait_for
from toolkit.engines.timeouts import handlers, pg_timeout


@pytest.mark.parametrize("seconds", [5, 600, 1800])
def test_accelerate_passes_every_timeout_on(seconds: float) -> None:
    """600 s are its own default for NCCL: what equals it is left out, and torch's for gloo is another."""
    for handler in (*handlers(pg_timeout(seconds)), *handlers(pg_timeout(seconds), "gloo")):
        assert abs(handler.to_kwargs()["timeout"] - timedelta(seconds=seconds)) <= timedelta(milliseconds=1)


def test_without_a_timeout_torch_decides() -> None:
    assert handlers(None) == []


def test_a_rank_waits_as_long_as_rank_0_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here twice its time limit, and no longer than that limit without one."""
    monkeypatch.setattr("toolkit.engines.rank_calls.BEAT_SECONDS", 0.02)
    store = HashStore()

    def work() -> None:
        with ticking(lambda: store.add("alive", 1)):
            time.sleep(2.2)
        store.set("done", "result")

    rank0 = threading.Thread(target=work)
    rank0.start()
    assert wait_for(store, "alive", "done", 1.0) == b"result"
    rank0.join()
    with pytest.raises(TimeoutError, match=r"timed out after 0\.3 s without a sign of life from rank 0"):
        wait_for(store, "alive", "never", 0.3)
