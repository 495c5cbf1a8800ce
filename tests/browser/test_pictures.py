"""A report in a real Chromium: a curve shows the values where the pointer is, also on a phone, and leaves the page as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import runs
from lab import browsing, issues, under

import toolkit as tk

pytestmark = pytest.mark.browser

STEPS = 20


@pytest.mark.parametrize("width", [1280, 400])
def test_a_report_shows_the_values_under_a_pointer(tmp_path: Path, width: int) -> None:
    folder = tmp_path / "one"
    runs.write(folder, [runs.event(step) for step in range(1, STEPS + 1)], memory=runs.memory())
    with browsing() as browser:
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.goto(tk.report(folder).write().as_uri())
        picture = page.get_by_alt_text("Loss.", exact=False)
        picture.scroll_into_view_if_needed()
        assert under(page, picture, 0.5, up=0.05) is None
        # The place of each step's dot, as the picture itself has it.
        svg = picture.evaluate("image => atob(image.src.split(',')[1])")
        places = [float(use.split('x="')[1].split('"')[0]) for use in svg.split("<use ") if "fill: #4d7c0f" in use]
        assert len(places) == STEPS
        size = float(picture.get_attribute("width") or 0)
        for step in (1, 7, STEPS):
            inside = {1: 1.0, STEPS: -1.0}.get(step, 0.0)
            assert (
                under(page, picture, (places[step - 1] + inside) / size) == f"loss: {8 - step / 10:,.4g}, step {step}"
            )
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert issues(page) == []
