"""Measured memory on two gloo ranks under real DDP; run as a program it is one of the ranks."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from programs import ROOT, python

from toolkit import measurement
from toolkit.core.phases import phase
from toolkit.engines import upstream
from toolkit.engines.records import StateMemory

pytestmark = pytest.mark.dist

ELEMENTS = 999 * 64 + 5 * (64 * 64 + 64)


def work(target: Path) -> None:
    """Three steps of a small model under DDP with AdamW, saved once; what was measured goes to `target`."""
    window = measurement.start("cpu")
    import torch
    from accelerate import PartialState
    from accelerate.utils import gather_object
    from torch.nn.parallel import DistributedDataParallel

    state = PartialState(cpu=True)
    torch.manual_seed(0)
    with phase("load"):
        layers = [torch.nn.Linear(64, 64) for _ in range(5)]
        model = torch.nn.Sequential(torch.nn.Embedding(999, 64), *layers)
    with phase("prepare"):
        # Gradients that are views of the reducer's buckets keep these in Python's sight.
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters())
    expected = []
    for step in (1, 2, 3):
        inputs = torch.randint(0, 999, (16, 32))
        with phase("forward"):
            loss = model(inputs).square().mean()
        with phase("backward"):
            loss.backward()
        with phase("step"):
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        del loss
        expected.append(living())
        window.step_done(step)
    with window.saving():
        copies = [parameter.detach().clone() for parameter in model.parameters()]
        del copies
    held = StateMemory(trainable=4 * ELEMENTS, frozen=0, optimizer=8 * ELEMENTS)
    memory = measurement.collect(window.result(), held, gather_object)
    said = {"expected": expected, **memory.to_dict()}
    target.with_suffix(f".{state.process_index}").write_text(json.dumps(said))
    upstream.wait_for_workers()
    state.destroy_process_group()


def living() -> int:
    """Bytes of the unique storages of all tensors that Python reaches, their gradients too."""
    import torch

    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    tensors += [tensor.grad for tensor in tensors if tensor.grad is not None]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def launch(target: Path) -> list[dict[str, Any]]:
    """Two ranks; what each of them measured."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    done = python(*command, target, cwd=ROOT, code=0)
    for word in ("profiler", "CPUAllocator", "memory block"):
        assert word.lower() not in done.stderr.lower(), done.stderr
    return [json.loads(target.with_suffix(f".{rank}").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(tmp_path_factory.mktemp("memory") / "first")


def test_live_bytes_equal_the_living_storages_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for number, said in enumerate(ranks):
        measured = said["measured"]["per_rank"][number]
        assert measured["live_steps"] == said["expected"]
        # Parameters, two moments, the buckets; a counter a parameter and the inputs.
        assert measured["live_bytes"] == 4 * 4 * ELEMENTS + 11 * 4 + 16 * 32 * 8


def test_every_rank_gets_the_same_whole(ranks: list[dict[str, Any]]) -> None:
    first, second = (said["measured"] for said in ranks)
    assert first == second
    assert first["peak_bytes"] == max(row["peak_bytes"] for row in first["per_rank"])
    assert ranks[0]["host"]["peak_bytes"] == sum(row["peak_bytes"] for row in first["per_rank"])
    assert ranks[0]["reason"] is None


def test_peaks_are_explained(ranks: list[dict[str, Any]]) -> None:
    for row in ranks[0]["measured"]["per_rank"]:
        phases = row["phases"]
        assert list(phases) == ["load", "prepare", "forward", "backward", "step", "save"]
        assert phases["load"] == 4 * ELEMENTS
        assert phases["prepare"] >= 8 * ELEMENTS
        # Five layers' outputs and the embedding's are kept for the backward, which needs more.
        assert phases["backward"] > phases["forward"] > row["live_bytes"] + 6 * 16 * 32 * 64 * 4
        assert phases["save"] == row["live_bytes"] + 4 * ELEMENTS
        assert row["peak_phase"] == "backward"
        assert sum(row["parts"].values()) == row["peak_bytes"]
        assert row["parts"]["transient"] > 4 * ELEMENTS


if __name__ == "__main__":
    work(Path(sys.argv[1]))
