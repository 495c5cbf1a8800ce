"""A run's folder: its paths, its records, and the lock. Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.core.atomic_io import DRAFT, append_line, check_fields, expand_user, read_json, unwritable, write_json
from toolkit.core.errors import RunError
from toolkit.core.redaction import redact_all
from toolkit.run_folder.run_json import no_run, read_run_json
from toolkit.run_folder.run_lock import hold, is_lock, role, run_token, sign

RUNS_FOLDER = "runs"
"""The default folder of runs."""

CLAIM = "TOOLKIT_RUN_CLAIM"
"""The environment variable of a supervisor that inherits its folder's lock: descriptor, token, whether the run is new."""

SPARE = 8192
"""Bytes that each rank reserves for its error file."""

_JSON_FILES = r"run\.json|accelerate\.yaml|logs/(rank-\d+\.error|failures|end|audit)\.json"
_OWN_FILES = re.compile(
    rf"lock|{_JSON_FILES}|logs/(rank-\d+\.(log|beat)|\.rank-\d+\.spare|(launcher|supervisor)\.log|function\.pkl)"
)
"""Files that a run writes before it begins, beside its signed lock; other files are the user's."""

_DRAFT_NAME = re.compile(rf"(logs/)?\.(.+)\.[0-9a-f]{{16}}{re.escape(DRAFT)}")

LONGEST_NAME = 200
"""Bytes of a run's name: files in its folder have longer ones."""


