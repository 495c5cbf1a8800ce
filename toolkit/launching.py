"""`supervise()`: a run by `accelerate launch`, shown while it goes, ended whole, its failure explained."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from toolkit import errors
from toolkit.errors import RunError, ToolkitError
from toolkit.folder import TOKEN, Folder, write_json
from toolkit.lifetime import LAUNCHER, die_with_parent

if TYPE_CHECKING:
    import psutil


STOP_SECONDS = 40.0
"""What ranks have to end by themselves: torch elastic gives them 30 s, then kills them."""

_LAST_LINES = 20
_SAME_TIME = 5.0  # torch elastic notes deaths in whole seconds


class RankDied(RunError):
    """A rank, or the launcher, ended and was not asked to: no user's mistake."""

    exit_code = 1


class Stopped(Exception):
    """SIGINT or SIGTERM reached the supervisor, and the run has ended."""

    def __init__(self, number: int) -> None:
        """`number`: the signal's."""
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


def supervise(
    folder: Folder,
    module: str,
    arguments: Sequence[str],
    config: Mapping[str, Any],
    *,
    environ: Mapping[str, str] | None = None,
    output: IO[Any] | int | None = None,
) -> None:
    """Run `accelerate launch -m module arguments…` to its end, and leave no process behind.

    The config file and `logs/` are written into the folder. Rank 0 is shown live if it calls `lifetime.tee_output`.
    When a rank dies, the launcher ends the others at once (with SIGTERM, 30 s later with SIGKILL). SIGINT and SIGTERM
    are passed on, and a second one kills. Everything that carries the run's token is gone afterwards.

    Args:
        folder: the run's, entered by the caller with a `new_token()`.
        module: the Python module that each rank runs.
        arguments: its command line.
        config: content of the Accelerate config file.
        environ: added to the environment. OMP_NUM_THREADS is the cores divided by the ranks where it is not set.
        output: where rank 0 is shown: standard output by default.

    Raises:
        ToolkitError: what a rank raised, as `Folder.record_error` left it. A new folder without a step is removed.
        RankDied: another end of a rank or the launcher, with the last lines that it printed.
        Stopped: after SIGINT or SIGTERM.
    """
    assert os.environ.get(TOKEN) != folder.token, "a supervisor names its run anew, or it would end itself with it"
    _prepare(folder, config)
    stop = _Stop()
    with stop.listening():
        launcher = _start(folder, module, arguments, config, environ or {}, output)
        try:
            stop.launcher = launcher
            code = _wait(launcher, folder, stop)
        finally:
            _sweep(folder.token, launcher)
    if stop.number is not None:
        raise Stopped(stop.number)
    if code != 0:
        raise _failure(folder, code)


class _Stop:
    """Which signal came, and when."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.deadline = float("inf")
        self.launcher: subprocess.Popen[bytes] | None = None

    def _handle(self, number: int, _: object) -> None:
        again = self.number is not None
        self.number = self.number or number
        self.deadline = 0.0 if again or self.launcher is None else time.monotonic() + STOP_SECONDS
        if self.launcher is not None and not again:
            self.launcher.send_signal(number)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Python lets the main thread alone set handlers; a supervisor in another thread is stopped by its caller."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _prepare(folder: Folder, config: Mapping[str, Any]) -> None:
    import yaml

    folder.logs.mkdir(exist_ok=True)
    for old in (*folder.logs.glob("rank-*.error.json"), _failures(folder)):
        old.unlink(missing_ok=True)
    folder.config.write_text(yaml.safe_dump(dict(config), sort_keys=False))


def _failures(folder: Folder) -> Path:
    return folder.logs / "failures.json"


def _start(
    folder: Folder,
    module: str,
    arguments: Sequence[str],
    config: Mapping[str, Any],
    environ: Mapping[str, str],
    output: IO[Any] | int | None,
) -> subprocess.Popen[bytes]:
    ranks = int(config.get("num_processes", 1)) // int(config.get("num_machines", 1))
    port = [] if "main_process_port" in config else ["--main_process_port", "0"]  # 0: a free one
    launch = ["accelerate", "launch", "--config_file", str(folder.config), *port, "-m", module, *arguments]
    command = [sys.executable, "-m", "toolkit.launching", str(os.getpid()), str(_failures(folder)), *launch]
    with open(folder.logs / "launcher.log", "wb") as log:
        return subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": _threads(ranks), **environ, TOKEN: folder.token},
            stdin=subprocess.DEVNULL,  # a library that asks would stop a group in the background for good
            stdout=output,
            stderr=log,
            process_group=0,  # a terminal's Ctrl-C comes to the supervisor alone, which passes it on once
        )


def _threads(ranks: int) -> str:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return os.environ.get("OMP_NUM_THREADS", str(max(1, cores // ranks)))


def _wait(launcher: subprocess.Popen[bytes], folder: Folder, stop: _Stop) -> int:
    """The launcher's exit status. It is killed, and its ranks with it, when a stop or a failed rank takes too long."""
    failed_by = float("inf")
    while True:
        try:
            return launcher.wait(0.2)
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        if failed_by == float("inf") and any(folder.logs.glob("rank-*.error.json")):
            failed_by = now + STOP_SECONDS  # a rank that raised may hang in its teardown
        if now >= min(stop.deadline, failed_by):
            launcher.kill()


