"""What a forecast for a GPU knows beside what a fake processor shows, and that published runs on one took as much."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from toolkit import Loop, Strategy, describe, hardware
from toolkit.engines.job import Job, resolve
from toolkit.forecasting.ledger import Ledger
from toolkit.forecasting.memory import replay, traced, whole_step
from toolkit.forecasting.timing import operations, step_time
from toolkit.forecasting.tracker import Tracker
from toolkit.units import KiB, MiB


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def small(seq_len: int = 512, card: str = "A100-80GB", attention: str = "sdpa") -> Job:
    from transformers import LlamaConfig

    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    spec = describe(LlamaConfig(**shape, num_hidden_layers=2, vocab_size=512, max_position_embeddings=8192))
    strategy = Strategy(sharding="none", precision="fp16", attention=attention)
    return resolve(strategy, Loop(seq_len=seq_len, micro_batch=1), spec, 1, hardware(card).device)


def test_work_is_what_the_device_does() -> None:
    """Not the questions that a fake tensor asks itself, nor what only names a tensor anew."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    tracker = Tracker()
    with FakeTensorMode(), tracker:
        made = torch.ones(256, 256)
        tracker._work.clear()
        assert made.device.type == "cpu"
        torch.empty_like(made)
        torch.ops.aten._unsafe_view(made, [256 * 256])
        _ = made.T
        assert not tracker._work
        made.mul(2)
    assert tracker._work == {("calls", ""): 1, ("moved", ""): 2 * made.nbytes}


def test_a_softmaxs_backward_multiplies_into_a_tensor_of_its_own_on_a_gpu() -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    highest = {}
    for device in ("cpu", "cuda"):
        tracker = Tracker(device=device)
        with FakeTensorMode(), tracker:
            grad, output = torch.ones(64, 64), torch.ones(64, 64)
            torch.ops.aten._softmax_backward_data(grad, output, -1, torch.float32)
        alive = peak = 0
        for what, size, _ in tracker.events:
            alive += size if what == "+" else -size if what == "-" else 0
            peak = max(peak, alive)
        highest[device] = peak
    assert highest["cuda"] - highest["cpu"] == 64 * 64 * 4


def test_a_causal_kernel_leaves_half_of_its_products_out() -> None:
    """Papers count them all the same; only the time knows."""
    job = small(seq_len=4096)
    step = whole_step(job, traced(job, masked=False))
    skipped = sum(size for one in step for _, size in one.skipped)
    attention = 4 * 4096**2 * 256 * 2  # two products of all pairs, in two layers
    # A forward, its recomputation, and a backward of five products in place of two.
    assert skipped == (1 + 1 + 2.5) * attention / 2
    bare = [one._replace(skipped=()) for one in step]
    machine = hardware("A100-80GB")
    fast, slow = step_time(job, machine, step), step_time(job, machine, bare)
    assert fast is not None
    assert slow is not None
    assert fast.step_seconds < slow.step_seconds
    assert operations(job, step) == operations(job, bare)
    eager = small(seq_len=4096, attention="eager")
    assert not any(one.skipped for one in whole_step(eager, traced(eager, masked=False)))


@pytest.mark.parametrize(
    ("card", "each"),
    [("T4", 8 * MiB + 128 * KiB), ("H100", 32 * MiB), ("B200-180GB", 32 * MiB), ("MI300X", 128 * MiB)],
)
def test_cublas_keeps_a_workspace_for_each_thread(card: str, each: int) -> None:
    job = small(card=card)
    trace = traced(job, masked=False)
    ledger = replay(job, trace, whole_step(job, trace), checkpoints=False, kind=Ledger)
    assert ledger.held["workspace"] == 2 * each


def rows() -> list[Any]:
    """Of the runs on a T4 three: attention's scores at the peak, logits at the peak, and a fused kernel."""
    wanted = {
        "TinyLlama-1.1B-Chat-v1.0, LoRA, eager, 2 x 2,048, T4",
        "SmolLM2-135M, LoRA, eager, 1 x 4,096, T4",
        "SmolLM2-1.7B, LoRA, sdpa, 4 x 1,024, T4",
    }
    found = [run for run in importlib.import_module("published_runs").t4() if run.what in wanted]
    assert len(found) == len(wanted)
    return found


def test_runs_that_others_measured_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """All twelve, and others: `benchmarks/published.py`."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    compared = importlib.import_module("published").compared
    for run in rows():
        row = compared(run)
        assert row["forecast"]["memory"] == pytest.approx(row["published"]["memory"], rel=0.015), run.what
