"""A run that is struck by SIGKILL and resumed until it is finished: what `kill.py` does to each of its runs."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from toolkit.checkpoints import list_checkpoints, read_manifest
from toolkit.config.strategy import Strategy
from toolkit.core.atomic_io import read_events
from toolkit.core.errors import CheckpointError

KINDS = ("rank", "ranks", "launcher", "supervisor")
FIELDS = ("step", "loss", "grad_norm", "lr", "tokens", "samples")
"""In which two runs are equal."""

LOOK_SECONDS = 0.005
PATIENCE = 300.0
"""Seconds after which an attempt that neither steps nor ends has hung. The first under DeepSpeed compiles for a minute."""


WITHIN = 0.15
"""Seconds: a strike falls up to so long after the step that was drawn, which is a few steps and saves."""


class Failed(Exception):
    """A trial went wrong; says how."""


def fields_of(sharding: str) -> dict[str, Any]:
    """The fields of a word such as `zero2` or `fsdp-tp2`: a sharding and degrees. A word of degrees alone: `cp2`."""
    fields: dict[str, Any] = {}
    for part in sharding.split("-"):
        degree = re.fullmatch(r"(tp|cp|ep|pp)(\d+)", part)
        fields |= {degree[1]: int(degree[2])} if degree else {"sharding": part}
    return fields


def ranks_of(arguments: argparse.Namespace, sharding: str) -> int:
    """`--ranks`, or as many as a mesh needs."""
    fields = fields_of(sharding)
    return arguments.ranks if fields.keys() == {"sharding"} else Strategy(**fields).least_ranks


def command(arguments: argparse.Namespace, sharding: str) -> list[str]:
    """What every run is given: the recipe's flags, without those that name its folder and its number of ranks."""
    fields = fields_of(sharding)
    flags = {
        "model": arguments.work / ("mixture" if "ep" in fields else "model"),
        "data": arguments.work / "data.jsonl",
        **fields,
        "accumulation": 2,
        "steps": arguments.steps,
        "save-every": 2,
        "seq-len": 32,
        "micro-batch": 1,
        "loss": "whole",  # `toolkit train` would choose one, and the run that was never stopped starts without it
    }
    return ["--no-save", "--no-guard", *(str(part) for name, value in flags.items() for part in (f"--{name}", value))]


def own_environ(arguments: argparse.Namespace) -> dict[str, str]:
    """Caches of the benchmark's own: nothing that is killed here may leave anything behind in the user's folders."""
    own = {"XDG_CACHE_HOME": arguments.work / "cache", "TORCH_EXTENSIONS_DIR": arguments.work / "extensions"}
    return {name: str(path) for name, path in own.items()}


