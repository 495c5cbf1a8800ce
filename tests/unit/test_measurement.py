from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import pytest
from programs import environment, python

from toolkit import measurement
from toolkit.core.units import MiB
from toolkit.engines.records import StateMemory
from toolkit.measurement.window import PhasePeaks

# Even numbers of MiB: CUDA's allocator then splits its blocks without a rest, and both devices count the same.
PHASED = """
import sys, threading
from toolkit import measurement as measuring
from toolkit.core.phases import phase

device = sys.argv[1]
window = measuring.start(device)
import torch

kept = []
def mib(number):
    return torch.empty(number * 2**20, dtype=torch.uint8, device=device)

def work():
    with phase("load"):
        kept.append(mib(10))
    brief = mib(6)
    del brief
    with phase("prepare"):
        kept.append(mib(2))
    for step in (1, 2, 3):
        with phase("forward"):
            brief = mib(48)
            del brief
        with phase("backward"):
            brief = mib(16)
            thread = threading.Thread(target=lambda: kept.append(mib(4)))
            thread.start()
            thread.join()
            with phase("step"):
                more = mib(6)
                del more
            del brief
        brief = mib(22)
        del brief
        window.step_done(step)
    window.close()
    with window.saving():
        kept.pop(0)
        brief = mib(20)
        del brief
    with window.saving():
        pass

work()
print(window.result().to_json())
"""

WINDOWS = """
import json
import os
from toolkit import measurement as measuring
from toolkit.core.phases import phase

said = {}
window = measuring.start("cpu")
import torch

def users():
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    profiler.start()
    return profiler

def keys(profiler):
    return [event.key for event in profiler.key_averages()]

def trained(window):
    with phase("forward"):
        torch.ones(2**18)
    window.step_done(1)
    window.close()
    return window

said["one step"] = [trained(window).result().to_dict(), []]

profiler = users()
window = trained(measuring.start("cpu"))
profiler.stop()
said["before"] = [window.result().to_dict(), keys(profiler)]

window = measuring.start("cpu")
profiler = users()
torch.ones(3)
profiler.stop()
said["within"] = [trained(window).result().to_dict(), keys(profiler)]

window = measuring.start("cpu")
profiler = users()
trained(window)
torch.ones(3).sin()
profiler.stop()
said["over its end"] = [window.result().to_dict(), keys(profiler)]

window = trained(measuring.start("cpu"))
profiler = users()
with window.saving():
    torch.ones(3)
profiler.stop()
said["at the save"] = [window.result().to_dict(), keys(profiler)]

said["off"] = [trained(measuring.start("cpu", enabled=False)).result().to_dict(), []]
print(json.dumps(said))
"""


SNAPSHOTS = """
import json, sys
from toolkit import measurement
from toolkit.core.phases import phase

window = measurement.start("cpu")
import torch

snapshot = None
for step in range(1, 9):
    with phase("forward"):
        torch.ones(3 * 2**18)
    with phase("step"):
        torch.ones(2 * 2**18)
    window.step_done(step)
    if step % int(sys.argv[1]) == 0:
        with window.saving("checkpoint"):
            snapshot = None
            snapshot = torch.ones(8 * 2**18)
del snapshot
window.close()
with window.saving():
    torch.ones(9 * 2**18)
print(window.result().to_json())
"""


def run(script: str, *arguments: str) -> dict[str, Any]:
    """What a script prints as JSON, in a process of its own. It must say nothing else, on either stream."""
    visible = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")} if "cuda" in arguments else {}
    done = python("-c", script, *arguments, code=0, env=environment(**visible))
    assert done.stderr == ""
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("every", [1, 2, 3, 5, 8])
def test_later_steps_hold_a_checkpoints_snapshot(every: int) -> None:
    """Whether the first one falls in the recorded steps, follows the last of them, or comes later; the result's save has none."""
    kept = 8 if every < 8 else 0
    assert in_mib(run(SNAPSHOTS, str(every))["phases"]) == {"load": 0, "forward": 3 + kept, "step": 2 + kept, "save": 9}


def in_mib(phases: dict[str, int]) -> dict[str, float]:
    return {name: size / MiB for name, size in phases.items()}


