"""The live view in a real IPython: over a run's folder, and a process that stands for its supervisor."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import CapturedIO, capture_output
from ipywidgets.widgets.widget import _instances
from programs import until
from runs import event, write

from toolkit.core.atomic_io import append_line
from toolkit.core.errors import RunError
from toolkit.launcher import Run
from toolkit.notebook import live
from toolkit.run_folder.run_lock import SUPERVISOR, sign


@pytest.fixture
def shown() -> Iterator[CapturedIO]:
    """What the cells' outputs get."""
    shell = InteractiveShell.instance()
    try:
        with capture_output() as captured:
            yield captured
    finally:
        shell.clear_instance()


@pytest.fixture
def run(tmp_path: Path, shown: CapturedIO) -> Iterator[Run]:
    (write(tmp_path, [event(1), event(2)]).path / "lock").unlink()  # it names this process as the run's supervisor
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        with (tmp_path / "lock").open("a") as lock:
            sign(lock.fileno(), process.pid, SUPERVISOR)
        yield Run(tmp_path, process=process)
        process.kill()
    until(lambda: not followers(tmp_path))


def followers(folder: Path) -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == f"live {folder}"]


def pages(shown: CapturedIO, *, update: bool) -> list[tuple[str, str]]:
    """The run's, each with the display that it was for."""
    updates = [one for one in shown._outputs if one["update"] is update and "toolkit-run" in str(one["data"])]
    return [(one["transient"]["display_id"], one["data"]["text/html"]) for one in updates]


def removed(shown: CapturedIO) -> int:
    """How many outputs with buttons were emptied."""
    return sum(one["update"] and one["data"].get("text/html") == "" for one in shown._outputs)


def test_views_of_one_run_are_brought_up_to_date_together(run: Run, shown: CapturedIO) -> None:
    for _ in range(3):
        live.show(run)
    assert len(followers(run.folder)) == 1
    assert len({display for display, _ in pages(shown, update=False)}) == 1
    assert removed(shown) == 2  # one Stop button: that of the last cell
    began = time.monotonic()
    for number in range(3, 40):
        append_line(run.folder / "events.jsonl", event(number))
        time.sleep(0.05)
    assert len(pages(shown, update=True)) <= 4 * (time.monotonic() - began) + 1
    run.stop()
    until(lambda: not followers(run.folder))
    display, last = pages(shown, update=True)[-1]
    assert {display} == {display for display, _ in pages(shown, update=False)}
    assert "step 39 of 20" in last
    assert ">stopped<" in last
    assert removed(shown) == 3  # the last button
    live.show(Run(run.folder))
    assert len(pages(shown, update=False)) == 3  # nothing new in this cell
    assert live._followed == {}


def test_a_view_outlives_what_is_in_its_way(run: Run, shown: CapturedIO, monkeypatch: pytest.MonkeyPatch) -> None:
    live.show(run)
    failed = threading.Event()

    def fail(self: Run, *, log: bool) -> str:
        failed.set()
        raise KeyError("loss")

    with monkeypatch.context() as patched:
        patched.setattr(Run, "view", fail)
        assert failed.wait(30)
    append_line(run.folder / "events.jsonl", event(3))
    until(lambda: any("step 3 of 20" in page for _, page in pages(shown, update=True)))
    monkeypatch.setattr(Run, "view", fail)
    run.stop()
    until(lambda: not followers(run.folder))
    assert "has ended, and cannot be shown: &#x27;loss&#x27;" in str(shown._outputs)


def test_a_refused_stop_is_said_and_can_be_asked_again(
    run: Run, shown: CapturedIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.show(run)
    model = shown._outputs[0]["data"]["application/vnd.jupyter.widget-view+json"]["model_id"]
    buttons, said = _instances[model].children
    button, axes = buttons.children
    axes.value = True
    until(lambda: any("Loss, log axis" in page for _, page in pages(shown, update=True)))

    def refuse() -> None:
        raise RunError("it is held by <another machine>")

    with monkeypatch.context() as patched:
        patched.setattr(run, "stop", refuse)
        button.click()
        until(lambda: said.value)
        assert "held by &lt;another machine&gt;" in said.value
        until(lambda: not button.disabled)
        assert button.description == "Stop"
    button.click()
    until(lambda: not followers(run.folder))
    assert not run.alive
