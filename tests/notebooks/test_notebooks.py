"""The notebooks: each executed from its source with other parameters, with its claims; and the notebook that is checked in."""

from __future__ import annotations

import getpass
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "notebooks"))

from execute import FOLDER, address, claims, colab_link, execute, install_cell, read, repository, sources
from other_parameters import AGAIN, PARAMETERS, execute_with_others

SOURCES = sources()
TWICE = ("04_activations",)
"""The notebook that is executed a second time here, as a sample; the others by `notebooks/execute_twice.py`."""

LARGEST = 500_000
"""Bytes of a notebook with its outputs."""


@pytest.fixture(params=SOURCES, ids=[path.stem for path in SOURCES])
def source(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_every_notebook_has_a_source_and_other_parameters() -> None:
    assert SOURCES
    assert {path.with_suffix(".ipynb") for path in SOURCES} == set(FOLDER.glob("*.ipynb"))
    assert set(PARAMETERS) == set(AGAIN) == {path.stem for path in SOURCES}


def test_source_and_notebook_are_in_step(source: Path) -> None:
    made, kept = (notebook.cells for notebook in (read(source), nbformat.read(source.with_suffix(".ipynb"), 4)))
    assert [(cell.cell_type, cell.metadata, cell.source) for cell in made] == [
        (cell.cell_type, cell.metadata, cell.source) for cell in kept
    ], f"run `make notebooks NOTEBOOKS={source.stem}`"


def test_every_cell_was_executed_and_none_failed(source: Path) -> None:
    path = source.with_suffix(".ipynb")
    code = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert outputs
    assert {output.output_type for output in outputs} <= {"display_data", "execute_result", "stream"}
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []
    assert path.stat().st_size < LARGEST
    # What nobody trusts is shown without its SVG elements: pictures are images.
    assert not any("<svg" in str(output.get("data", {}).get("text/html", "")) for output in outputs)


def test_the_notebook_names_no_machine(source: Path) -> None:
    text = source.with_suffix(".ipynb").read_text()
    for place in (str(Path.home()) + "/", sys.prefix, "/tmp/", getpass.getuser() + "@"):
        assert place not in text
    assert re.findall(rf"\b{re.escape(socket.gethostname())}\b", text) == []
    assert re.findall(r"/(?:home|" + r"root|Users)/\S*", text) == []


def test_the_notebook_begins_and_ends_as_all_do(source: Path) -> None:
    cells = read(source).cells
    title, installs = cells[:2]
    shows = next(cell for cell in cells if "tk.environment()" in cell.source)
    parameters = next(cell for cell in cells if "parameters" in cell.metadata.get("tags", ()))
    assert title.source.startswith("# ")
    assert colab_link(source.stem) in title.source
    assert ("Open in Colab" in title.source) == bool(repository())
    assert installs.source == install_cell(source.stem)
    assert not re.findall(r"!\[.*\]\(http|<img[^>]*src=.http", source.read_text())  # no picture from the network
    assert shows.source.endswith("tk.environment()")
    assert "GPU" in parameters.source
    exercises = next(cell for cell in cells if cell.source.startswith("## Exercises"))
    assert len(re.findall(r"^\d\. ", exercises.source, re.MULTILINE)) >= 3


def test_links_and_install_cells_follow_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / SOURCES[0].name
    for suffix in (".py", ".ipynb"):
        shutil.copy(SOURCES[0].with_suffix(suffix), tmp_path)
    before = source.read_text()
    monkeypatch.setattr("execute.repository", lambda: "somebody/theirs")
    address(source)
    made = nbformat.read(source.with_suffix(".ipynb"), 4).cells
    assert "[Open in Colab](https://colab.research.google.com/github/somebody/theirs/blob/main/" in made[0].source
    assert "accelerate-toolkit[notebook] @ git+https://github.com/somebody/theirs" in made[1].source
    monkeypatch.setattr("execute.repository", lambda: "")
    address(source)
    assert source.read_text() == before
    assert '"accelerate-toolkit[notebook]"' in read(source).cells[1].source


def test_a_parameter_that_is_not_replaced_is_an_error(source: Path) -> None:
    with pytest.raises(ValueError, match="NO_SUCH_PARAMETER 0 times"):
        read(source, {"NO_SUCH_PARAMETER": 1})


def test_a_notebook_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    notebook = read(SOURCES[0])
    notebook.cells = notebook.cells[:1]
    notebook.cells[0].update(cell_type="code", source="import time; time.sleep(60)", outputs=[], execution_count=None)
    with pytest.raises(TimeoutError, match="longer than 4 s"):
        execute(notebook, tmp_path, limit=4)


@pytest.mark.slow
def test_a_cell_with_a_slider_is_answered(tmp_path: Path) -> None:
    notebook = read(SOURCES[0])
    slider = "import ipywidgets; ipywidgets.interact(lambda value: print(value), value=3); None"
    notebook.cells = [nbformat.v4.new_code_cell(slider) for _ in range(250)]  # every fiftieth was not
    execute(notebook, tmp_path, limit=200)
    shown = [output for cell in notebook.cells for output in cell.outputs]
    assert {output.output_type for output in shown} == {"display_data"}  # the widget; what it shows is kept in it


@pytest.fixture(scope="module")
def executed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future]]:
    """Those that are asked for, two at once: each has one thread, and most wait for kernels to begin."""

    def run(source: Path) -> list[nbformat.NotebookNode]:
        return list(execute_with_others(source, tmp_path_factory.mktemp(source.stem), 1 + (source.stem in TWICE)))

    asked = [item.callspec.params["source"] for item in request.session.items if item.originalname == EXECUTED]
    with ThreadPoolExecutor(2) as pool:
        yield {source.stem: pool.submit(run, source) for source in asked}
        pool.shutdown(cancel_futures=True)


@pytest.mark.slow
@pytest.mark.timeout(2400)  # it may wait for the notebooks before it
def test_what_a_notebook_claims_is_true_with_other_parameters(source: Path, executed: dict[str, Future]) -> None:
    for notebook in executed[source.stem].result():
        assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
        assert len(claims(notebook)) >= 5


EXECUTED = test_what_a_notebook_claims_is_true_with_other_parameters.__name__
