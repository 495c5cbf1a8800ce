"""A run's folder: its paths, writing JSON, `events.jsonl` line by line, and the lock. Standard library only."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import RunError
from toolkit.redacting import redact_all

TOKEN = "TOOLKIT_RUN_TOKEN"
"""The environment variable by which a supervisor tells its ranks which run they belong to."""


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

    def append_event(self, event: Mapping[str, Any]) -> None:
        """Add a line to `events.jsonl`."""
        append_line(self.events, event)

    def record_error(self, rank: int, error: BaseException) -> None:
        """Leave for the supervisor what ended this rank: it raises a `ToolkitError` again as it was."""
        what = {"type": type(error).__name__, "message": str(error), "time": time.time(), "pid": os.getpid()}
        self.logs.mkdir(exist_ok=True)
        write_json(self.error(rank), what)

    def leave(self) -> None:
        """Let the next run in."""
        os.close(self.lock)

    def discard(self, *, shared: bool = False) -> None:
        """Remove a new run that has nothing to show: made here, and no step and no checkpoint in it.

        Args:
            shared: another rank of the run may have made the folder, and may be removing it at the same time.
        """
        if (shared or self.created) and not self.events.exists() and not self.checkpoints.exists():
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
        raise RunError(
            f"{path} holds no run: {path / 'run.json'} does not exist. Name the folder of a run to go on with."
        )
    if not resume and not (path / "lock").exists():
        _refuse_old(path)
    _refuse_links(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise RunError(
            f"the run folder {path} cannot be made: {error.strerror}. Choose another folder with --run-dir."
        ) from error
    try:
        first = _hold(path, lock, token, resume, wait)
    except BaseException:
        os.close(lock)
        raise
    return Folder(path=path, token=token, created=first and not resume, lock=lock)


def check_new(path: str | Path) -> None:
    """Refuse early a folder in which `enter` could not make a new run. Writes nothing.

    Raises:
        RunError: for a folder that holds a run or other files, and for a place that cannot be written.
    """
    path = Path(path)
    _refuse_old(path)
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    why = "it is a file" if not there.is_dir() else "" if os.access(there, os.W_OK) else "it cannot be written"
    if why:
        raise RunError(f"the run folder {path} cannot be made in {there}: {why}. Choose another folder with --run-dir.")


def supervised() -> bool:
    """Whether a supervisor of ours started this process: it then shows errors and the logs' last lines."""
    return TOKEN in os.environ


def new_token() -> str:
    """A name that no other run has."""
    return uuid.uuid4().hex


def run_token() -> str:
    """What all ranks of this run, and of no other, have in common: what the supervisor set, or else their launcher."""
    if found := os.environ.get(TOKEN):
        return found
    if "LOCAL_RANK" not in os.environ:
        return new_token()
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        return f"{socket.gethostname()}-{os.getppid()}-{_started(os.getppid())}"
    return "-".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"))


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


def write_json(path: Path, value: Any) -> None:
    """Write JSON whole or not at all. Numbers that are not finite become null, secrets `[redacted]`."""
    text = json.dumps(_finite(redact_all(value)), indent=2, allow_nan=False) + "\n"
    write_whole(path, text.encode())


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Add a line of JSON in one write: whoever reads sees it whole, and a killed process leaves it."""
    with open(path, "ab", buffering=0) as file:
        file.write((json.dumps(_finite(redact_all(line)), allow_nan=False) + "\n").encode())


def read_events(path: Path) -> list[dict[str, Any]]:
    """The lines of `events.jsonl`. A torn last line, as a killed process leaves it, does not count.

    Raises:
        RunError: for any other line that is no JSON object, with its number.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    torn = len(lines)  # what stands behind the last newline
    events: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            event = json.loads(line)
        except ValueError as error:
            if number == torn:
                break
            raise RunError(f"{path}, line {number}: no JSON ({error}). Repair or remove the line.") from error
        if not isinstance(event, dict):
            raise RunError(
                f"{path}, line {number}: expected a JSON object, found {line[:40]!r}. Repair or remove the line."
            )
        events.append(event)
    return events


def last_step(path: Path) -> int:
    """The last step in `events.jsonl`; 0 before the first."""
    return max((int(event.get("step", 0)) for event in read_events(path)), default=0)


