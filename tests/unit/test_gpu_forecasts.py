"""What a forecast for a GPU adds to a trace on a fake processor, and that published runs took as much memory."""

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig

from toolkit import Strategy, TrainConfig, describe, hardware
from toolkit.core.units import GiB, KiB, MiB
from toolkit.devices.gpu_catalog import CARDS, card_of
from toolkit.engines import simulation
from toolkit.engines.job import Job
from toolkit.engines.ledger import Ledger
from toolkit.engines.resolution import resolve
from toolkit.forecasting import forecast_job
from toolkit.forecasting.memory import SHARE, replay, traced, whole_step
from toolkit.forecasting.timing import operations, step_time
from toolkit.forecasting.tracker import Tracker

pytestmark = pytest.mark.usefixtures("peft")


def small(seq_len: int = 512, card: str = "A100-80GB", attention: str = "sdpa") -> Job:
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    spec = describe(LlamaConfig(**shape, num_hidden_layers=2, vocab_size=512, max_position_embeddings=8192))
    strategy = Strategy(sharding="none", precision="fp16", attention=attention)
    return resolve(strategy, TrainConfig(seq_len=seq_len, micro_batch=1), spec, 1, hardware(card).device)


def test_work_is_what_the_device_does() -> None:
    """Not the questions that a fake tensor asks itself, nor what only renames a tensor."""
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


def within(kernel: Any) -> int:
    """What the peak of a backward on a GPU is above that of its outputs and inputs alone."""
    highest = {}
    for device in ("cpu", "cuda"):
        tracker = Tracker(device=device)
        with FakeTensorMode(), tracker:
            made = kernel()
        del made
        alive = peak = 0
        for what, size, _ in tracker.events:
            alive += size if what == "+" else -size if what == "-" else 0
            peak = max(peak, alive)
        highest[device] = peak
    return highest["cuda"] - highest["cpu"]


def softmax() -> Any:
    return torch.ops.aten._softmax_backward_data(torch.ones(64, 64), torch.ones(64, 64), -1, torch.float32)


def embedding(tokens: int) -> Any:
    return torch.ops.aten.embedding_dense_backward(
        torch.ones(tokens, 32), torch.ones(tokens, dtype=torch.long), 100, -1, False
    )


