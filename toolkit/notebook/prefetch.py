"""Answer a panel's question ahead for every position of the sequence slider, in a child process.

A forecast for another sequence length traces the model again. The traces stay in the cache on disk, so that the panel itself
answers at once. As a program, it takes the parent's process id, and a pickle of the panel's kind and state on standard input.
"""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
import time
from contextlib import suppress

from toolkit.core.errors import ToolkitError
from toolkit.core.process_lifecycle import die_with_parent
from toolkit.notebook.explorer_state import ExplorerState, choices

PAUSE = 1.0
"""Seconds before it begins: a control that still moves makes the state out of date."""


def start(kind: str, state: ExplorerState) -> subprocess.Popen[bytes]:
    """Start the child process. It ends with its work or with this process; terminate it when the state is out of date."""
    command = [sys.executable, "-P", "-m", __name__, str(os.getpid())]
    nowhere = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere)
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(pickle.dumps((kind, state)))
    return process


def lengths_ahead(kind: str, state: ExplorerState) -> list[int]:
    """Return the slider's other sequence lengths, the nearest first."""
    sliders = [choice for choice in choices(kind, state) if choice.name == "seq_len"]
    others = [value for slider in sliders for value in slider.values if value != slider.value]
    return sorted(others, key=lambda length: abs(math.log(length / state.values["seq_len"])))


def main() -> None:
    """Answer for each length."""
    from toolkit.notebook.explorer import KINDS

    die_with_parent(int(sys.argv[1]))
    os.nice(19)
    kind, state = pickle.load(sys.stdin.buffer)
    time.sleep(PAUSE)
    for length in lengths_ahead(kind, state):
        with suppress(ToolkitError):
            KINDS[kind][0](state.but(seq_len=length))


if __name__ == "__main__":
    main()