def known_peaks(device: str) -> dict[str, Any]:
    result = run(PHASED, device)
    assert in_mib(result["phases"]) == {
        "load": 16,  # 10 kept, 6 after the mark and before the next
        "prepare": 12,
        "forward": 12 + 8 + 48,  # two threads have left 4 each
        "backward": 12 + 12 + 22,  # after its end and before the next
        "step": 12 + 12 + 16 + 6,
        "save": 24 + 10,  # 10 freed, 20 made
    }
    assert (result["peak_phase"], result["peak_bytes"]) == ("forward", 68 * MiB)
    assert result["live_bytes"] == 24 * MiB
    assert result["live_steps"] == [16 * MiB, 20 * MiB, 24 * MiB]
    return result


def test_known_allocations_give_exact_peaks_on_cpu() -> None:
    cpu = known_peaks("cpu")
    assert cpu["reason"] is None
    assert cpu["reserved_bytes"] is cpu["device_bytes"] is None
    assert cpu["seconds"] > 0
    assert 50 * MiB < cpu["rss_bytes"] <= cpu["rss_peak_bytes"]


@pytest.fixture(scope="module")
def windows() -> dict[str, Any]:
    return run(WINDOWS)


@pytest.mark.parametrize(
    ("when", "reason"), [("before", "was running"), ("within", "was started"), ("over its end", "was started")]
)
def test_another_profiler_is_left_alone_and_nothing_is_measured(
    windows: dict[str, Any], when: str, reason: str
) -> None:
    measured, keys = windows[when]
    assert reason in measured["reason"]
    assert measured["peak_bytes"] is measured["peak_phase"] is measured["live_bytes"] is None
    assert measured["phases"] == {}
    assert "aten::ones" in keys
    assert when != "over its end" or "aten::sin" in keys


def test_another_profiler_at_the_save_costs_the_save_alone(windows: dict[str, Any]) -> None:
    measured, keys = windows["at the save"]
    assert measured["phases"]["forward"] == MiB
    assert "save" not in measured["phases"]
    assert "save's peak is missing" in measured["reason"]
    assert "aten::ones" in keys


def test_a_window_that_is_switched_off(windows: dict[str, Any]) -> None:
    measured, _ = windows["off"]
    assert measured["peak_bytes"] is None
    assert "--no-memory-window" in measured["reason"]
    assert measured["rss_bytes"] > 50 * MiB


def test_training_shorter_than_the_window_is_measured_whole(windows: dict[str, Any]) -> None:
    measured, _ = windows["one step"]
    assert (measured["peak_bytes"], measured["live_steps"], measured["reason"]) == (MiB, [0], None)


def test_the_innermost_phase_counts_and_goes_on_until_the_next() -> None:
    totals = [(1, ""), (5, ""), (5, "begin/backward"), (9, ""), (7, "begin/step"), (8, ""), (8, "end/step")]
    totals += [(6, ""), (6, "end/backward"), (11, ""), (2, "begin/forward"), (2, "end/forward")]
    peaks = PhasePeaks()
    peaks.follow(totals)
    assert peaks.highest == {"load": 5, "backward": 11, "step": 8, "forward": 2}


def test_a_kind_of_device_that_is_unknown() -> None:
    with pytest.raises(ValueError, match="'tpu': expected cpu or cuda"):
        measurement.start("tpu")


def test_live_bytes_follow_the_resident_set() -> None:
    before = measurement.live_bytes("cpu")
    block = bytearray(b"x") * (64 * MiB)
    after = measurement.live_bytes("cpu")
    assert list(after) == ["rss"]
    assert (after["rss"] or 0) - (before["rss"] or 0) > 60 * MiB
    assert len(block) == 64 * MiB


# ---- all ranks


def rank(peak: int | None, phase: str | None = "backward", **more: Any) -> measurement.Measured:
    phases = {} if peak is None or phase is None else {phase: peak}
    values: dict[str, Any] = {"device": "cpu", "rss_bytes": 7, "rss_peak_bytes": 9, "live_bytes": 60, **more}
    return measurement.Measured(peak_bytes=peak, peak_phase=phase, phases=phases, **values)


