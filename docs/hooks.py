"""The parts of the site that are not written by hand: pages from the code, the root's files, and the notebooks with their outputs.

MkDocs calls the functions that begin with `on_`.
"""

from __future__ import annotations

import html
import json
import posixpath
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [path for path in (str(DOCS), str(ROOT)) if path not in sys.path]

import reference  # noqa: E402  MkDocs takes this folder off the path again
import results  # noqa: E402

COPIED = {"CONTRIBUTING.md": "contributing", "SECURITY.md": "security", "CHANGELOG.md": "changelog"}
"""Files of the root that are pages of the site, under `project/`."""
FOLDED = {"helper": "Code that prepares or draws", "solution": "A solution"}
"""Tag of a folded cell → what its page shows in its place until it is opened."""
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_outputs: dict[str, list[str]] = {}


def repository() -> str:
    """Return `owner/name` on GitHub; empty where the repository has no public address."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["notebooks"]["repository"])


def notebooks() -> dict[str, Path]:
    """Return the address of each notebook's page, with its file."""
    return {f"notebooks/{path.stem}.md": path for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))}


def on_config(config: MkDocsConfig) -> None:
    """Put the notebooks into the navigation."""
    for entry in config.nav or ():
        if "Notebooks" in entry:
            entry["Notebooks"] = list(notebooks())
    if repository():
        config.repo_url = f"https://github.com/{repository()}"


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages that are generated."""
    pages = {f"project/{name}.md": (ROOT / source).read_text() for source, name in COPIED.items()}
    pages |= reference.pages()
    pages |= {name: _notebook(name, path) for name, path in notebooks().items()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files of the repository lead there, or be plain text while it has no address."""
    source = page.file.src_uri
    markdown = markdown.replace("<!-- choose -->", results.choose_table()) if source == "choose.md" else markdown
    copied = {f"project/{name}.md": file for file, name in COPIED.items()}
    here = posixpath.dirname(copied.get(source, source if source in notebooks() else posixpath.join("docs", source)))

    def moved(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        path, anchor = ([*target.split("#", 1), ""])[:2]
        if re.match(r"\w+:|#", target) or not path:
            return match[0]
        place = posixpath.normpath(posixpath.join(here, path))
        uri = f"project/{COPIED[place]}.md" if place in COPIED else place.removeprefix("docs/")
        if place.startswith("notebooks/") and place.endswith(".ipynb"):
            uri = place.replace(".ipynb", ".md")
        if files.get_file_from_path(uri) or place.startswith("docs/"):
            relative = posixpath.relpath(uri, posixpath.dirname(source) or ".")
            return f"{mark}[{text}]({relative}{'#' * bool(anchor)}{anchor})"
        if repository():
            return f"[{text}](https://github.com/{repository()}/blob/main/{place})"
        return text if text.startswith("`") else f"{text} (`{place}`)"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.S | re.M)
    return "".join(part if part.startswith("```") else _LINK.sub(moved, part) for part in parts)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put a notebook's outputs in their places, which Markdown would change. Wide tables and code scroll by the keyboard, too."""
    html = html.replace("<table>", '<table tabindex="0">').replace("<pre>", '<pre tabindex="0">')
    for number, output in enumerate(_outputs.get(page.file.src_uri, ())):
        html = html.replace(f"<p>OUTPUT-{number}-</p>", f'<div class="notebook-output" tabindex="0">{output}</div>')
    return html


def _notebook(name: str, path: Path) -> str:
    """Return a notebook as Markdown; its outputs are kept for `on_page_content`."""
    cells, parts = json.loads(path.read_text())["cells"], []
    outputs = _outputs[name] = []
    for cell in cells:
        tags, source = cell["metadata"].get("tags", ()), "".join(cell["source"])
        if "check" in tags or "find_spec" in source:
            continue  # checks and the installation are not for reading
        if cell["cell_type"] == "markdown":
            parts.append(re.sub(r"^\[!\[.*colab.*$", "", source, flags=re.M))
            continue
        code = f"```python\n{source}\n```"
        summary = next((text for tag, text in FOLDED.items() if tag in tags), "")
        parts.append(f'<details markdown="1"><summary>{summary}</summary>\n\n{code}\n\n</details>' if summary else code)
        shown = "".join(_shown(output) for output in cell["outputs"])
        if shown:
            parts.append(f"OUTPUT-{len(outputs)}-")
            outputs.append(shown)
    return "\n\n".join(parts)


def _shown(output: dict[str, Any]) -> str:
    """Return an output as HTML."""
    data = output.get("data", {"text/plain": output.get("text", "")})
    for kind in ("text/html", "image/svg+xml"):
        if kind in data:
            return "".join(data[kind])
    if "image/png" in data:
        text = html.escape("".join(data.get("text/plain", "picture")), quote=True)
        return f'<img alt="{text}" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
    return f"<pre>{html.escape(''.join(data.get('text/plain', '')))}</pre>"


def on_post_build(config: MkDocsConfig) -> None:
    """Drop the site map, which has no address to name."""
    for name in ("sitemap.xml", "sitemap.xml.gz"):
        (Path(config.site_dir) / name).unlink(missing_ok=True)