class Attempt:
    """One `toolkit train` or `toolkit resume`: its supervisor, launcher and ranks."""

    def __init__(self, arguments: argparse.Namespace, words: list[str], folder: Path, log: Path) -> None:
        self.folder, self.log = folder, log
        self.last = last_line(folder)[0]
        """Number of the last attempt before it that took a step."""
        self._ranks: list[psutil.Process] = []
        environ = {"OMP_NUM_THREADS": "1", **os.environ, **own_environ(arguments)}
        with log.open("ab") as output:
            self.supervisor = psutil.Popen(
                [sys.executable, "-m", "toolkit.cli", *words], stdout=output, stderr=output, env=environ
            )

    def launcher(self) -> list[psutil.Process]:
        """`accelerate launch`, once it has begun."""
        return children(self.supervisor.pid, "toolkit.launcher")

    def ranks(self) -> list[psutil.Process]:
        """Its ranks, once they have begun."""
        found = [rank for launcher in self.launcher() for rank in children(launcher.pid, "toolkit.finetune")]
        self._ranks = found if len(found) > len(self._ranks) else self._ranks
        return self._ranks

    def steps(self) -> int:
        """How many steps it has done, as `events.jsonl` says."""
        attempt, step = last_line(self.folder)
        return step - attempts(self.folder)[attempt]["from_step"] if attempt > self.last else 0

    def until(self, reached: Callable[[], bool]) -> None:
        """Wait.

        Raises:
            Failed: where it ends before, or does not come to it.
        """
        deadline = time.monotonic() + PATIENCE
        while not reached():
            if self.supervisor.poll() is not None:
                raise Failed(f"{self.log.name}: ended too early, with exit status {self.supervisor.returncode}")
            if time.monotonic() > deadline:
                raise Failed(f"{self.log.name}: hangs")
            time.sleep(LOOK_SECONDS)

    def end(self) -> None:
        """Wait until it is done.

        Raises:
            Failed: where it is not.
        """
        try:
            code = self.supervisor.wait(PATIENCE)
        except (psutil.TimeoutExpired, subprocess.TimeoutExpired):
            raise Failed(f"{self.log.name}: hangs") from None
        if code != 0:
            raise Failed(f"{self.log.name}: ended with exit status {code}")

    def kill(self) -> None:
        """End it, and by that its launcher and ranks."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.supervisor.kill()
        self.supervisor.wait()


def children(parent: int, module: str) -> list[psutil.Process]:
    """Direct children that run a module; one that was forked and does not yet is still like its parent."""
    found = []
    with contextlib.suppress(OSError):
        for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            with contextlib.suppress(psutil.Error):
                child = psutil.Process(int(pid))
                words = child.cmdline()
                if "-m" in words[:3] and words[words.index("-m") + 1] == module:
                    found.append(child)
    return found


def attempts(folder: Path) -> list[dict[str, Any]]:
    """What `run.json` says of each attempt; nothing where there is none yet."""
    try:
        found: list[dict[str, Any]] = json.loads((folder / "run.json").read_bytes())["attempts"]
    except FileNotFoundError:
        found = []
    return found


def lives(process: psutil.Process) -> bool:
    """Whether a process could still write."""
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def last_line(folder: Path) -> tuple[int, int]:
    """Attempt and step of the last whole line of `events.jsonl`; (-1, 0) where there is none."""
    try:
        with (folder / "events.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return -1, 0
    if not lines:
        return -1, 0
    line = json.loads(lines[-1])
    return int(line["attempt"]), int(line["step"])


class Watcher:
    """Looks at a run's checkpoints all the time: once there was a complete one, there is always one."""

    def __init__(self, checkpoints: Path) -> None:
        self.checkpoints = checkpoints
        self.looks = self.newest = 0
        self.gaps: list[str] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(LOOK_SECONDS):
            self.look()

    def look(self) -> None:
        """One look. What was published is whole as long as it has its name."""
        found = list_checkpoints(self.checkpoints)
        self.looks += 1
        if not found and self.newest:
            self.gaps.append(f"no checkpoint in {self.checkpoints} at {time.time():.3f}")
        for path in found:
            there = _inode(path)
            try:
                manifest = read_manifest(path)
                sizes = {name: (path / name).stat().st_size for name in manifest.files}
                whole = all(size == manifest.files[name]["bytes"] for name, size in sizes.items())
                why = "sizes differ"
            except (CheckpointError, OSError) as error:
                whole, why = False, str(error)
            if whole:
                self.newest = max(self.newest, manifest.step)
                return
            if there is not None and _inode(path) == there:  # not because it was removed meanwhile
                self.gaps.append(f"{path.name} is not whole at {time.time():.3f}: {why}")

    def stop(self) -> None:
        """Look no more."""
        self._done.set()
        self._thread.join()


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def compare(folder: Path, reference: Path, steps: int) -> list[str]:
    """How a finished run differs from the one that was never stopped."""
    ours, theirs = read_events(folder / "events.jsonl"), read_events(reference / "events.jsonl")
    found = []
    if [event["step"] for event in ours] != list(range(1, steps + 1)):
        found.append("events.jsonl has not every step once, in order")
    for one, other in zip(ours, theirs, strict=False):
        differing = [name for name in FIELDS if one[name] != other[name]]
        if differing:
            said = ", ".join(f"{name} {one[name]!r} instead of {other[name]!r}" for name in differing)
            found.append(f"step {one['step']} differs: {said}")
            break
    last, expected = (list_checkpoints(path / "checkpoints")[:1] for path in (folder, reference))
    if not last or read_manifest(last[0]).files != read_manifest(expected[0]).files:
        found.append("the files of the last checkpoint differ")
    return found


