"""What a person does in JupyterLab: a run launched, watched, waited for, found again, stopped, and opened on another day."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from lab import Notebook, browsing, issues, serving, shut_down, step_of, under, until_step
from playwright.sync_api import Page, expect
from programs import left_of

import toolkit as tk

pytestmark = pytest.mark.browser

LAUNCH = (
    "run = tk.launch('toolkit.finetune', 'zero2', processes=2, steps=20_000, seq_len=32, micro_batch=1, "
    "save=False, memory_window=False, run_dir='runs/first')\nrun"
)
CELLS = ("import toolkit as tk", LAUNCH, "print(6 * 7, run.status)", "run.wait()", "run = tk.attach('runs/first')\nrun")
IMPORT, RUN, OTHER, WAIT, ATTACH = range(len(CELLS))

PACE = """
import sys, time
if "toolkit.finetune" in sys.orig_argv:
    from toolkit.core import phases
    phases.observe(lambda name, begins: time.sleep(0.2) if name == "step" and begins else None)
"""
"""Read by every interpreter of the lab: a step takes as long as a larger model's, and leaves the cores to the browser."""

MOST = 200_000
"""Bytes of a notebook's file."""


@dataclass(frozen=True, kw_only=True)
class Desk:
    """Where a person sits."""

    page: Page
    url: str
    folder: Path


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    folder = tmp_path_factory.mktemp("lab")
    (folder / "pace").mkdir()
    (folder / "pace" / "sitecustomize.py").write_text(PACE)
    paths = os.pathsep.join(filter(None, [str(folder / "pace"), os.environ.get("PYTHONPATH")]))
    with serving(folder, PYTHONPATH=paths) as url, browsing() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 1600})
        yield Desk(page=page, url=url, folder=folder)


@pytest.fixture
def run(desk: Desk) -> Iterator[Path]:
    """Where a run will be; it does not outlive its test."""
    folder = desk.folder / "runs/first"
    yield folder
    if folder.exists():
        tk.attach(folder).stop(60)


@pytest.mark.timeout(1200)
def test_a_run_from_its_launch_to_another_day(desk: Desk, run: Path) -> None:
    page = desk.page
    notebook = Notebook(page, desk.url, desk.folder / "story.ipynb", CELLS)
    notebook.run(IMPORT)

    # Its steps appear while the kernel is free for another cell.
    view = notebook.run(RUN)
    expect(view).to_contain_text("starting")
    until_step(view, 2)
    before = step_of(view)
    expect(notebook.run(OTHER)).to_have_text("42 running")
    until_step(view, before + 2)
    assert issues(page, ".jp-OutputArea") == []
    view.locator(".toolkit-curve").first.hover()  # it is drawn again meanwhile
    expect(view.locator("i:hover")).to_have_attribute("data-at", re.compile(r"loss: [\d.]+, step \d+"))

    # An interrupt ends the waiting, and not the run.
    waited = notebook.start(WAIT)
    until_step(waited, 1)
    notebook.press("Interrupt the kernel")
    notebook.ended(WAIT)
    expect(waited).to_contain_text("waiting has ended; the run in runs/first continues.")

    # A reloaded page and a restarted kernel find it again.
    notebook.save()
    before = step_of(view)
    page.reload()
    notebook.preflight()
    expect(notebook.output(RUN)).to_contain_text("running")
    until_step(notebook.run(ATTACH), before + 2)
    notebook.restart()
    assert tk.attach(run).alive
    notebook.run(IMPORT)
    before = step_of(notebook.output(ATTACH))
    view = notebook.run(ATTACH)
    until_step(view, before + 2)

    # The only button, in the last cell that shows the run, also while the kernel waits: the step ends, a checkpoint is
    # published, no process is left, and no button.
    waited = notebook.start(WAIT)
    until_step(waited, 1)
    expect(view.get_by_role("button")).to_have_count(0)
    waited.get_by_role("button", name="Log axis").click()
    expect(waited.get_by_alt_text("Loss, log axis")).to_be_visible()
    waited.get_by_role("button", name="Stop").click()
    expect(view).to_contain_text("stopped by SIGTERM. Published")
    notebook.ended(WAIT)
    expect(waited).to_contain_text("stopped by SIGTERM. Published")
    run_there = tk.attach(run)
    assert run_there.status == "stopped"
    assert left_of(run) == []
    assert (run / f"checkpoints/step-{run_there.progress.step:08d}/manifest.json").exists()
    expect(waited.get_by_role("button")).to_have_count(0)

    # On another day nothing is executed, and all is there: also where JupyterLab does not trust the file.
    saved = notebook.save()
    assert notebook.file.stat().st_size < MOST
    shut_down(desk.url)
    opened_again(Notebook(page, desk.url, notebook.file))
    saved["cells"][IMPORT]["source"] += "  # from somebody else"
    (desk.folder / "strange.ipynb").write_text(json.dumps(saved))
    opened_again(Notebook(page, desk.url, desk.folder / "strange.ipynb"))

    page.goto(tk.report(run).write().as_uri())
    expect(page.get_by_role("heading", level=1)).to_contain_text("first")
    assert issues(page) == []