class Inside:
    """A path inside a run's folder, as an attribute of `Folder`: of the class, relative."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: Folder | None, _: type[Folder]) -> Path:
        return folder.path / self.name if folder else Path(self.name)


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A run's folder, locked by this process until `leave()` or its end. Returned by `enter`."""

    path: Path
    token: str
    """The run that holds the folder: the same word in its supervisor and in every rank."""
    created: bool
    """Whether this process was the first of its run, and the run is a new one."""
    lock: int
    """Open file descriptor of the lock."""

    run_json = Inside("run.json")
    """Strategy, loop, forecast, versions, hardware, seed, data fingerprint."""
    events = Inside("events.jsonl")
    """A line a step."""
    memory = Inside("memory.json")
    """Measured peaks, rank by phase."""
    config = Inside("accelerate.yaml")
    """The Accelerate config file that the run was launched with."""
    checkpoints = Inside("checkpoints")
    """One folder a checkpoint."""
    published = Inside("checkpoints.jsonl")
    """A line for each published checkpoint: its step, bytes, and cost."""
    export = Inside("export")
    best = Inside("best")
    """The trained model."""
    report = Inside("report.html")
    """The run as a page."""
    logs = Inside("logs")
    """The logs of the processes."""
    launcher_log = Inside("logs/launcher.log")
    """The output of `accelerate launch`."""
    exits = Inside("logs/failures.json")
    """The launcher's record of how ranks ended."""
    supervisor_log = Inside("logs/supervisor.log")
    """The output of a supervisor in its own session: restarts, and the end of the run."""
    function = Inside("logs/function.pkl")
    """A shipped function."""
    end = Inside("logs/end.json")
    """The end of the last attempt, by its supervisor; no file if it finished."""
    audit = Inside("logs/audit.json")
    """The sharding that an audit found in a script, module or function, by rank 0; no file without an audit."""

    def log(self, rank: int) -> Path:
        """Return the log of a rank."""
        return self.logs / f"rank-{rank}.log"

    def beat(self, rank: int) -> Path:
        """Return the heartbeat file of a rank."""
        return self.logs / f"rank-{rank}.beat"

    def error(self, rank: int) -> Path:
        """Return the file with the exception that ended a rank."""
        return self.logs / f"rank-{rank}.error.json"

    def rank_files(self, kind: str) -> list[Path]:
        """Return the files of ranks in `logs`: of the kind `log`, `beat` or `error.json`."""
        return [path for path in self.logs.glob(f"rank-*.{kind}") if _OWN_FILES.fullmatch(f"logs/{path.name}")]

    def append_event(self, event: Mapping[str, Any]) -> None:
        """Add a line to `events.jsonl`."""
        append_line(self.events, event)

    def record_error(self, rank: int, error: BaseException) -> None:
        """Record the error that ended this rank: the supervisor raises a `ToolkitError` again."""
        self.logs.mkdir(exist_ok=True)
        about = {
            "type": type(error).__name__,
            "time": time.time(),
            "tick": time.monotonic(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        try:
            write_json(self.error(rank), {**about, "message": str(error)})
        except RunError:
            short = str(error)[: SPARE // 16]  # JSON spells a character in 12 bytes at most
            with contextlib.suppress(OSError):
                with self._spare(rank).open("r+") as file:
                    file.write(json.dumps(redact_all({**about, "message": short})))
                self._spare(rank).rename(self.error(rank))

    def record_end(self, how: str, message: str) -> None:
        """Record how a run that had begun ended: `stopped` or `failed`, and its message."""
        if self.run_json.exists():
            with contextlib.suppress(RunError):  # a full disk: the user knows
                attempt = len(read_run_json(self.path).get("attempts", ()))
                write_json(self.end, {"how": how, "attempt": attempt, "message": message})

    def errors(self) -> dict[int, dict[str, Any]]:
        """Rank → the exception that ended it, from `record_error`, the earliest first: by a monotonic clock on one host."""
        kinds = {"type": str, "message": str, "time": int | float, "tick": int | float, "host": str}
        errors: dict[int, dict[str, Any]] = {}
        for path in self.rank_files("error.json"):
            with contextlib.suppress(OSError, ValueError):  # an unreadable file is ignored
                error = read_json(path)
                check_fields(error, kinds)
                if set(kinds) <= set(error):
                    errors[int(path.name.split(".")[0].removeprefix("rank-"))] = error
        clock = "tick" if len({error["host"] for error in errors.values()}) == 1 else "time"
        return dict(sorted(errors.items(), key=lambda item: float(item[1][clock])))

    @contextlib.contextmanager
    def room_for_error(self, rank: int) -> Iterator[None]:
        """Reserve space so that `record_error` works on a full disk."""
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
        """Unlock the folder for the next run."""
        os.close(self.lock)

    def discard(self, *, shared: bool = False) -> None:
        """Remove a new run without results, unless its folder holds a file of the user's.

        Args:
            shared: another rank of the run may have made the folder, and may be removing it at the same time.
        """
        if not shared and not self.created:
            return
        with contextlib.suppress(FileNotFoundError):
            if not foreign_files(self.path):
                shutil.rmtree(self.path, ignore_errors=shared)
        with contextlib.suppress(OSError):  # where it was the only run
            if self.path.parent == Path(RUNS_FOLDER):
                self.path.parent.rmdir()

    def __enter__(self) -> Folder:
        """Return the folder."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the folder."""
        self.leave()


def enter(path: str | Path, *, resume: bool = False, token: str | None = None, wait: float = 10.0) -> Folder:
    """Create a new run's folder, or continue in an old one, and lock it against other runs.

    The supervisor of a run and each of its ranks enter; a second run waits until all of them have left. Needs `flock`.

    Args:
        path: the folder; parents are created.
        resume: the folder must hold a run; otherwise it must not.
        token: names the run. A supervisor passes `new_token()`; a rank takes the default, `run_token()`.
        wait: seconds to wait for another run's processes to end.

    Raises:
        RunError: the folder holds a run or other files (or, resuming, none); a link leads out of it; another run's
            processes hold it after `wait` seconds; it cannot be created. Nothing is written then.
    """
    if claimed := os.environ.pop(CLAIM, None):  # by the process that launched this one
        lock, token, created = json.loads(claimed)
        os.set_inheritable(lock, False)
        return Folder(path=expand_user(path), token=token, created=created, lock=lock)
    folder = claim(path, resume=resume, token=token or run_token(), wait=wait)
    sign(folder.lock, os.getpid(), role())
    return folder


def claim(path: str | Path, *, resume: bool, token: str, wait: float) -> Folder:
    """Lock a folder as `enter` does, for a process that this one starts, inherits the lock and signs it.

    Raises:
        RunError: as `enter`.
    """
    path = expand_user(path)
    if resume and not (path / "run.json").is_file():
        raise no_run(path)

    def validate() -> None:
        if not resume:
            refuse_old(path)

    if not (path / "lock").exists():
        validate()
    refuse_links(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise unmakeable(path, error.strerror) from error
    try:
        first = hold(path, lock, token, wait, validate=validate)
    except BaseException as error:
        os.close(lock)
        if isinstance(error, OSError):
            raise unwritable(path / "lock", 200, error.strerror or str(error)) from error
        raise
    return Folder(path=path, token=token, created=first and not resume, lock=lock)


def run_paths(path: str | Path) -> Folder:
    """Return the paths of a run that may not have begun."""
    return Folder(path=expand_user(path), token="", created=False, lock=-1)


def check_new(path: str | Path | None) -> None:
    """Refuse early a folder in which `enter` could not make a new run; of None, the place of new ones. Writes nothing.

    Raises:
        RunError: for a folder that holds a run or other files, and for a place that cannot be written.
    """
    if path is not None:
        refuse_old(expand_user(path))
    check_place(RUNS_FOLDER if path is None else path)


def check_place(path: str | Path) -> None:
    """Refuse a folder that cannot be made or written, before a run starts. Writes nothing.

    Raises:
        RunError: with the file or folder in the way.
    """
    path = expand_user(path)
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise unmakeable(path, f"{existing} is a file")
    if not os.access(existing, os.W_OK):
        raise unmakeable(path, f"{existing} cannot be written")


def unmakeable(path: Path, why: str | None) -> RunError:
    """Return the error for a run's folder that cannot be made."""
    return RunError(f"the run folder {path} cannot be made: {why}. Choose another folder with --run-dir.")


def new_path(root: str | Path, word: str) -> Path:
    """Make an empty folder for a run: `runs/20261121-0930-zero3`, with a number behind it where that exists.

    Raises:
        RunError: for a failed attempt to make it.
    """
    stem = expand_user(root) / f"{time.strftime('%Y%m%d-%H%M')}-{word}"
    path, number = stem, 1
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            number += 1
            path = stem.with_name(f"{stem.name}-{number}")
        except OSError as error:
            raise unmakeable(path, error.strerror) from error


def refuse_old(path: Path) -> None:
    """Refuse to start a new run in a folder with other files than a lock and logs of ours."""
    if path.name.startswith("-") or not path.name.isprintable() or len(os.fsencode(path.name)) > LONGEST_NAME:
        raise RunError(
            f"{path.name[:40]!r} can be no run's name: expected at most {LONGEST_NAME} bytes, no control characters, and no - "
            "at the beginning, which begins a flag. Choose another with --run-dir."
        )
    if not path.exists():
        return
    if not path.is_dir():
        raise RunError(f"{path} is a file: expected a folder for the run. Choose another with --run-dir.")
    if (path / "run.json").exists() or (path / "events.jsonl").exists():
        raise RunError(f"{path} holds a run already. Choose another folder with --run-dir, or remove it.")
    if entry := foreign_files(path):
        raise RunError(
            f"{path} is not empty (it has {min(entry)}): expected a new or an empty folder. "
            "Choose another with --run-dir."
        )


def foreign_files(path: Path) -> set[str]:
    """Return files in a folder that no run of ours writes before it begins: a new run leaves them alone.

    Without a signed lock, that is every file but an empty lock, which a run leaves that was killed as it came.
    """
    lock, logs = path / "lock", path / "logs"
    signed, foreign = is_lock(lock), set()
    for entry in (*path.iterdir(), *(logs.iterdir() if logs.is_dir() else ())):
        name = entry.relative_to(path).as_posix()
        draft = _DRAFT_NAME.fullmatch(name)  # of a process that was killed
        written = re.fullmatch(_JSON_FILES, f"{draft[1] or ''}{draft[2]}") if draft else _OWN_FILES.fullmatch(name)
        ours = written and (signed or (entry == lock and not lock.lstat().st_size))
        if not (entry == logs if entry.is_dir() else ours):
            foreign.add(name)
    return foreign


def refuse_links(path: Path) -> None:
    """Refuse links in a run's folder: a crafted folder may link to the user's files.

    Raises:
        RunError: for a link that leads out of it, and for a pipe or device in it.
    """
    for folder in (path, path / "logs", path / "checkpoints"):
        for entry in folder.iterdir() if folder.is_dir() else ():
            leads = Path(os.path.realpath(entry))  # `resolve` raises for links in a circle
            if entry.is_symlink() and Path(os.path.realpath(path)) not in leads.parents:
                raise RunError(
                    f"{entry} is a link that leads out of the run's folder, to {leads}, and a run writes there. "
                    "Put the file or folder itself in its place, or choose another folder with --run-dir."
                )
            if not entry.is_file() and not entry.is_dir() and os.path.exists(entry):
                raise RunError(f"{entry} is neither a file nor a folder, and a run writes there. Remove it.")
