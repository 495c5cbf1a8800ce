"""`diagnose()`: every check, each in its place, and what follows from them for a Strategy."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from toolkit.core.errors import ToolkitError
from toolkit.core.process_lifecycle import die_with_parent
from toolkit.diagnosis import libraries, machine
from toolkit.diagnosis.libraries import library
from toolkit.diagnosis.result import Diagnosis, Finding, Outcome, list_abilities
from toolkit.models.files import first_line

LIMIT = 60.0
"""Seconds that one check of a library may take."""
COMPILE_LIMIT = 900.0

COMPILE = "deepspeed compile"
"""The check that compiles an operator. It runs on request only."""

CHECKS: dict[str, Callable[[], str]] = {
    "python": machine.python,
    "torch": libraries.torch_computes,
    "torch build": machine.build,
    "transformers": partial(library, "transformers"),
    "accelerate": partial(library, "accelerate"),
    "deepspeed": libraries.deepspeed_device,
    COMPILE: libraries.compile_operators,
    "deepspeed operators": libraries.operators,
    "bitsandbytes": libraries.bitsandbytes_packs,
    "peft": partial(library, "peft"),
    "flash-attn": libraries.flash_attention,
    "datasets": partial(library, "datasets"),
    "ipywidgets": partial(machine.installed, "ipywidgets", "live view in notebooks"),
    "matplotlib": partial(machine.installed, "matplotlib", "pictures in reports and notebooks"),
    "GPUs": machine.gpus,
    "bf16": libraries.bf16_computes,
    "processes": libraries.process_groups,
    "host memory": machine.memory,
    "/dev/shm": machine.shared_memory,
    "disk": machine.disk,
    "limits": machine.limits,
    "Hugging Face cache": machine.hub_cache,
    "Hugging Face Hub": machine.hub,
}
"""In the order of the table that is printed."""

APART = (
    ("torch", "bf16", "processes", "transformers", "accelerate", "datasets"),
    ("bitsandbytes", "peft", "deepspeed", COMPILE, "deepspeed operators", "flash-attn"),
)
"""The checks of one child process, in order. Two processes run at once; all other checks run in the caller's."""

CHILD = "from toolkit.diagnosis.checks import main; main()"
"""The program of a child process."""

_REINSTALLED = ("torch", "transformers", "accelerate", "datasets", "deepspeed", "bitsandbytes", "peft")


def check(name: str) -> Finding:
    """Run one check. Any exception of a library becomes a finding."""
    try:
        return Finding(check=name, status="ok", detail=CHECKS[name]())
    except Outcome as outcome:
        status, detail, fix = outcome.args
        return (
            Finding(check=name, status=status, detail=detail, fix=fix)
            if fix or status != "broken"
            else broken(name, detail)
        )
    except ToolkitError as error:
        return broken(name, str(error))
    except Exception as error:  # a broken library may raise anything
        return broken(name, f"{type(error).__name__}: {first_line(error)}")


def broken(name: str, detail: str) -> Finding:
    """Return the finding for a check that failed or did not finish."""
    fix = f"`pip install --force-reinstall {name}`" if name in _REINSTALLED else ""
    return Finding(check=name, status="broken", detail=detail, fix=fix)


def diagnose(*, compile_ops: bool = False) -> Diagnosis:
    """Check all that training touches, in about 10 s; libraries in child processes, which may die.

    Args:
        compile_ops: also compile DeepSpeed's operator for this machine, which can take minutes. Nothing is otherwise.
    """
    from concurrent.futures import ThreadPoolExecutor

    groups = [[name for name in group if compile_ops or name != COMPILE] for group in APART]
    here = [name for name in CHECKS if not any(name in group for group in APART)]
    stop = threading.Event()
    with ThreadPoolExecutor() as pool:
        try:
            apart = [pool.submit(lambda names: list(run_apart(names, stop=stop)), names) for names in groups]
            findings = [check(name) for name in here]
            findings += [finding for future in apart for finding in future.result()]
        finally:
            stop.set()  # after an interrupt the pool would else wait for every child
    order = list(CHECKS)
    findings.sort(key=lambda finding: order.index(finding.check))
    return Diagnosis(findings=tuple(findings), abilities=tuple(list_abilities(findings)))


def run_apart(names: Sequence[str], *, each: float = LIMIT, stop: threading.Event | None = None) -> Iterator[Finding]:
    """Check libraries in a child process. Where a check ends it or hangs, continue in another one.

    Args:
        names: of `CHECKS`.
        each: seconds that one check may take.
        stop: set, it ends the child, and nothing more is checked.
    """
    stop = stop or threading.Event()
    remaining = list(names)
    while remaining and not stop.is_set():
        reader, writer = Pipe(duplex=False)
        with tempfile.TemporaryFile() as errors, reader:
            with writer:
                # Its own session: compilers that it starts end with it.
                child = subprocess.Popen(
                    [sys.executable, "-P", "-c", CHILD, str(os.getpid()), str(writer.fileno()), *remaining],
                    stdout=errors, stderr=errors, pass_fds=[writer.fileno()], start_new_session=True,
                )  # fmt: skip
            try:
                while remaining and _answers(reader, COMPILE_LIMIT if remaining[0] == COMPILE else each, stop):
                    yield Finding(**json.loads(reader.recv_bytes()))
                    remaining.pop(0)
                if remaining and not stop.is_set():
                    yield broken(remaining.pop(0), f"did not end within {each:g} s")
            except EOFError:
                child.wait()
                errors.seek(0)
                yield broken(remaining.pop(0), _exit_text(child.returncode, errors.read().decode(errors="replace")))
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def _answers(reader: Connection, limit: float, stop: threading.Event) -> bool:
    """Wait until the child answers or has ended. Return False after `limit` seconds, and at a stop."""
    deadline = time.monotonic() + limit
    while not reader.poll(0.1):
        if stop.is_set() or time.monotonic() > deadline:
            return False
    return True


def _exit_text(code: int, output: str) -> str:
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended its process with {code}"
    last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")
    return f"{how}: {last}" if last else how


def main() -> None:
    """Run checks in order in the child, and send each finding as soon as it is there.

    The arguments are the parent's process id, the descriptor of its pipe, and the names of the checks.
    """
    parent, descriptor, *names = sys.argv[1:]
    die_with_parent(int(parent))
    os.set_inheritable(int(descriptor), False)
    with Connection(int(descriptor), readable=False) as results:
        for name in names:
            results.send_bytes(json.dumps(dataclasses.asdict(check(name))).encode())