@pytest.mark.timeout(1200)
def test_explorers_answer_and_stay(desk: Desk) -> None:
    page = desk.page
    others = "for kind in ('compare', 'timeline', 'precision'):\n    display(tk.explore(kind, hardware='8x A100-80GB'))"
    cells = ("import toolkit as tk", "tk.explore('memory', hardware='8x A100-80GB')", others)
    notebook = Notebook(page, desk.url, desk.folder / "explorers.ipynb", cells)
    notebook.run(0)
    panel = notebook.run(1)
    picture = panel.get_by_role("img").first
    expect(picture).to_be_visible()

    # By hand, by keyboard, and by a word.
    panel.locator("abbr", has_text="rank").first.hover()
    assert "One process" in (panel.locator("abbr", has_text="rank").first.get_attribute("title") or "")
    slider = panel.get_by_label("devices")
    for move in (
        lambda: slider.click(position={"x": 1, "y": 8}),
        lambda: slider.press("ArrowRight"),
        lambda: panel.get_by_label("sharding").select_option("zero1"),
    ):
        before = picture.get_attribute("alt") or ""
        move()
        expect(picture).not_to_have_attribute("alt", before)
    expect(panel).to_contain_text("toolkit forecast --hardware '2x A100-80GB' --sharding zero1")

    others = notebook.run(2)
    expect(others.get_by_role("slider")).to_have_count(6)

    # A pointer over a curve shows the values nearest to it; beside the axes, nothing.
    curve = others.locator(".toolkit-curve img").first
    curve.scroll_into_view_if_needed()
    near = (under(page, curve, 0.5) or "").splitlines()
    assert near
    assert [line for line in near if not re.fullmatch(r"\w+: [\d.]+ [GM]iB", line)] == []
    assert under(page, curve, 0.5, up=0.02) is None
    assert issues(page, ".jp-OutputArea") == []

    # On a phone: every control lies within its panel, with its number.
    page.set_viewport_size({"width": 400, "height": 1600})
    page.keyboard.press("Control+b")
    place = panel.bounding_box()
    assert place is not None
    for control in panel.locator("input, select, output").all():
        box = control.bounding_box()
        assert box is not None
        assert place["x"] <= box["x"]
        assert box["x"] + box["width"] <= place["x"] + place["width"]
    assert panel.get_by_label("devices").bounding_box()["width"] > 100  # type: ignore[index]
    assert issues(page, ".jp-OutputArea") == []
    page.set_viewport_size({"width": 1280, "height": 1600})

    # Without their kernel: the answer, where the controls stood.
    notebook.save()
    assert notebook.file.stat().st_size < MOST
    shut_down(desk.url)
    again = Notebook(page, desk.url, notebook.file).output(1)
    expect(again).to_contain_text("toolkit forecast --hardware '2x A100-80GB' --sharding zero1")
    expect(again.get_by_role("img").first).to_be_visible()


def opened_again(notebook: Notebook) -> None:
    """The last view as it was saved: its figures, and pictures that were decoded."""
    view = notebook.output(ATTACH)
    expect(view).to_contain_text("stopped by SIGTERM. Published")
    pictures = view.locator("img")
    expect(pictures).to_have_count(5)
    assert pictures.evaluate_all("images => images.every(one => one.complete && one.naturalWidth > 0)")
    expect(view.get_by_alt_text("Memory of each rank")).to_be_visible()
    expect(view).not_to_contain_text("Error")
