"""Wheel and sdist install from their files with each extra alone; the install cell of a notebook, in an environment with torch.

Nothing is downloaded: a fresh environment has links to the installed libraries that the extra reaches, and no others.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import venv
from collections.abc import Iterable
from pathlib import Path

import pytest
from programs import ROOT
from test_package import reached
from test_release import builder

from toolkit.core import VERSION

sys.path.insert(0, str(ROOT / "notebooks"))

from execute import install_cell, read, sources

pytestmark = pytest.mark.slow

EXTRAS = {
    "": (),
    "deepspeed": ("deepspeed",),
    "qlora": ("bitsandbytes",),
    "notebook": ("ipywidgets", "anywidget", "matplotlib"),
}
"""Extra → the modules that it brings."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    sdist, wheel, _ = builder().build(tmp_path_factory.mktemp("dist"))
    return {"sdist": sdist, "wheel": wheel}


def fresh(folder: Path, distributions: Iterable[str]) -> Path:
    """The Python of a new environment with these distributions, by links."""
    libraries = folder / "libraries"
    libraries.mkdir(parents=True)
    for name in distributions:
        found = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in found.files or () if file.parts[0] != ".."}:
            if not (libraries / top).exists():
                (libraries / top).symlink_to(found.locate_file(top))
    venv.create(folder / "environment", symlinks=True, with_pip=False)
    site = next((folder / "environment").glob("lib/python*/site-packages"))
    (site / "libraries.pth").write_text(f"{libraries}\n")
    return folder / "environment" / "bin" / "python"


def run(python: Path, *words: object) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    line = [str(python), *map(str, words)]
    done = subprocess.run(
        line, env=environ | {"PIP_NO_INDEX": "1"}, cwd=python.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(("kind", "extra"), [*(("wheel", extra) for extra in EXTRAS), ("sdist", "notebook")])
def test_each_extra_by_itself(files: dict[str, Path], extra: str, kind: str, tmp_path: Path) -> None:
    """The sdist with one: the wheel that it gives is the wheel, byte by byte (`test_release.py`)."""
    build = ["setuptools"] if kind == "sdist" else []
    python = fresh(tmp_path, [*reached({extra} - {""}), "pip", *build])
    isolated = ["--no-build-isolation"] if kind == "sdist" else []
    run(python, "-m", "pip", "install", "--no-compile", *isolated, f"{files[kind]}[{extra}]" if extra else files[kind])
    assert VERSION in run(python, "-m", "toolkit", "--version")
    modules = {module for each in EXTRAS.values() for module in each}
    found = run(python, "-c", f"import importlib.util as u; print(*[m for m in {sorted(modules)} if u.find_spec(m)])")
    assert set(found.split()) == set(EXTRAS[extra])
    fits = "import toolkit as tk; print(tk.forecast(tk.describe(), tk.Strategy(sharding='zero3'), '8x L4').fits)"
    assert run(python, "-c", fits).split()[-1] == "True"


def test_the_install_cell_leaves_torch_as_it_is(files: dict[str, Path], tmp_path: Path) -> None:
    """The first cells of the first notebook, as they stand but for the wheel's place."""
    python = fresh(tmp_path, [*reached({"notebook"}), "pip"])
    source = sources(["01"])[0]
    cells = [cell.source for cell in read(source).cells if cell.cell_type == "code"]
    assert cells[0] == install_cell(source.stem)
    shows = next(number for number, cell in enumerate(cells) if cell.endswith("tk.environment()"))
    wanted = install_cell(source.stem, f"{files['wheel']}[notebook]")
    script = (
        "\n".join([wanted, *cells[1 : shows + 1]]) + "\nprint(tk.environment())\nimport torch\nprint(torch.__file__)"
    )
    (tmp_path / "cells.py").write_text(script)
    printed = run(python, tmp_path / "cells.py")
    assert "torch" in printed
    assert printed.splitlines()[-1].startswith(str(tmp_path / "libraries"))
    site = next((tmp_path / "environment").glob("lib/python*/site-packages"))
    assert {path.name.partition("-")[0] for path in site.iterdir()} == {
        "toolkit",
        "accelerate_toolkit",
        "libraries.pth",
    }