def cut_events(path: Path, step: int) -> list[dict[str, Any]]:
    """Keep the lines up to `step`, drop later ones and a torn last one. What is kept comes back."""
    if not path.exists():
        return []
    kept = [event for event in read_events(path) if event.get("step", 0) <= step]
    write_whole(path, "".join(json.dumps(event) + "\n" for event in kept).encode())
    return kept


def sync_folder(path: Path) -> None:
    """Flush a folder to the disk: the names in it, too, survive a power cut."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, flushed to the disk with its name."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(draft, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _refuse_old(path: Path) -> None:
    """A new run starts in a folder that does not exist or is empty; a lock and logs alone are no run."""
    if not path.exists():
        return
    if not path.is_dir():
        raise RunError(f"{path} is a file: expected a folder for the run. Choose another with --run-dir.")
    drafts = {entry.name for entry in path.glob(".*.tmp")}  # of a process that was killed as it wrote
    found = {entry.name for entry in path.iterdir()} - {"lock", "logs", "accelerate.yaml"} - drafts
    if "run.json" in found or "events.jsonl" in found:
        raise RunError(f"{path} holds a run already. Choose another folder with --run-dir, or remove it.")
    if found:
        raise RunError(
            f"{path} is not empty (it has {min(found)}): expected a new or an empty folder. "
            "Choose another with --run-dir."
        )


def _refuse_links(path: Path) -> None:
    """A run writes into its folder and nowhere else: another's folder may link to files of ours."""
    for folder in (path, path / "logs", path / "checkpoints"):
        for entry in folder.iterdir() if folder.is_dir() else ():
            if entry.is_symlink() and path.resolve() not in entry.resolve().parents:
                raise RunError(
                    f"{entry} is a link that leads out of the run's folder, to {entry.resolve()}, and a run writes there. "
                    "Put the file or folder itself in its place, or choose another folder with --run-dir."
                )


def _hold(path: Path, lock: int, token: str, resume: bool, wait: float) -> bool:
    """Take the lock together with the other processes of this run; true for the first of them.

    The file names the run, and all of the run's processes share the lock. The first takes it alone, writes the name,
    and then shares it; `flock` lets go in between, so whoever comes to share reads the name again afterwards. While
    anybody shares, nobody has it alone, and the name stands.
    """
    deadline, first = time.monotonic() + wait, False
    while True:
        if _flock(path, lock, shared=True):
            if _holders(lock)[:1] == [{"token": token}]:
                _write_line(lock, {"pid": os.getpid(), "host": socket.gethostname(), "role": _role()})
                return first
            _unlock(lock)
        first = False
        if _flock(path, lock, shared=False):
            if not resume:
                _refuse_old(path)
            os.ftruncate(lock, 0)
            _write_line(lock, {"token": token})
            first = True
            continue
        if time.monotonic() >= deadline:
            raise RunError(_held_by(path, lock))
        time.sleep(random.uniform(0.02, 0.1))  # two that ask in step would keep each other out


def _flock(path: Path, lock: int, *, shared: bool) -> bool:
    import fcntl

    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise RunError(
            f"{path} cannot be locked: {error.strerror}. Choose a folder on a file system with flock (--run-dir)."
        ) from error
    return True


def _unlock(lock: int) -> None:
    import fcntl

    fcntl.flock(lock, fcntl.LOCK_UN)


def _write_line(lock: int, line: Mapping[str, Any]) -> None:
    os.write(lock, (json.dumps(line) + "\n").encode())


def _holders(lock: int) -> list[dict[str, Any]]:
    text = os.pread(lock, 1 << 20, 0).decode(errors="replace")
    return list(_objects(text.splitlines()))


def _objects(lines: list[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def _held_by(path: Path, lock: int) -> str:
    here = socket.gethostname()
    holders = [line for line in _holders(lock) if "pid" in line]
    living = [line for line in holders if line["host"] != here or process_lives(line["pid"])] or holders
    who = ", ".join(f"process {line['pid']} ({line['role']}, on {line['host']})" for line in living) or "another run"
    return f"{path} is in use by {who}. Wait until it ends, end it, or choose another folder with --run-dir."


def process_lives(pid: int) -> bool:
    """Whether there is a process of this number on this machine, whoever owns it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _role() -> str:
    return f"rank {os.environ['RANK']}" if "RANK" in os.environ else "supervisor"


def _started(pid: int) -> str:
    """When a process began, in clock ticks: with it a pid names one process for good. Empty without /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