HELD = StateMemory(trainable=20, frozen=5, master=10, optimizer=25)


def together(*ranks: measurement.Measured) -> measurement.Memory:
    """What `collect` makes of several ranks: each one's share of the gathering, joined."""
    shares: list[Any] = []

    def give(share: list[Any]) -> list[Any]:
        shares.extend(share)
        return share

    for one in ranks:
        measurement.collect(one, HELD, give)
    return measurement.collect(ranks[0], HELD, lambda _: shares)


def test_the_worst_rank_stands_at_the_top_and_its_parts_add_up() -> None:
    memory = together(rank(100), rank(140), rank(120))
    measured = memory.measured
    assert list(measured) == ["peak_bytes", "peak_phase", "phases", "parts", "per_rank"]
    assert (measured["peak_bytes"], measured["peak_phase"], measured["phases"]) == (140, "backward", {"backward": 140})
    assert measured["parts"] == {"parameters": 25, "master": 10, "optimizer": 25, "transient": 80}
    assert [row["peak_bytes"] for row in measured["per_rank"]] == [100, 140, 120]
    for row in measured["per_rank"]:
        assert sum(row["parts"].values()) == row["peak_bytes"]
    assert memory.host == {"peak_bytes": 360}
    assert memory.reason is None
    assert memory.to_dict() == {"measured": measured, "reason": None, "host": {"peak_bytes": 360}}
    assert json.loads(memory.to_json())["measured"]["parts"] == measured["parts"]


def test_a_phases_highest_may_be_another_ranks() -> None:
    reads = dataclasses.replace(rank(100, "load"), phases={"load": 100, "backward": 90})
    trains = dataclasses.replace(rank(120), phases={"load": 10, "backward": 120})
    measured = together(reads, trains).measured
    assert measured["phases"] == {"load": 100, "backward": 120}
    assert (measured["peak_bytes"], measured["peak_phase"]) == (120, "backward")


@pytest.mark.parametrize("phase", ["load", "prepare"])
def test_a_peak_before_the_first_step_is_one_part(phase: str) -> None:
    measured = together(rank(100, phase)).measured
    assert measured["parts"] == {"transient": 100}


def test_a_rank_without_a_measurement_makes_all_null() -> None:
    memory = together(rank(100), rank(None, None, live_bytes=None, reason="why"))
    assert memory.to_dict() == {"measured": None, "reason": "why", "host": {"peak_bytes": None}}
    assert "why" in str(memory)


def test_states_outside_of_the_allocator_are_said() -> None:
    memory = together(rank(100, live_bytes=60), rank(100, live_bytes=50))
    assert memory.reason.startswith("rank 1 holds 10 B of its states outside of the allocator")


def test_on_cuda_the_host_is_the_sum_of_resident_sets() -> None:
    assert together(rank(100, device="cuda"), rank(100, device="cuda")).host == {"peak_bytes": 18}


def test_a_measurement_shows_itself() -> None:
    text = str(together(rank(3 * MiB), rank(2 * MiB, "forward")))
    assert text.splitlines()[1].split() == ["rank", "peak", "forward", "backward", "peak", "RSS"]
    assert "3.0 MiB" in text
    assert "<table>" in rank(MiB)._repr_html_()
    assert "1.0 MiB" in str(rank(MiB))


# ---- CUDA


@pytest.mark.gpu
def test_known_allocations_give_exact_peaks_on_cuda() -> None:
    result = known_peaks("cuda")
    assert result["reserved_bytes"] >= result["peak_bytes"]
    assert (result["device_bytes"] is None) == (result["reason"] is not None)
    assert result["device_bytes"] is None or result["device_bytes"] > result["reserved_bytes"]


@pytest.mark.gpu
def test_each_step_reads_cuda() -> None:
    import torch

    block = torch.empty(8 * MiB, dtype=torch.uint8, device="cuda")
    result = measurement.live_bytes(block.device)
    assert list(result) == ["allocated", "reserved", "device"]
    assert (result["reserved"] or 0) >= (result["allocated"] or 0) >= 8 * MiB
