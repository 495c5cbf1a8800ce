"""The built site, opened from the disk as a reader does: every link, the search, a phone's width, and what axe finds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import browsing, issues
from playwright.sync_api import Page, expect
from programs import ROOT, environment

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(line, cwd=ROOT, env=environment(NO_MKDOCS_2_WARNING="1"), check=True)
    return folder


@pytest.fixture(scope="module")
def page(site: Path) -> Iterator[Page]:
    with browsing() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        yield page


def test_every_page_opens_from_the_disk_without_a_network(site: Path, page: Page) -> None:
    asked: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(f"{page.url}: {error}"))
    left, seen = [(site / "index.html").as_uri()], set()
    while left:
        url = left.pop()
        if url in seen:
            continue
        seen.add(url)
        page.goto(url, wait_until="domcontentloaded")
        expect(page.locator("article h1").first).to_be_visible()
        hrefs = page.locator("a[href]").evaluate_all("links => links.map(link => link.href)")
        local = {href.partition("#")[0] for href in hrefs if href.startswith("file:")}
        left += [href for href in local if href.endswith(".html")]
    assert len(seen) > 30
    assert errors == []
    assert {url for url in asked if not url.startswith(("file:", "data:", "blob:"))} == set()


def test_search_finds_a_flag_and_a_message(site: Path, page: Page) -> None:
    page.goto((site / "index.html").as_uri())
    box = page.get_by_role("textbox", name="Search")
    for words in ("lora_rank", "fp16 overflowed"):
        box.fill(words)
        expect(page.locator(".md-search-result__item").first).to_be_visible()
    box.fill("")


@pytest.mark.parametrize(
    "name", ["index.html", "choose.html", "matrix.html", "guides/checkpoints.html", "reference/glossary.html"]
)
def test_a_page_is_usable_on_a_phone_and_by_everybody(site: Path, page: Page, name: str) -> None:
    page.set_viewport_size({"width": 400, "height": 800})
    page.goto((site / name).as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert issues(page, "article") == []
