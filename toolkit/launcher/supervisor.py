"""`supervise()`: one attempt of a run, from `accelerate launch` to the end of its last process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.core.atomic_io import read_events, write_or_explain
from toolkit.core.errors import ToolkitError, value_or
from toolkit.core.process_lifecycle import SAFE_PATH
from toolkit.core.stopping import StopSignal
from toolkit.launcher.failures import RankHung, as_raised, failure
from toolkit.launcher.heartbeat_monitor import HeartbeatMonitor
from toolkit.launcher.processes import is_redaction, kill_run, run_processes, send
from toolkit.run_folder.folder import Folder
from toolkit.run_folder.run_lock import TOKEN
from toolkit.training.oom import memory_kills
from toolkit.training.resumption import resume_hint

STOP_SECONDS = 40.0
"""Grace period of ranks without heartbeats, in seconds: torch elastic kills them after 30 s."""

STEP_SECONDS = 20.0
"""Seconds for the current step after a stop signal, in addition to twice the duration of such a step."""

FAILED_SECONDS = 4.0
"""Seconds in which other ranks have to end after one has failed."""

_LAUNCHER_POLL = 0.2


class Stopped(Exception):
    """SIGINT or SIGTERM reached the supervisor, and the run has ended."""

    def __init__(self, number: int, then: str = "") -> None:
        """Create the exception. `number`: the signal's; `then`: a sentence on the last checkpoint and how to continue."""
        super().__init__(f"stopped by {signal.Signals(number).name}" + (f". {then}" if then else ""))
        self.exit_code = 128 + number

    @classmethod
    def of(cls, number: int, folder: Folder) -> Stopped:
        """Return the exception with the message in `folder`, and why a rank refused to publish."""
        refused = [str(error) for record in folder.errors().values() if (error := as_raised(record))]
        return cls(number, " ".join(filter(None, [value_or("", resume_hint, folder), *refused[:1]])))


