"""A supervisor reads files and processes that may be damaged or gone. It leaves out what it cannot find out."""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from toolkit.core.errors import ToolkitError
from toolkit.launcher.failures import RankDied, RankHung, failure
from toolkit.launcher.heartbeat_monitor import STILL_SECONDS, HeartbeatMonitor
from toolkit.launcher.supervisor import Stopped
from toolkit.run_folder.folder import Folder
from toolkit.run_folder.heartbeat import BEAT_SECONDS, Heartbeat, read_beats
from toolkit.training.oom import killed_for_memory

GARBAGE = (
    b"", b"\xff\xfe\x00", b"{", b"null", b"[1, 2]", b'"text"', b"{}", b"[" * 5000, b'{"rank": []}', b'[{"rank": "x"}]',
    b'[{"rank": 0, "exitcode": -40, "time": 1.0}]', b'{"type": 3, "message": null, "time": "now"}',
    b'{"type": "KeyError", "message": "x", "time": 5}', b'{"step": null, "seconds": null}\n{"step"',
)  # fmt: skip


def folder(path: Path) -> Folder:
    (path / "logs").mkdir(parents=True)
    return Folder(path=path, token="t", created=False, lock=-1)


def write_beat(path: Path, **changes: Any) -> None:
    about = {"pid": os.getpid(), "step": 3, "phase": "backward", "marks": 9, "listens": True, "rss": 1, "cpu": 0.0}
    beat = {"rank": 0, **about, "time": time.time(), **changes}
    (path / f"rank-{beat['rank']}.beat").write_text(json.dumps(beat))


def overdue(run: Folder, ranks: int) -> HeartbeatMonitor:
    """A watch that has waited for longer than ranks may stand still, and looks now."""
    watch = HeartbeatMonitor(run, ranks, timeout=1.0)
    watch._still = 1.0 + STILL_SECONDS + 1
    watch._looked -= 2 * BEAT_SECONDS
    return watch


def test_without_a_single_heartbeat_nobody_is_blamed(tmp_path: Path) -> None:
    """Ranks that still import have longer than `--timeout`, and no figures."""
    overdue(folder(tmp_path), 2).look()


def test_the_idle_rank_is_named_and_a_damaged_heartbeat_is_left_out(tmp_path: Path) -> None:
    run = folder(tmp_path)
    for rank in (0, 1):
        write_beat(run.logs, rank=rank, cpu=100.0 * (1 - rank))
    watch = overdue(run, 2)
    watch.beats = read_beats(run.logs)
    (run.logs / "rank-0.beat").write_bytes(GARBAGE[-1])
    with pytest.raises(RankHung, match="rank 1 hung: the others waited for it"):
        watch.look()


@pytest.mark.parametrize(
    "change",
    [{"pid": -1}, {"pid": 2**40}, {"step": "3"}, {"cpu": None}, {"marks": 1.5}, {"phase": 7}, {"listens": 1}, {"x": 1}],
)
def test_a_heartbeat_of_another_shape_is_none(tmp_path: Path, change: dict[str, Any]) -> None:
    write_beat(tmp_path, time=1)
    assert isinstance(read_beats(tmp_path)[0], Heartbeat)
    write_beat(tmp_path, **change)
    assert read_beats(tmp_path) == {}


@pytest.mark.parametrize("seed", range(30))
def test_any_content_of_the_files_gives_a_sentence(tmp_path: Path, seed: int) -> None:
    draw, run = random.Random(seed), folder(tmp_path)
    write_beat(run.logs)
    names = ["rank-0.beat", "rank-1.beat", "rank-0.error.json", "rank-x.error.json", "rank-0.log", "failures.json"]
    for name in ["launcher.log", *names]:
        if draw.random() < 0.7:
            (run.logs / name).write_bytes(draw.choice(GARBAGE))
    for path in (run.events, run.run_json):
        path.write_bytes(draw.choice(GARBAGE))
    if draw.random() < 0.2:
        (run.logs / "rank-1.log").mkdir()
    watch = overdue(run, 2)
    with contextlib.suppress(RankHung):
        watch.look()
    for ask in (watch.lost, watch.listens, watch.busy):
        assert ask() in (True, False)
    assert isinstance(failure(run, 1, **watch.seen(), memory_kills=draw.randrange(2)), ToolkitError)
    assert str(Stopped.of(15, run)).startswith("stopped by SIGTERM")
    assert "killed by the system" in killed_for_memory(run, 0, None)


def test_a_signal_without_a_name_is_told_by_its_number(tmp_path: Path) -> None:
    run = folder(tmp_path)
    (run.logs / "failures.json").write_bytes(b'[{"rank": 0, "exitcode": -40, "time": 1.0}]')
    error = failure(run, 1)
    assert isinstance(error, RankDied)
    assert str(error).startswith("rank 0 was killed by signal 40. ")
