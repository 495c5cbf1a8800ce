"""Ranks that are forked from one process which has imported the libraries: the same recipe, ten seconds sooner each."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PATIENCE = 600.0
"""Seconds that a run may take."""


class Ranks:
    """A server in a process of its own. Importing allocates no tensor, so what a rank measures is what it would alone."""

    def __init__(self) -> None:
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )

    def run(self, words: Sequence[str], ranks: int, log: Path) -> int:
        """`toolkit.finetune` with these flags on so many ranks; the first exit code that is not 0, or 0."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps([list(words), ranks, str(log)]), file=self._server.stdin, flush=True)
        while not (line := self._server.stdout.readline()).startswith("CODE "):
            if not line:
                raise RuntimeError("the server of the ranks has ended")
        return int(line.split()[1])

    def close(self) -> None:
        """End the server."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


def _free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def _rank(words: Sequence[str], rank: int, ranks: int, port: int, log: str) -> int:
    """In the forked process."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if words[words.index("--sharding") + 1] != "none":
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from toolkit.finetune import main

    return main(list(words))


def serve() -> None:
    """Import, then fork for every line."""
    import accelerate
    import bitsandbytes
    import deepspeed
    import peft
    import transformers

    import toolkit.finetune  # noqa: F401

    del accelerate, bitsandbytes, deepspeed, peft, transformers
    for line in sys.stdin:
        words, ranks, log = json.loads(line)
        port = _free_port()
        children = []
        for rank in range(ranks):
            child = os.fork()
            if not child:
                code: Any = 1
                try:
                    code = _rank(words, rank, ranks, port, log)
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
            elif time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    serve()