def supervise(
    folder: Folder,
    module: str,
    arguments: Sequence[str],
    config: Mapping[str, Any],
    *,
    environ: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> None:
    """Run `accelerate launch -m module arguments…` to its end, and leave no process behind.

    The config file and `logs/` are written into the folder. Rank 0 is shown live if it calls `tee_output`.
    When a rank dies, the others are ended. SIGINT and SIGTERM go to the ranks, and a second one kills. Everything that
    carries the run's token is gone afterwards.

    Args:
        folder: the run's, entered by the caller with a `new_token()`.
        module: the Python module that each rank runs.
        arguments: its command line.
        config: content of the Accelerate config file.
        environ: added to the environment. OMP_NUM_THREADS is the cores divided by the ranks where it is not set.
        timeout: seconds after which a rank without a heartbeat (`heartbeat.Beat`) has hung. None: the ranks write none.

    Raises:
        ToolkitError: what a rank raised, as `Folder.record_error` left it. A new folder without a step is removed.
        RankDied: another end of a rank or the launcher, with the last lines that it printed.
        RankHung: no sign of a rank for too long.
        Stopped: after SIGINT or SIGTERM.
    """
    assert os.environ.get(TOKEN) != folder.token, "a supervisor needs a new token, or it would end itself with its run"
    _clear(folder, config)
    kills = value_or(0, memory_kills)
    watch = None if timeout is None else HeartbeatMonitor(folder, ranks_here(config), timeout)
    try:
        with StopSignal() as stop:
            launcher = _start(folder, module, arguments, config, environ or {})
            attempt = _Attempt(folder, launcher, stop, watch)
            try:
                code = attempt.wait()
            except RankHung:
                if stop.number is None:
                    raise
            finally:
                kill_run(folder.token, launcher)
        if stop.number is not None:
            raise Stopped.of(stop.number, folder)
        if code != 0:
            kills = value_or(kills, memory_kills) - kills
            raise failure(folder, code, **(watch.seen() if watch else {}), cut_at=attempt.cut_at, memory_kills=kills)
    except (ToolkitError, Stopped) as error:
        folder.record_end("stopped" if isinstance(error, Stopped) else "failed", str(error))
        raise


class _Attempt:
    """One launcher and its ranks, until they have ended."""

    def __init__(
        self, folder: Folder, launcher: subprocess.Popen[bytes], stop: StopSignal, watch: HeartbeatMonitor | None
    ) -> None:
        self.folder, self.launcher, self.stop, self.watch = folder, launcher, stop, watch
        self._failed_at: float | None = None
        self.cut_at = float("inf")
        """When this process killed the remaining ranks, in seconds since 1970."""
        self._passed_on_at: float | None = None
        self._step_seconds = 0.0

    def wait(self) -> int:
        """Wait for the launcher and return its exit status. Raises RankHung."""
        while (code := self.launcher.poll()) is None:
            self._on_stop_signal()
            self._end_the_failed()
            if self.watch and self._failed_at is None and not self.stop.again:
                self.watch.look()
            time.sleep(_LAUNCHER_POLL)
        return code

    def _on_stop_signal(self) -> None:
        """Pass the first signal on; kill after the second, or when the step takes too long."""
        if self.stop.number is None:
            return
        now = time.monotonic()
        if self.stop.again:
            self.launcher.kill()
        elif self._passed_on_at is None:
            self._passed_on_at, self._step_seconds = now, value_or(0.0, _last_step_seconds, self.folder)
            if self.watch is not None and self.watch.listens():
                print(
                    "toolkit: stopping after this step, with a checkpoint if the run saves any. "
                    "A second Ctrl-C ends it at once, and a SIGTERM after 3 s.",
                    file=sys.stderr,
                    flush=True,
                )
            self._signal_ranks(self.stop.number)
        elif now >= self._passed_on_at + self._stop_limit():
            self.launcher.kill()

    def _signal_ranks(self, number: int) -> None:
        """Signal the ranks, not the launcher, which would wait 30 s. Ranks that are still loading are killed."""
        if self.watch is None:
            self.launcher.send_signal(number)
        elif self.watch.listens():
            send(self.folder.token, (beat.pid for beat in self.watch.beats.values()), number)
        else:
            self.launcher.kill()

    def _stop_limit(self) -> float:
        """Return the grace period after a stop signal, in seconds. Publishing is never interrupted."""
        if self.watch is None:
            return STOP_SECONDS
        least = STEP_SECONDS + 2 * self._step_seconds
        return max(least, self.watch.timeout) if self.watch.busy() else least

    def _end_the_failed(self) -> None:
        """After a rank has failed, kill other ranks that do not end, and a launcher that waits for them."""
        now = time.monotonic()
        if self._failed_at is None:
            silent = self.watch is not None and self.watch.lost()
            if silent or self.folder.rank_files("error.json"):
                self._failed_at = now
        elif now >= self._failed_at + 2 * FAILED_SECONDS:
            self.launcher.kill()
        elif now >= self._failed_at + FAILED_SECONDS and self.cut_at == float("inf"):
            self.cut_at = time.time()
            ranks = [process.pid for process in run_processes(self.folder.token) if not is_redaction(process)]
            send(self.folder.token, set(ranks) - {self.launcher.pid}, signal.SIGKILL)


def _last_step_seconds(folder: Folder) -> float:
    return next((float(event["seconds"]) for event in reversed(read_events(folder.events)) if "seconds" in event), 0.0)


def _clear(folder: Folder, config: Mapping[str, Any]) -> None:
    """Write the config file, and remove the records of an earlier attempt's end."""
    import yaml

    folder.logs.mkdir(exist_ok=True)
    for old in (*folder.rank_files("error.json"), *folder.rank_files("beat"), folder.exits, folder.end, folder.audit):
        old.unlink(missing_ok=True)
    write_or_explain(folder.config, yaml.safe_dump(dict(config), sort_keys=False).encode())


def ranks_here(config: Mapping[str, Any]) -> int:
    """Return the number of this machine's ranks."""
    return int(config.get("num_processes", 1)) // int(config.get("num_machines", 1))


def _start(
    folder: Folder, module: str, arguments: Sequence[str], config: Mapping[str, Any], environ: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start the launcher; arguments as in `supervise`."""
    port = [] if "main_process_port" in config else ["--main_process_port", "0"]  # 0: a free one
    launch = ["accelerate", "launch", "--config_file", str(folder.config), *port, "-m", module, *arguments]
    command = [sys.executable, "-m", "toolkit.launcher", str(os.getpid()), str(folder.exits), *launch]
    defaults = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks_here(config)))}
    if int(config.get("num_machines", 1)) == 1:  # ranks talk over the loopback, which no other machine can reach
        defaults |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    with open(folder.launcher_log, "wb") as log:
        return subprocess.Popen(
            command,
            env={**defaults, **os.environ, **SAFE_PATH, **environ, TOKEN: folder.token},
            stdin=subprocess.DEVNULL,  # a prompt would stop a process group in the background
            stderr=log,
            process_group=0,  # a terminal's Ctrl-C reaches the supervisor only, which passes it on once
        )
