"""Ranks that are forked from one process which has imported the libraries: the same code, ten seconds sooner each."""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.core.process_lifecycle import import_libraries

PATIENCE = 600.0
"""Seconds that a run may take."""

GRACE = 60.0
"""Seconds that the other ranks have once one has failed."""


class Ranks:
    """A server in a process of its own. Importing allocates no tensor, so what a rank measures is what it would alone."""

    def __init__(self) -> None:
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )

    def run(
        self,
        argument: Any,
        ranks: int,
        log: Path,
        *,
        target: str = "toolkit.finetune:main",
        distributed: bool = True,
        environ: Mapping[str, str] | None = None,
    ) -> int:
        """Call `target`, module:function, with `argument` on so many ranks.

        Args:
            argument: JSON.
            ranks: how many.
            log: the file that gets what they print.
            target: for `toolkit.finetune` the argument is its list of flags.
            distributed: False for one rank that makes no process group.
            environ: variables to add.

        Returns:
            The first exit code that is not 0, or 0.
        """
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        order = [target, argument, ranks, distributed, str(log), dict(environ or {})]
        print(json.dumps(order), file=self._server.stdin, flush=True)
        while not (line := self._server.stdout.readline()).startswith("CODE "):
            if not line:
                raise RuntimeError("the server of the ranks has ended")
        return int(line.split()[1])

    def close(self) -> None:
        """End the server."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


@functools.cache
def server() -> Ranks:
    """The server that all benchmarks of this process share; it ends with the process."""
    ranks = Ranks()
    atexit.register(ranks.close)
    return ranks


def result_of(target: str, argument: Mapping[str, Any], ranks: int, *, distributed: bool = True) -> Any:
    """Call `target` on the shared server with `argument` and the path `out`; return what it has written there as JSON."""
    with tempfile.TemporaryDirectory() as scratch:
        log, out = Path(scratch, "log"), Path(scratch, "out.json")
        code = server().run({**argument, "out": str(out)}, ranks, log, target=target, distributed=distributed)
        if code:
            raise SystemExit(f"{target} ended with {code}:\n{log.read_text(errors='replace')[-4000:]}")
        return json.loads(out.read_text())


def write(config: Mapping[str, Any], result: Any) -> None:
    """In a rank: what `result_of` returns."""
    Path(config["out"]).write_text(json.dumps(result))


def _free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def _rank(order: Sequence[Any], rank: int, port: int) -> int:
    """In the forked process."""
    target, argument, ranks, distributed, log, environ = order
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ |= environ
    if distributed:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    module, _, name = target.partition(":")
    return int(getattr(importlib.import_module(module), name)(argument) or 0)


def serve() -> None:
    """Import, then fork for every line."""
    import_libraries("accelerate", "bitsandbytes", "deepspeed", "peft", "transformers", "toolkit.finetune")
    for line in sys.stdin:
        order = json.loads(line)
        port = _free_port()
        children = []
        for rank in range(order[2]):
            child = os.fork()
            if not child:
                code: Any = 1
                try:
                    code = _rank(order, rank, port)
                except SystemExit as error:
                    code = error.code or 0
                except BaseException:
                    import traceback

                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(int(code) if str(code).isdigit() else 1)
            children.append(child)
        print("CODE", _wait(children), flush=True)


def _wait(children: Sequence[int]) -> int:
    """The first exit code that is not 0, or 0. Who does not end is killed: one hung rank stops no others."""
    left, codes, until = set(children), [], time.monotonic() + PATIENCE
    while left:
        for child in sorted(left):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                left.discard(child)
                codes.append(os.waitstatus_to_exitcode(status))
                if codes[-1]:  # the others may wait for it
                    until = min(until, time.monotonic() + GRACE)
            elif time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    serve()
