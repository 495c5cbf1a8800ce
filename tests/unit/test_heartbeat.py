"""A rank's sign of life: always there, always whole, and it says where the rank is."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from programs import start, until

from toolkit.core.phases import phase
from toolkit.launcher.heartbeat_monitor import HeartbeatMonitor
from toolkit.run_folder.folder import run_paths
from toolkit.run_folder.heartbeat import Beat, Heartbeat, read_beats, show_waiting


def test_it_says_where_the_rank_is(tmp_path: Path) -> None:
    beat = Beat(tmp_path / "rank-3.beat", 3)
    with beat:
        assert (beat.last.where, beat.last.step, beat.last.pid) == ("before its first step", 0, os.getpid())
        with phase("load"):
            assert beat.last.where == "in phase load"
        beat.note("between", step=6)
        beat.note("begin", step=7)
        assert beat.last.where == "in step 7"
        with phase("forward"):
            assert beat.last.where == "in the forward of step 7"
            with phase("step"):
                assert beat.phase == "step"
            assert beat.phase == "forward"
        beat.note("between")
        assert beat.last.where == "after step 7"
        with phase("save"):
            assert beat.last.where == "in phase save, after step 7"
            with show_waiting(main=True):
                assert beat.last.where == "in phase save, after step 7"
            with show_waiting(main=False):
                assert beat.last.where == "waiting for rank 0, after step 7"
            assert beat.phase == "save"
    assert read_beats(tmp_path)[3].phase == "ended"
    assert read_beats(tmp_path)[3].step == 7


def test_ranks_of_different_stages_are_not_compared(tmp_path: Path) -> None:
    watch = HeartbeatMonitor(run_paths(tmp_path), 4, 1.0)
    told = {"pid": 1, "step": 4, "phase": "forward", "listens": True, "rss": 0, "cpu": 0.0, "time": 0.0}

    def beat(rank: int, stage: int, marks: int) -> Heartbeat:
        return Heartbeat(rank=rank, marks=marks, stage=stage, **told)  # type: ignore[arg-type]

    watch.beats = {rank: beat(rank, *place) for rank, place in {0: (0, 8), 1: (0, 8), 2: (1, 3), 3: (1, 3)}.items()}
    assert watch.behind() is None
    watch.beats[3] = beat(3, 1, 2)
    late = watch.behind()
    assert late.name == "rank 3 (pipeline stage 1)"


def test_the_place_of_an_exception_stays(tmp_path: Path) -> None:
    def fail() -> None:
        with Beat(tmp_path / "rank-0.beat", 0) as beat:
            beat.note("begin", step=4)
            with phase("backward"):
                raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert read_beats(tmp_path)[0].where == "in the backward of step 4"


def test_it_beats_by_itself_and_tells_at_once_that_it_listens(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.beat"
    with Beat(path, 0, every=0.05) as beat:
        size, first = path.stat().st_size, read_beats(tmp_path)[0]
        assert not first.listens
        assert first.rss > 2**20
        with beat.listening():
            assert read_beats(tmp_path)[0].listens
        assert not read_beats(tmp_path)[0].listens
        until(lambda: read_beats(tmp_path)[0].time >= first.time + 0.1)
        assert path.stat().st_size == size, "a full disk has room for what is overwritten"


def test_a_stopped_process_stops_beating(tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
from toolkit.run_folder.heartbeat import Beat
with Beat(Path({str(tmp_path / "rank-0.beat")!r}), 0, every=0.02):
    print("beats", flush=True)
    time.sleep(60)
"""
    with start("-c", code) as process:
        process.stdout.readline()
        assert read_beats(tmp_path)[0].pid == process.pid
        process.send_signal(19)
        time.sleep(0.2)
        last = read_beats(tmp_path)[0].time
        time.sleep(0.2)
        assert read_beats(tmp_path)[0].time == last
        process.kill()
