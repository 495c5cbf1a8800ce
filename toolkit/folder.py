"""A run's folder: its paths, what is written into it, and the lock. Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.durable import append_line, write_json
from toolkit.errors import RunError
from toolkit.locking import hold, run_token
from toolkit.redacting import redact_all

RUNS = "runs"
"""Where runs are that nobody gave a place."""

BEGUN = {"lock", "logs", "accelerate.yaml"}
"""What is in a folder before its run has begun."""

SPARE = 8192
"""Bytes that each rank keeps free for the words in which it ends."""


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A run's folder, held by this process until `leave()` or its end. Made by `enter`."""

    path: Path
    token: str
    """The run that holds the folder: the same word in its supervisor and in every rank."""
    created: bool
    """Whether this process was the first of its run, and the run is a new one."""
    lock: int
    """Open file descriptor of the lock."""

    @property
    def run_json(self) -> Path:
        """Strategy, loop, forecast, versions, hardware, seed, data fingerprint."""
        return self.path / "run.json"

    @property
    def events(self) -> Path:
        """A line a step."""
        return self.path / "events.jsonl"

    @property
    def memory(self) -> Path:
        """Measured peaks, rank by phase."""
        return self.path / "memory.json"

    @property
    def config(self) -> Path:
        """The Accelerate config file that the run was launched with."""
        return self.path / "accelerate.yaml"

    @property
    def checkpoints(self) -> Path:
        """One folder a checkpoint."""
        return self.path / "checkpoints"

    @property
    def published(self) -> Path:
        """A line for each checkpoint that was published: its step, bytes, and what it cost."""
        return self.path / "checkpoints.jsonl"

    @property
    def export(self) -> Path:
        """The trained model."""
        return self.path / "export"

    @property
    def report(self) -> Path:
        """The run as a page."""
        return self.path / "report.html"

    @property
    def logs(self) -> Path:
        """What the processes printed."""
        return self.path / "logs"

    def log(self, rank: int) -> Path:
        """What a rank printed."""
        return self.logs / f"rank-{rank}.log"

    def beat(self, rank: int) -> Path:
        """A rank's sign of life."""
        return self.logs / f"rank-{rank}.beat"

    def error(self, rank: int) -> Path:
        """How a rank ended, where an exception ended it."""
        return self.logs / f"rank-{rank}.error.json"

    @property
    def end(self) -> Path:
        """How the last attempt ended, as its supervisor said it; nothing where it finished."""
        return self.logs / "end.json"

    def append_event(self, event: Mapping[str, Any]) -> None:
        """Add a line to `events.jsonl`."""
        append_line(self.events, event)

    def record_error(self, rank: int, error: BaseException) -> None:
        """Leave for the supervisor what ended this rank: it raises a `ToolkitError` again as it was."""
        self.logs.mkdir(exist_ok=True)
        about = {"type": type(error).__name__, "time": time.time(), "pid": os.getpid()}
        try:
            write_json(self.error(rank), {**about, "message": str(error)})
        except RunError:
            short = str(error)[: SPARE // 16]  # JSON spells a character in 12 bytes at most
            with contextlib.suppress(OSError):
                with self._spare(rank).open("r+") as file:
                    file.write(json.dumps(redact_all({**about, "message": short})))
                self._spare(rank).rename(self.error(rank))

    def record_end(self, how: str, message: str) -> None:
        """Leave for whoever looks later how a run that had begun ended: `stopped` or `failed`, and what was said of it."""
        if self.run_json.exists():
            with contextlib.suppress(RunError):  # a full disk: the user has been told
                write_json(self.end, {"how": how, "time": time.time(), "message": message})

    def errors(self) -> dict[int, dict[str, Any]]:
        """Rank → the exception that ended it, as `record_error` left it."""
        kinds = {"type": str, "message": str, "time": int | float}
        found = {}
        for path in self.logs.glob("rank-*.error.json"):
            with contextlib.suppress(OSError, ValueError, RecursionError):  # what cannot be read says nothing
                error = json.loads(path.read_bytes())
                if isinstance(error, dict) and all(isinstance(error.get(name), kind) for name, kind in kinds.items()):
                    found[int(path.name.split(".")[0].removeprefix("rank-"))] = error
        return found

    @contextlib.contextmanager
    def room_for_error(self, rank: int) -> Iterator[None]:
        """Meanwhile `record_error` works on a full disk, too: what is overwritten has its room, and a name needs none."""
        with contextlib.suppress(OSError):
            self._spare(rank).write_text(" " * SPARE)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self._spare(rank).unlink(missing_ok=True)

    def _spare(self, rank: int) -> Path:
        return self.logs / f".rank-{rank}.spare"

    def leave(self) -> None:
        """Let the next run in."""
        os.close(self.lock)

    def discard(self, *, shared: bool = False) -> None:
        """Remove a new run that has nothing to show: made here, and nothing in it but what every run begins with.

        Args:
            shared: another rank of the run may have made the folder, and may be removing it at the same time.
        """
        if not shared and not self.created:
            return
        with contextlib.suppress(FileNotFoundError):
            if {entry.name for entry in self.path.iterdir()} <= {*BEGUN, "run.json"}:
                shutil.rmtree(self.path, ignore_errors=shared)
        with contextlib.suppress(OSError):  # where it was the only run
            if self.path.parent == Path("runs"):
                self.path.parent.rmdir()

    def __enter__(self) -> Folder:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave."""
        self.leave()


def enter(path: str | Path, *, resume: bool = False, token: str | None = None, wait: float = 10.0) -> Folder:
    """Make a new run's folder, or go on in an old one's, and hold it against every other run.

    The supervisor of a run and each of its ranks enter; a second run is let in when all of them are gone. It needs
    `flock`: Linux and macOS have it on local disks, Linux on NFS too.

    Args:
        path: the folder; parents are made.
        resume: the folder must hold a run; otherwise it must not.
        token: names the run. A supervisor passes `new_token()`; a rank takes the default, `run_token()`.
        wait: seconds to wait for another run's processes to end.

    Raises:
        RunError: the folder holds a run or other files (or, resuming, none); it holds a link that leads out of it; another
            run's processes hold it after `wait` seconds; it cannot be made. Nothing is written then.
    """
    path, token = Path(path), token or run_token()
    if resume and not (path / "run.json").is_file():
        raise _no_run(path)
    if not resume and not (path / "lock").exists():
        _refuse_old(path)
    refuse_links(path)

    def admit() -> None:
        if not resume:
            _refuse_old(path)

    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise RunError(
            f"the run folder {path} cannot be made: {error.strerror}. Choose another folder with --run-dir."
        ) from error
    try:
        first = hold(path, lock, token, wait, admit=admit)
    except BaseException:
        os.close(lock)
        raise
    return Folder(path=path, token=token, created=first and not resume, lock=lock)


def look(path: str | Path) -> Folder:
    """A run's folder to read in, whoever holds it: nobody is kept out.

    Raises:
        RunError: where it holds no run.
    """
    folder = unheld(path)
    if not folder.run_json.is_file():
        raise _no_run(folder.path)
    return folder


def unheld(path: str | Path) -> Folder:
    """The paths of a run that may not have begun."""
    return Folder(path=Path(path), token="", created=False, lock=-1)


def check_new(path: str | Path | None) -> None:
    """Refuse early a folder in which `enter` could not make a new run; of None, the place of new ones. Writes nothing.

    Raises:
        RunError: for a folder that holds a run or other files, and for a place that cannot be written.
    """
    if path is not None:
        _refuse_old(Path(path))
    check_place(RUNS if path is None else path)


def check_place(path: str | Path) -> None:
    """Refuse early a folder that could not be made, or not be written into. Writes nothing.

    Raises:
        RunError: with the place that is in the way.
    """
    path = Path(path)
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    why = "it is a file" if not there.is_dir() else "" if os.access(there, os.W_OK) else "it cannot be written"
    if why:
        raise RunError(f"the run folder {path} cannot be made in {there}: {why}. Choose another folder with --run-dir.")


def new_path(root: str | Path, word: str) -> Path:
    """Make an empty folder for a run: `runs/20261121-0930-zero3`, with a number behind it where that exists.

    Raises:
        RunError: where none can be made.
    """
    stem = f"{time.strftime('%Y%m%d-%H%M')}-{word}"
    for number in range(1, 10_000):
        path = Path(root) / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise RunError(
                f"the run folder {path} cannot be made: {error.strerror}. Choose one with --run-dir."
            ) from error
        return path
    raise RunError(f"{root} holds {number} runs named {stem}: choose a folder with --run-dir.")


def read_run_json(path: Path) -> dict[str, Any]:
    """What `run.json` of a run's folder says.

    Raises:
        RunError: where there is none, or it is none of ours.
    """
    file = path / "run.json"
    try:
        found: dict[str, Any] = json.loads(file.read_bytes())
        missing = {name for name in ("strategy", "loop", "recipe") if not isinstance(found.get(name), dict)}
        missing |= {"ranks"} - ({"ranks"} if type(found.get("ranks")) is int and found["ranks"] > 0 else set())
    except FileNotFoundError:
        raise _no_run(path) from None
    except (OSError, ValueError, AttributeError) as error:
        raise RunError(f"{file} cannot be read: {error}. Name the folder of a run to go on with.") from error
    if missing:
        raise RunError(f"{file} says nothing of {', '.join(sorted(missing))}. Name the folder of a run to go on with.")
    return found


def _refuse_old(path: Path) -> None:
    """A new run starts in a folder that does not exist or is empty; a lock and logs alone are no run."""
    if not path.exists():
        return
    if not path.is_dir():
        raise RunError(f"{path} is a file: expected a folder for the run. Choose another with --run-dir.")
    drafts = {entry.name for entry in path.glob(".*.tmp")}  # of a process that was killed as it wrote
    found = {entry.name for entry in path.iterdir()} - BEGUN - drafts
    if "run.json" in found or "events.jsonl" in found:
        raise RunError(f"{path} holds a run already. Choose another folder with --run-dir, or remove it.")
    if found:
        raise RunError(
            f"{path} is not empty (it has {min(found)}): expected a new or an empty folder. "
            "Choose another with --run-dir."
        )


def refuse_links(path: Path) -> None:
    """A run writes into its folder and nowhere else: another's folder may link to files of ours.

    Raises:
        RunError: for a link that leads out of it.
    """
    for folder in (path, path / "logs", path / "checkpoints"):
        for entry in folder.iterdir() if folder.is_dir() else ():
            if entry.is_symlink() and path.resolve() not in entry.resolve().parents:
                raise RunError(
                    f"{entry} is a link that leads out of the run's folder, to {entry.resolve()}, and a run writes there. "
                    "Put the file or folder itself in its place, or choose another folder with --run-dir."
                )


def _no_run(path: Path) -> RunError:
    return RunError(
        f"{path} holds no run: {path / 'run.json'} does not exist. Name a run's folder, as `toolkit runs` lists them; one that "
        "was stopped before it had begun is started anew."
    )
