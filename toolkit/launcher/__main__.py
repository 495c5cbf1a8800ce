"""The launcher's process: Accelerate's own command, dying with the supervisor, and noting how its ranks ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from toolkit.core.atomic_io import write_json
from toolkit.core.errors import RunError
from toolkit.core.process_lifecycle import LAUNCHER, die_with_parent, import_libraries, skip_last_collection
from toolkit.core.rank_output import redact_streams
from toolkit.launcher.processes import is_redaction
from toolkit.run_folder.run_lock import run_token


def launch(supervisor: int, failures: Path, command: list[str]) -> int:
    """Run `command` as Accelerate would. Return its exit status.

    Args:
        supervisor: the process id that this one dies with.
        failures: the JSON file for the exit codes of failed ranks.
        command: `accelerate launch` and what follows it.
    """
    die_with_parent(supervisor)
    redact_streams([2], [2], run_token())
    os.environ[LAUNCHER] = str(os.getpid())
    for number in (signal.SIGINT, signal.SIGTERM):  # torch elastic replaces them by its own
        signal.signal(number, _pass_on)

    skip_last_collection()
    import_libraries("accelerate.commands.launch")  # and with it torch

    from accelerate.commands import launch
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    sys.argv = command
    try:
        launch.main()
    except ChildFailedError as error:
        died = error.failures.items()
        _record_exits(
            failures,
            [{"rank": rank, "exitcode": failure.exitcode, "time": failure.timestamp} for rank, failure in died],
        )
        return 1
    except subprocess.CalledProcessError as error:  # one process, without torch elastic
        _record_exits(failures, [{"rank": 0, "exitcode": error.returncode, "time": time.time()}])
        return 1
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _record_exits(failures: Path, died: list[dict[str, Any]]) -> None:
    """Record the exits for the supervisor. On a full disk it has the ranks' own error files, with reserved space."""
    with contextlib.suppress(RunError):
        write_json(failures, died)


def _pass_on(number: int, _: object) -> None:
    """Pass a signal on to the rank: before torch elastic handles signals, and for a single process without it."""
    import psutil

    ranks = []
    for child in psutil.Process().children():
        if not is_redaction(child):
            with contextlib.suppress(psutil.Error):  # it may be ending
                child.send_signal(number)
                ranks.append(child)
    if not ranks:
        sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(launch(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[4:]))
