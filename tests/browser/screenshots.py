"""Make the pictures of README again: the explorers, the live view of a run, and its report. `make screenshots` runs this."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from lab import Notebook, browsing, serving, until_step
from playwright.sync_api import Locator, Page, expect

import toolkit as tk

PICTURES = Path(__file__).parents[2] / "docs" / "images"
MOST = 250_000
"""Bytes of a picture."""

MODEL = '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096}'  # noqa: E501
ASKED = (
    "'7B', '8x A100-80GB', tk.Strategy(sharding='zero3', precision='bf16'), tk.TrainConfig(seq_len=4096, micro_batch=2)"
)
CELLS = (
    "import toolkit as tk",
    f"tk.explore('memory', {ASKED})",
    f"tk.explore('compare', {ASKED}, against=tk.Strategy(sharding='fsdp', precision='bf16'))",
    f"tk.explore('timeline', {ASKED})",
    f"tk.explore('precision', {ASKED})",
    "run = tk.launch('toolkit.finetune', 'zero2', processes=2, steps=40, seq_len=64, save=False)\nrun",
)
NAMES = {1: "memory", 2: "compare", 3: "timeline", 4: "precision", 5: "run"}


def keep(place: Page | Locator, name: str) -> None:
    """A picture of a place in a page."""
    file = PICTURES / f"{name}.png"
    place.screenshot(path=file)
    size = file.stat().st_size
    print(f"{file}: {size:,} bytes")
    if size > MOST:
        sys.exit(f"{file} has {size:,} bytes, more than {MOST:,}.")


def main() -> None:
    """Make all of them."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "7B").mkdir()
        (folder / "7B/config.json").write_text(MODEL)
        with serving(folder) as url, browsing() as browser:
            page = browser.new_page(viewport={"width": 1440, "height": 2200})
            notebook = Notebook(page, url, folder / "notebook.ipynb", CELLS)
            page.locator(".jp-SideBar [data-id=filebrowser]").click()
            notebook.run(0)
            for number, name in NAMES.items():
                output = notebook.run(number)
                if name == "run":
                    until_step(output, 25)
                expect(output.get_by_role("img").first).to_be_visible()
                keep(notebook.cell(number), name)
            (run,) = (folder / "runs").iterdir()
            tk.attach(run).wait(progress=False)
            page.set_viewport_size({"width": 1180, "height": 1300})
            page.goto(tk.report(run).write().as_uri())
            keep(page, "report")


if __name__ == "__main__":
    main()