class Victim:
    """One run, struck once by each kind, and resumed each time until it is finished."""

    def __init__(self, arguments: argparse.Namespace, number: int, sharding: str) -> None:
        self.arguments, self.number, self.sharding = arguments, number, sharding
        self.seed = arguments.seed + number
        self.draw = random.Random(self.seed)
        self.folder = arguments.work / f"run-{number:04d}-{sharding}"
        self.logs = self.folder.with_suffix(".logs")
        for left in (self.folder, self.logs):  # by a benchmark that was stopped
            shutil.rmtree(left, ignore_errors=True)
        self.logs.mkdir()
        self.attempts: list[Attempt] = []
        self.trials: list[dict[str, Any]] = []
        self.watcher = Watcher(self.folder / "checkpoints")

    def live(self) -> dict[str, Any]:
        """Strike and resume until it is finished. What the result says of this run."""
        began = time.monotonic()
        try:
            problems = self._struck_and_finished()
        except Failed as failed:
            problems = [str(failed)]
        finally:
            for attempt in self.attempts:
                attempt.kill()
            self.watcher.stop()
        problems += self.watcher.gaps[:3] + [trial["problem"] for trial in self.trials if "problem" in trial]
        if not problems:
            shutil.rmtree(self.folder)
            shutil.rmtree(self.logs)
        found = {"run": self.number, "seed": self.seed, "sharding": self.sharding, "problems": problems}
        gaps, seconds = len(self.watcher.gaps), time.monotonic() - began
        return {**found, "trials": self.trials, "looks": self.watcher.looks, "gaps": gaps, "seconds": seconds}

    def _struck_and_finished(self) -> list[str]:
        attempt = self._start()
        kinds = self.arguments.strikes.split(",")
        for kind in self.draw.sample(kinds, len(kinds)):
            attempt = self._strike(attempt, kind)
        attempt.until(lambda: attempt.steps() > 0)
        self._note_resumed()
        attempt.end()
        return compare(self.folder, self.arguments.work / f"reference-{self.sharding}", self.arguments.steps)

    def _start(self) -> Attempt:
        """`toolkit train`; `toolkit resume` where there is a run to go on with, `toolkit train --resume` where not yet."""
        words = ["train", *command(self.arguments, self.sharding)]
        words += ["--processes", str(ranks_of(self.arguments, self.sharding)), "--run-dir", str(self.folder)]
        if self.attempts:
            words = ["resume", str(self.folder)] if (self.folder / "run.json").exists() else [*words, "--resume"]
        log = self.logs / f"attempt-{len(self.attempts)}.log"
        self.attempts.append(Attempt(self.arguments, words, self.folder, log))
        return self.attempts[-1]

    def _strike(self, attempt: Attempt, kind: str) -> Attempt:
        """Wait for a random moment of an attempt, kill a part of it, and start the next attempt."""
        draw, ranks = self.draw, ranks_of(self.arguments, self.sharding)
        victim, starting, early = draw.randrange(ranks), draw.random() < 0.2, draw.random() < 1 / 3
        after, delay = draw.randrange(1, 40), draw.random()
        following = None
        attempt.until(lambda: len(attempt.ranks()) == ranks)
        if starting:
            until = time.monotonic() + delay * self.arguments.start_seconds
            attempt.until(lambda: time.monotonic() >= until or attempt.steps() >= after)
        else:
            attempt.until((self.folder / "run.json").exists)
            following = self._start() if early else None
            attempt.until(lambda: attempt.steps() >= after)
            time.sleep(delay * WITHIN)
        if begun := attempt.steps() > 0:
            self._note_resumed()
        struck = {"rank": [attempt.ranks()[victim]], "ranks": attempt.ranks(), "launcher": attempt.launcher()}
        trial = {
            "struck": kind,
            "moment": "steps" if begun else "start",
            "after_step": last_line(self.folder)[1],
            "newest": self.watcher.newest,
            "saving": any(name.startswith(".step-") for name in _names(self.folder / "checkpoints")),
            "at_the_door": following is not None,
            "resumed": False,
        }
        for process in struck.get(kind, [attempt.supervisor]):
            process.send_signal(signal.SIGKILL)
        self.trials.append(trial)
        return self._replace(attempt, following or self._start(), trial)

    def _replace(self, old: Attempt, new: Attempt, trial: dict[str, Any]) -> Attempt:
        """Follow both attempts until the new one's ranks appear. Where it was refused, try again."""
        began, gone, refused = time.monotonic(), None, 0
        while time.monotonic() < began + PATIENCE:
            fresh = new.ranks()  # first these, then those: what lives then lived beside them
            living = [rank.pid for rank in old.ranks() if lives(rank)]
            if gone is None and not living:
                gone = time.monotonic() - began
            if fresh:
                if living:
                    trial["problem"] = f"{new.log.name}: ranks {[rank.pid for rank in fresh]} live beside old {living}"
                new.last = last_line(self.folder)[0]
                trial |= {"gone_seconds": gone, "refused": refused, "beside": len(living)}
                trial["exit_status"] = old.supervisor.wait(PATIENCE)
                return new
            if new.supervisor.poll() is not None:
                if "is in use by" not in new.log.read_text():
                    break
                refused, new = refused + 1, self._start()
            time.sleep(LOOK_SECONDS)
        raise Failed(f"{new.log.name}: no ranks, exit status {new.supervisor.poll()}: {_end_of(new.log)}")

    def _note_resumed(self) -> None:
        """The attempt that steps now answers every strike before it."""
        start = attempts(self.folder)[-1]["from_step"]
        for trial in self.trials:
            if not trial["resumed"]:
                trial |= {"resumed": True, "from_step": start}
                if start < trial["newest"]:
                    trial["problem"] = f"resumed from step {start}, and step {trial['newest']} was complete"


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-400:].strip()
