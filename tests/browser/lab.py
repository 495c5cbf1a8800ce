"""A JupyterLab of its own in a real Chromium, and what a person does there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nbformat
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SETTINGS = {"fetchNews": "false", "checkForUpdates": False}
"""JupyterLab asks the network for news, and a person whether it may."""

PATIENCE = 300_000
"""Milliseconds: for what is a matter of a second on an idle machine, and of several while two ranks train."""

STEP = r"/step (\d+)/.exec(node.textContent)"


@contextlib.contextmanager
def serving(root: Path, **environ: str) -> Iterator[str]:
    """JupyterLab over this folder, with settings and signatures of its own, and `environ`; its address."""
    own = root / ".jupyter"
    settings = own / "settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps(SETTINGS))
    names = {"CONFIG": "config", "DATA": "data", "RUNTIME": "runtime"}
    places = {f"JUPYTER_{name}_DIR": str(own / folder) for name, folder in names.items()}
    labs = {f"JUPYTERLAB_{name.upper()}_DIR": str(own / name) for name in ("settings", "workspaces")}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {"ip": "127.0.0.1", "port": port, "root_dir": str(root), "open_browser": False, "allow_root": True}
    words = [f"--ServerApp.{name}={value}" for name, value in options.items()]
    words += ["--IdentityProvider.token=", "--ServerApp.disable_check_xsrf=True", "--LabApp.extension_manager=readonly"]
    with open(root / "lab.log", "wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *words],
            env=os.environ | places | labs | environ | {"IPYTHONDIR": str(own / "ipython")},
            stdout=log,
            stderr=log,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _until_it_answers(server, f"{url}/api/status", root / "lab.log")
        yield url
        shut_down(url)
    finally:
        server.terminate()
        server.wait(timeout=30)


def shut_down(url: str) -> None:
    """Every kernel."""
    for session in json.load(urllib.request.urlopen(f"{url}/api/sessions")):
        urllib.request.urlopen(urllib.request.Request(f"{url}/api/sessions/{session['id']}", method="DELETE"))


def _until_it_answers(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


@contextlib.contextmanager
def browsing() -> Iterator[Browser]:
    """The system's Chromium: Playwright's own download needs a network."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert path, f"There is none of {', '.join(BROWSERS)}. On Debian: apt-get install chromium."
    with sync_playwright() as playwright:
        expect.set_options(timeout=PATIENCE)
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


class Notebook:
    """A notebook in a page of JupyterLab, by the numbers of its cells."""

    def __init__(self, page: Page, url: str, file: Path, cells: Sequence[str] = ()) -> None:
        """`cells`: a new notebook is written of them."""
        self.page, self.file = page, file
        if cells:
            made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
            made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
            nbformat.write(made, file)
        page.goto(f"{url}/lab/tree/{file.name}?reset")
        self.preflight()

    def preflight(self) -> None:
        """Until its kernel waits for a cell."""
        expect(self.page.locator("#jp-main-statusbar")).to_contain_text("| Idle")

    def cell(self, number: int) -> Locator:
        return self.page.locator(".jp-Notebook .jp-Cell").nth(number)

    def output(self, number: int) -> Locator:
        return self.cell(number).locator(".jp-OutputArea").first

    def start(self, number: int) -> Locator:
        """Execute a cell, as a person does; what comes back is where its output appears."""
        prompt = self.prompt(number)
        before = prompt.inner_text()
        self.cell(number).locator(".cm-content").click()
        self.page.keyboard.press("Control+Enter")
        expect(prompt).not_to_have_text(before)
        return self.output(number)

    def ended(self, number: int) -> None:
        """Until a cell that was started has ended."""
        expect(self.prompt(number)).to_have_text(re.compile(r"\[\d+\]:"))

    def run(self, number: int) -> Locator:
        """Execute a cell, to its end."""
        output = self.start(number)
        self.ended(number)
        return output

    def prompt(self, number: int) -> Locator:
        return self.cell(number).locator(".jp-InputPrompt").first

    def press(self, name: str) -> None:
        """A button of the notebook's toolbar."""
        self.page.locator(".jp-NotebookPanel-toolbar").get_by_role("button", name=name, exact=True).click()

    def restart(self) -> None:
        """Restart the kernel, with nothing executed."""
        self.press("Restart the kernel")
        self.page.locator(".jp-Dialog").locator(".jp-mod-accept").click()
        self.preflight()

    def save(self) -> dict[str, Any]:
        """Into its file, which comes back."""
        before, deadline = self.file.read_bytes(), time.monotonic() + PATIENCE / 1000
        self.page.keyboard.press("Control+s")
        while True:
            assert time.monotonic() < deadline, "not saved"
            with contextlib.suppress(ValueError):  # half written
                text = self.file.read_bytes()
                content: dict[str, Any] = json.loads(text)
                if text != before:
                    return content
            time.sleep(0.05)


def step_of(output: Locator) -> int:
    """What a live view shows now; 0 before the first."""
    return int(output.evaluate(f"node => Number(({STEP} || [0, 0])[1])"))


def until_step(output: Locator, least: int) -> None:
    """Until a live view has come that far."""
    node = output.element_handle()
    output.page.wait_for_function(
        f"([node, least]) => {STEP} && Number({STEP}[1]) >= least", arg=[node, least], timeout=PATIENCE
    )


def under(page: Page, picture: Locator, across: float, up: float = 0.5) -> str | None:
    """What is shown after the pointer has moved to a place in a picture, in shares of its width and height.

    Where the picture is wider than its own place, as on a phone, that is scrolled first.
    """
    picture.evaluate(
        "(image, across) => image.closest('[role=region]')?.scrollTo({left: across * (image.clientWidth - 300)})",
        across,
    )
    box = picture.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + across * box["width"], box["y"] + up * box["height"])
    shown = page.locator("i:hover").evaluate_all("found => found.map(one => getComputedStyle(one, '::after').content)")
    assert len(shown) <= 1
    return str(json.loads(shown[0].replace("\\a ", "\\n"))) if shown else None


def issues(page: Page, part: str = "body") -> list[str]:
    """What axe finds serious or critical, in the page or in parts of it."""
    # JupyterLab's body is empty but for what is placed over it: axe takes all of that for clipped, and looks at no contrast.
    page.evaluate("document.body.style.minHeight = '100vh'")
    violations = Axe().run(page, context={"include": [[part]]}).response["violations"]
    return [
        f"{violation['impact']} {violation['id']}: {node['html'][:300]} {node['failureSummary']}"
        for violation in violations
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]
