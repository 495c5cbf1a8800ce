"""How long ranks wait for each other: Accelerate is told, and leaves out nothing of it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from toolkit.engines import cpu
from toolkit.engines.waiting import handlers, patience


@pytest.mark.parametrize("seconds", [5, 600, 1800])
def test_accelerate_passes_every_timeout_on(seconds: float) -> None:
    """600 s are its own default for NCCL: what equals it is left out, and torch's for gloo is another."""
    for handler in (*handlers(patience(seconds)), cpu.gloo(patience(seconds))):
        assert abs(handler.to_kwargs()["timeout"] - timedelta(seconds=seconds)) <= timedelta(milliseconds=1)


def test_without_a_timeout_torch_decides() -> None:
    assert handlers(None) == []