def _sweep(token: str, launcher: subprocess.Popen[bytes]) -> None:
    """End what is left of a run: kill the launcher, give the others two seconds to follow it, kill them."""
    import psutil

    launcher.kill()
    launcher.wait()
    _, left = psutil.wait_procs(_carrying(token), timeout=2)
    while left:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=2)
        left = _carrying(token)


def _carrying(token: str) -> list[psutil.Process]:
    """Living processes of this user that were started with the run's token in their environment."""
    import psutil

    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(TOKEN) == token and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _failure(folder: Folder, code: int) -> ToolkitError:
    """What ended the run first, as an exception."""
    raised = {int(path.name.split(".")[0].removeprefix("rank-")): json.loads(path.read_text())
              for path in folder.logs.glob("rank-*.error.json")}  # fmt: skip
    failures = json.loads(_failures(folder).read_text()) if _failures(folder).exists() else []
    rank, how = _first(raised, failures)
    if rank is None:
        launcher = folder.logs / "launcher.log"
        return RankDied(f"accelerate launch {_ended(code)}, and no rank had failed. {_last_lines(launcher)}")
    error = raised.get(rank)
    kind = getattr(errors, error["type"], None) if error else None
    if error and isinstance(kind, type) and issubclass(kind, ToolkitError):
        folder.discard()
        return kind(error["message"])
    if error:
        how = f"ended with {error['type']}: {error['message']}" if error["message"] else f"ended with {error['type']}"
    log = folder.log(rank)
    shown = log if log.exists() else folder.logs / "launcher.log"  # where it had not come to its own log
    return RankDied(f"rank {rank} {how}. {_last_lines(shown)}")


def _first(raised: Mapping[int, Any], failures: Sequence[Mapping[str, Any]]) -> tuple[int | None, str]:
    """The rank that failed first, and how.

    One that left no word and was not ended by the launcher died by itself, and the others' exceptions («connection
    closed») follow from it, unless they came well before: then the launcher killed it for not ending.
    """
    told = min(raised, key=lambda rank: float(raised[rank]["time"]), default=None)
    asked = (-signal.SIGTERM, -signal.SIGINT)
    silent = [one for one in failures if one["rank"] not in raised and one["exitcode"] not in asked]
    one = min(silent, key=lambda one: float(one["time"]), default=None)
    if one is not None and (told is None or one["time"] <= raised[told]["time"] + _SAME_TIME):
        return one["rank"], _ended(one["exitcode"])
    if told is None and failures:
        one = min(failures, key=lambda one: float(one["time"]))
        return one["rank"], _ended(one["exitcode"])
    return told, ""


def _ended(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (which is also how the system ends a process when memory runs out)"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit status {code}"


def _last_lines(log: Path) -> str:
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n")]  # a bar's last state
    last = [line for line in lines if line.strip()][-_LAST_LINES:]
    shown = "".join(f"\n    {line}" for line in last)
    return f"Its last lines ({log}):{shown}" if last else f"It printed nothing ({log})."


def _launch(supervisor: int, failures: Path, command: list[str]) -> int:
    """The launcher's process: Accelerate's own command, dying with the supervisor, and noting how its ranks ended."""
    die_with_parent(supervisor)
    os.environ[LAUNCHER] = str(os.getpid())
    for number in (signal.SIGINT, signal.SIGTERM):  # torch elastic replaces them by its own
        signal.signal(number, _pass_on)

    from accelerate.commands import launch
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    sys.argv = command
    try:
        launch.main()
    except ChildFailedError as error:
        died = error.failures.items()
        write_json(failures, [{"rank": rank, "exitcode": one.exitcode, "time": one.timestamp} for rank, one in died])
        return 1
    except subprocess.CalledProcessError as error:  # one process, without torch elastic
        write_json(failures, [{"rank": 0, "exitcode": error.returncode, "time": time.time()}])
        return 1
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _pass_on(number: int, _: object) -> None:
    """Before torch elastic listens, and for one process without it: the rank ends, and then its launcher."""
    import psutil

    ranks = psutil.Process().children()
    for rank in ranks:
        rank.send_signal(number)
    if not ranks:
        sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(_launch(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[4:]))
