"""Folders of runs, written by the toolkit's own functions, with numbers that are easy to follow."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from programs import start

from toolkit.checkpoints.manifest import MANIFEST_FORMAT, Manifest
from toolkit.config.parallelism import Parallelism
from toolkit.config.run_config import RunConfig
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core import atomic_io
from toolkit.core.units import GiB, MiB, timestamp
from toolkit.devices.machine import hardware
from toolkit.engines.records import StateMemory
from toolkit.engines.resolution import resolve
from toolkit.forecasting import Forecast
from toolkit.measurement import Measured, collect
from toolkit.models import describe
from toolkit.run_folder import folder
from toolkit.training.preflight import versions
from toolkit.training.preparation import Audit

STRATEGY = Strategy(sharding="zero3", precision="bf16", attention="sdpa")
LOOP = TrainConfig(steps=20, lr=1e-3)
PARTS = {"parameters": 10 * MiB, "master": 20 * MiB, "gradients": 12 * MiB, "optimizer": 40 * MiB, "logits": 48 * MiB}


def expected() -> Forecast:
    """130 MiB in backward."""
    return Forecast(
        job=resolve(STRATEGY, LOOP, describe(None), 2, hardware("2x cpu").device),
        hardware=hardware("2x cpu"),
        limit_bytes=GiB // 4,
        peak_bytes=130 * MiB,
        peak_phase="backward",
        parts=PARTS,
        phases={"load": 20 * MiB, "forward": 110 * MiB, "backward": 130 * MiB},
        host_bytes=260 * MiB,
        checkpoint_bytes=70 * MiB,
        checkpoint_stall_seconds=0.1,
        operations=10**9,
        communication_bytes=30 * MiB,
        timing=None,
        unknown=("How fast it is, nobody knows.",),
    )


def about(run_config: RunConfig | None = None, **more: Any) -> dict[str, Any]:
    """What `run.json` says of a run that has begun."""
    strategy = dataclasses.asdict(STRATEGY)
    attempt = {"strategy": strategy, "ranks": 2, "started": timestamp(), "from_step": 0}
    return {
        "strategy": strategy,
        "train_config": dataclasses.asdict(LOOP),
        "run_config": dataclasses.asdict(run_config or RunConfig(save_every=10)),
        "ranks": 2,
        "parallelism": {"dp_shard": 2},
        "forecast": expected().to_dict(),
        "versions": versions(),
        "hardware": hardware("2x cpu").to_dict(),
        "seed": 0,
        "data": {"fingerprint": "f" * 64, "trained_tokens": 1_170_000},
        "started": timestamp(),
        "attempts": [attempt],
        "finished": None,
        **more,
    }


def event(step: int, *, loss: float | None = None, **more: Any) -> dict[str, Any]:
    """A step of 2,000 tokens in a second; the first five take two."""
    known = {"loss": 8 - step / 10 if loss is None else loss, "grad_norm": 1.5, "lr": 1e-3, "tokens": 2_000}
    seconds = 2.0 if step <= 5 else 1.0
    return {"step": step, **known, "seconds": seconds, "skipped": False, "attempt": 0, "samples": "ab", **more}


def memory(*, reason: str | None = None, forecast: bool = True) -> dict[str, Any]:
    """`memory.json`: 125 MiB in the worst rank's backward; nothing where there is a reason."""
    held = StateMemory(
        trainable=10 * MiB,
        frozen=0,
        master=20 * MiB,
        optimizer=40 * MiB,
        dtypes={"trainable": "bfloat16", "master": "float32"},
    )
    phases = {"load": 20 * MiB, "forward": 100 * MiB, "backward": 125 * MiB}
    ranks = [
        Measured(
            device="cpu",
            peak_bytes=None if reason else 125 * MiB,
            peak_phase=None if reason else "backward",
            phases={} if reason else phases,
            rss_bytes=700 * MiB,
            rss_peak_bytes=800 * MiB,
            reason=reason,
        )
        for _ in range(2)
    ]
    one = collect(ranks[0], held, lambda pairs: pairs * 2)
    audit = Audit(engine="DeepSpeedEngine", ranks=2, measured=held, expected=held)
    prediction = {
        "forecast": expected().to_dict() if forecast else None,
        "unforecast": None if forecast else "no trace",
    }
    return {**one.to_dict(), **prediction, "audits": [audit.to_dict()] * 2}


def write(
    path: Path,
    events: Iterable[dict[str, Any]],
    *,
    record: dict[str, Any] | None = None,
    memory: dict[str, Any] | None = None,
) -> folder.Folder:
    """A run's folder, that nobody holds any more."""
    with folder.enter(path) as run:
        atomic_io.write_json(run.run_json, record or about())
        run.logs.mkdir()
        for line in events:
            run.append_event(line)
        for step in (10, 20):
            costs = {"bytes": 70 * MiB, "stall_seconds": 0.1, "write_seconds": 0.5}
            atomic_io.append_line(
                run.published, {"step": step, "attempt": 0, "checkpoint": f"step-{step:08d}", **costs}
            )
        if memory:
            atomic_io.write_json(run.memory, memory)
    return run


SCRIPT = {"kind": "script", "name": "mine.py", "arguments": [], "sha256": ""}


def own(path: Path, target: dict[str, Any] | None = None, **changes: Any) -> folder.Folder:
    """A run of somebody's own code: a script, but for what `target` changes."""
    known = {"target": SCRIPT | (target or {}), "train_config": {}, "run_config": {}}
    return write(path, [], record=about(**{**known, **changes}))


def manifest(**changes: Any) -> Manifest:
    """The manifest of a checkpoint of one rank, with one tensor in one file."""
    known = {
        "format": MANIFEST_FORMAT, "step": 4, "parallelism": vars(Parallelism()), "global_batch": 1, "strategy": {},
        "train_config": {}, "counters": {"steps": 4}, "schedule": {},
        "tensors": {"a": {"weight": {"shape": [4], "dtype": "float32"}}},
        "identity": {}, "versions": {}, "written": "", "files": {"rank-00000.safetensors": {"sha256": "0" * 64, "bytes": 1}},
    }  # fmt: skip
    return Manifest(**{**known, **changes})


class Page(HTMLParser):
    """What a reader of HTML sees of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("img", "meta"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.words.append(data)


HOLD = """
import json, os, sys
from toolkit.run_folder import folder
folder.enter(sys.argv[1], resume=os.path.exists(sys.argv[1] + "/run.json"), **json.loads(sys.argv[2]))
print("in", flush=True)
sys.stdin.read()
"""


def hold(path: Path, **options: Any) -> subprocess.Popen[str]:
    """A process that enters a run's folder, says `in`, and holds it to the end of its standard input."""
    return start("-c", HOLD, path, json.dumps(options), stdin=subprocess.PIPE)


@contextlib.contextmanager
def another(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of somebody else's that holds a run's folder."""
    with hold(path) as process:
        assert process.stdout.readline() == "in\n", process.stderr.read()
        yield process
        process.stdin.close()