def flash(groups: int) -> Any:
    made = {"dtype": torch.bfloat16}
    query, key, sums = (
        torch.ones(2, 4, 100, 64, **made),
        torch.ones(2, 4 // groups, 100, 64, **made),
        torch.ones(2, 4, 100),
    )
    none, seed = torch.ones(0), torch.ones(2, dtype=torch.long)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    return backward(query, query, key, key, query, sums, none, none, 100, 100, 0.0, True, seed, seed)


@pytest.mark.parametrize(
    ("kernel", "size"),
    [
        (softmax, 64 * 64 * 4),
        (lambda: embedding(3072), 0),
        (lambda: embedding(4000), (100 + 400) * 32 * 4),
        (lambda: flash(1), 2 * 4 * 128 * (64 + 1) * 4),
        (lambda: flash(2), 2 * 4 * 128 * (64 + 1) * 4 + 2 * (2 * 4 * 100 * 64 * 2)),
    ],
)
def test_a_backward_takes_memory_for_itself_on_a_gpu(kernel: Any, size: int) -> None:
    assert within(kernel) == size


def test_a_causal_kernel_leaves_half_of_its_products_out() -> None:
    """They are counted all the same; only the time knows. A large batch is a small one, scaled."""
    job = small(seq_len=4096)
    step = whole_step(job, traced(job, masked=False))
    skipped = sum(size for one in step for _, size in one.skipped)
    attention = 4 * 4096**2 * 256 * 2  # two products of all pairs, in two layers
    # A forward, its recomputation, and a backward of five products in place of two.
    assert skipped == (1 + 1 + 2.5) * attention / 2
    bare = [one._replace(skipped=()) for one in step]
    machine = hardware("A100-80GB")
    fast, slow = step_time(job, machine, step), step_time(job, machine, bare)
    assert fast.step_seconds < slow.step_seconds
    assert operations(job, step) == operations(job, bare)
    wide = dataclasses.replace(job, train_config=dataclasses.replace(job.train_config, micro_batch=8))
    assert sum(size for one in whole_step(wide, traced(wide, masked=False)) for _, size in one.skipped) == 8 * skipped
    eager = small(seq_len=4096, attention="eager")
    assert not any(one.skipped for one in whole_step(eager, traced(eager, masked=False)))


@pytest.mark.parametrize(
    ("card", "each"), [("T4", 8 * MiB + 128 * KiB), ("H100", 32 * MiB), ("B200-180GB", 32 * MiB), ("MI300X", 128 * MiB)]
)
def test_cublas_keeps_a_workspace_for_each_thread(card: str, each: int) -> None:
    job = small(card=card)
    trace = traced(job, masked=False)
    ledger = replay(job, trace, whole_step(job, trace), num_checkpoints=0, kind=Ledger)
    assert ledger.held["workspace"] == 2 * each


@pytest.mark.parametrize("sharding", ["ddp", "zero2", "zero3", "fsdp"])
def test_workspaces_come_with_the_first_product_and_stay(sharding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = small(card="H100")
    strategy = Strategy(sharding=sharding, precision="bf16")
    job = resolve(strategy, dataclasses.replace(one.train_config, accumulation=2), one.spec, 2, one.device)
    trace = traced(job, masked=False)
    step = whole_step(job, trace)
    known = replay(job, trace, step, num_checkpoints=0, kind=Ledger).phases
    monkeypatch.setattr(simulation, "blas_workspaces", lambda job: 0)
    without = replay(job, trace, step, num_checkpoints=0, kind=Ledger).phases
    more = {phase: known[phase] - without[phase] for phase in known}
    assert more == {"load": 0, "prepare": 0} | dict.fromkeys(("forward", "backward", "step", "save"), 64 * MiB)


def test_what_cuda_itself_takes_counts_by_named_terms() -> None:
    job = small(card="A100-80GB")
    alone = forecast_job(job, hardware("A100-80GB"))
    assert set(alone.context) == {"CUDA context", "fragmentation"}
    assert alone.needed_bytes == alone.peak_bytes + sum(alone.context.values())
    device = alone.to_dict()["device"]
    assert (device["needed_bytes"], device["context_bytes"]) == (alone.needed_bytes, alone.context_bytes)
    tight = dataclasses.replace(alone, limit_bytes=alone.needed_bytes - 1)
    assert tight.peak_bytes < tight.limit_bytes
    assert not tight.fits
    limits = (alone.needed_bytes, alone.needed_bytes / 0.95 + 1)
    assert [dataclasses.replace(alone, limit_bytes=limit).leaves(0.05) for limit in limits] == [False, True]
    assert "outside the allocator" in tight.reason
    fsdp = resolve(Strategy(sharding="fsdp"), job.train_config, job.spec, 2, job.device)
    assert "communication buffers" in forecast_job(fsdp, hardware("2x A100-80GB")).context
    cpu = resolve(Strategy(sharding="fsdp"), job.train_config, job.spec, 2, hardware("2x cpu").device)
    assert forecast_job(cpu, hardware("2x cpu")).context_bytes == 0


def test_most_runs_that_ended_out_of_memory_had_less_fragmentation() -> None:
    runs = json.loads((Path(__file__).parents[2] / "benchmarks" / "published_oom.json").read_text())
    shares = [run["unallocated_gib"] / run["allocated_gib"] for run in runs]
    assert sum(share <= SHARE for share in shares) >= 0.75 * len(shares)


def test_memory_tells_the_catalogs_cards_apart() -> None:
    """By it `calibrate` knows a run's."""
    assert len({card.gib for card in CARDS.values()}) == len(CARDS)


def rows() -> list[Any]:
    """Of the runs on a T4 three: attention's scores at the peak, logits at the peak, and a fused kernel."""
    wanted = {
        "TinyLlama-1.1B-Chat-v1.0, LoRA, eager, 2 x 2,048, T4",
        "SmolLM2-135M, LoRA, eager, 1 x 4,096, T4",
        "SmolLM2-1.7B, LoRA, sdpa, 4 x 1,024, T4",
    }
    result = [run for run in importlib.import_module("published_runs").t4() if run.what in wanted]
    assert len(result) == len(wanted)
    return result


def test_runs_that_others_measured_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """All twelve, and others: `benchmarks/published.py`."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    published = importlib.import_module("published")
    with published.keep_peft_casts():
        for run in rows():
            row = published.compared(run)
            assert row["forecast"]["memory"] == pytest.approx(row["published"]["memory"], rel=0.01), run.what


@pytest.mark.parametrize(
    "name", ["several-bf16-1-8192", "one-bf16-selective-chunked-4-2048", "one-bf16-none-chunked-compile-4-2048"]
)
def test_a_run_of_the_toolkit_on_a_gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The others: `benchmarks/gpu.py --forecast`. Compiled blocks keep fewer activations than the forecast counts."""
    folder, card = Path(__file__).parents[2] / "benchmarks", "H200-141GB"
    monkeypatch.syspath_prepend(folder)
    runs = json.loads((folder / f"results/gpu-{card}.json").read_text())["runs"]
    run = next(each for each in runs if each["name"] == f"0.6B-{name}")
    ours = importlib.import_module("gpu").forecast_of(run, card)
    for phase in ("prepare", "forward", "backward", "step"):
        forecast, measured = ours["forecast_phases"][phase], run["measured_phases"][phase]
        assert forecast > 0.998 * measured, phase
        assert forecast < 1.002 * measured or "compile" in name, phase
    assert ours["forecast_seconds"] == pytest.approx(run["step_seconds"], rel=0.15)


def test_zero_offloads_13b_fits_its_v100_where_gradients_add_up_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ren et al. 2021, on a DGX-2. In fp32 the sum alone takes 49.5 GiB of the GPU."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    run = next(run for run in importlib.import_module("published_runs").zero_offload() if "13B" in run.what)
    machine = hardware(run.hardware, run.host_memory)
    for dtype in ("fp16", "fp32"):
        strategy = dataclasses.replace(run.strategy, grad_accum_dtype=dtype)
        job = resolve(strategy, run.train_config, describe(run.config), 1, machine.device)
        result = forecast_job(job, machine, one_document=True)
        assert result.fits == (dtype == "fp16")
        assert result.timing is not None
        if dtype == "fp16":
            assert result.operations / result.timing.step_seconds / 1e12 == pytest.approx(run.tflops, rel=0.25)


def test_a_pcie_board_has_no_nvlink_and_another_chip_is_in_no_row() -> None:
    assert card_of("NVIDIA A100-SXM4-80GB", 80 * GiB) == CARDS["A100-80GB"]
    board = card_of("NVIDIA A100-PCIE-40GB", 40 * GiB)
    assert (board.peer, board.tflops_half) == (CARDS["A100-40GB"].host, CARDS["A100-40GB"].tflops_half)
    consumer = ("NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU")
    for other in ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", *consumer):
        assert card_of(other, 80 * GiB) is None, other


def test_a_checkpoint_of_offloaded_states_takes_no_second_copy_and_the_steps_wait_for_the_disk() -> None:
    """70B with AdamW on eight GPUs: 788 GiB of states, which lie in the host's memory once."""
    shape = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    spec = describe(LlamaConfig(**shape, num_hidden_layers=80, vocab_size=128256, max_position_embeddings=8192))
    machine, train_config = hardware("8x H100-80GB"), TrainConfig(micro_batch=1, seq_len=2048)

    def forecasts(**words: str) -> tuple[Any, Any]:
        job = resolve(Strategy(precision="bf16", **words), train_config, spec, 8, machine.device)
        return forecast_job(job, machine), forecast_job(job, machine, num_checkpoints=0)

    for sharding, offload in (("fsdp", "cpu"), ("zero3", "optimizer"), ("zero3", "cpu")):
        saved, unsaved = forecasts(sharding=sharding, offload=offload)
        assert saved.host_bytes == unsaved.host_bytes < 1500 * GiB
        assert saved.checkpoint_stall_seconds == pytest.approx(saved.checkpoint_bytes / 3e9)
        assert saved.fits
    saved, unsaved = forecasts(sharding="fsdp")
    assert 0 <= saved.host_bytes - saved.checkpoint_bytes < 8 * GiB, "in chunks: no power of two of the whole"
    assert unsaved.host_bytes < 40 * GiB, "each rank reads one tensor at a time"
    assert saved.checkpoint_stall_seconds < 5
