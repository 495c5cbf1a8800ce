"""What every notebook has: its parts in order, short cells behind sentences, things to move, folded checks and solutions."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import sys
from html import unescape
from pathlib import Path

import nbformat
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "notebooks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from execute import read, sources, visible
from published_runs import accelerate_article

import toolkit as tk

LESSONS = sources()

PARTS = (r"# \S", "## Before you start", "## The rule", "## When it goes wrong", "## Exercises", "## Next")
BEFORE = ("You know", "You can then", "Time", "Hardware")
"""What «Before you start» says."""
LONGEST_CELL = 15
MOVED = re.compile(r"^.*\btk\.(?:explore|vary)\(", re.MULTILINE)
FEWEST_CONTROLS = 3
DEEPEST_IMPORT = 1
"""Dots in the name of an imported module: `torch.distributed` has one, and what has more is the inside of a package."""
NEEDS, MACHINES = "What this notebook's runs need", ("cpu", "T4", "L4")
STILL = ("Before you start", "Exercises", "Next")
"""Sections without anything to move."""
MOST_CODE = 2_217 // 2
"""Lines of visible code in all notebooks, without blank ones: half of what they had."""


@pytest.fixture(params=LESSONS, ids=[source.stem for source in LESSONS])
def lesson(request: pytest.FixtureRequest) -> nbformat.NotebookNode:
    return read(request.param)


def words(lesson: nbformat.NotebookNode) -> list[str]:
    """The visible sentences, cell by cell."""
    return [cell.source for cell in visible(lesson) if cell.cell_type == "markdown"]


def code(lesson: nbformat.NotebookNode) -> list[str]:
    """The visible code, cell by cell."""
    return [cell.source for cell in visible(lesson) if cell.cell_type == "code"]


def test_its_parts_stand_in_order(lesson: nbformat.NotebookNode) -> None:
    text = "\n".join(words(lesson))
    found = [re.search(f"^{part}", text, re.MULTILINE) for part in PARTS]
    assert all(found), [part for part, match in zip(PARTS, found, strict=True) if match is None]
    places = [match.start() for match in found if match is not None]
    assert places == sorted(places)
    before = text[places[1] :].partition("\n## ")[0]
    assert [word for word in BEFORE if f"**{word}**" not in before] == []
    assert re.search(r"\d+ minutes", before)
    assert re.search(r"^\*\*Your guess", text, re.MULTILINE)


def test_every_exercise_has_a_folded_solution(lesson: nbformat.NotebookNode) -> None:
    first = next(n for n, cell in enumerate(lesson.cells) if cell.source.startswith("## Exercises"))
    asked = re.findall(r"^(\d)\. ", lesson.cells[first].source, re.MULTILINE)
    solutions = [cell for cell in lesson.cells[first:] if "solution" in cell.metadata.get("tags", ())]
    assert len(asked) >= 3
    assert asked == [str(n + 1) for n in range(len(solutions))]
    assert all(cell.metadata.jupyter.source_hidden for cell in solutions)


def test_it_leads_to_the_next(lesson: nbformat.NotebookNode) -> None:
    stems = [source.stem for source in sources()]
    own = next(source.stem for source in sources() if read(source).cells[0].source == lesson.cells[0].source)
    last = words(lesson)[-1]
    assert last.startswith("## Next")
    links = re.findall(r"\((\w+)\.ipynb\)", last)
    assert links[:1] == stems[stems.index(own) + 1 :][:1]


def test_its_code_is_what_a_reader_would_type(lesson: nbformat.NotebookNode) -> None:
    for cell in code(lesson):
        assert len(cell.splitlines()) <= LONGEST_CELL, cell
        assert not re.search(r"^\s*(?:from|import) toolkit\.", cell, re.MULTILINE), cell
        modules = re.findall(r"^\s*(?:from|import) ([\w.]+)", cell, re.MULTILINE)
        assert max([0, *(module.count(".") for module in modules)]) <= DEEPEST_IMPORT, cell
        assert not re.search(r"^\s*assert ", cell, re.MULTILINE), cell


def test_a_sentence_stands_before_every_cell(lesson: nbformat.NotebookNode) -> None:
    cells = visible(lesson)
    for before, cell in itertools.pairwise(cells):
        if cell.cell_type == "code":
            assert before.cell_type == "markdown", cell.source


def test_there_is_something_to_move(lesson: nbformat.NotebookNode) -> None:
    """In every section: a panel, or the buttons of a run that it shows."""
    assert len(MOVED.findall("\n".join(code(lesson)))) >= FEWEST_CONTROLS
    sections, title = {}, ""
    for cell in visible(lesson):
        if cell.cell_type == "markdown":
            for line in cell.source.splitlines():
                title = line.removeprefix("## ") if line.startswith("## ") else title
        else:
            sections[title] = sections.get(title, "") + cell.source + "\n"
    still = [title for title, text in sections.items() if not MOVED.search(text) and not re.search("^run$", text, re.M)]
    assert set(still) <= {"", *STILL}


@pytest.mark.parametrize("kind", ["memory", "compare", "timeline", "precision"])
def test_every_panel_stands_where_its_subject_is_taught(kind: str) -> None:
    assert any(
        f'tk.explore("{kind}"' in "".join(re.sub(r"\(\s+", "(", cell) for cell in code(read(source)))
        for source in LESSONS
    )


def test_a_result_is_a_table_a_picture_or_a_sentence(lesson: nbformat.NotebookNode) -> None:
    """Python's own spelling of a value has a bracket, a quote or an object's address."""
    own = next(source for source in sources() if read(source).cells[0].source == lesson.cells[0].source)
    for cell in visible(nbformat.read(own.with_suffix(".ipynb"), 4)):
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            assert set(data) - {"text/plain"} or "data" not in output, f"{cell.source}\n{data}"
            assert not re.match(r"[\[({<']|\w+\(", output.get("text", "")), output.text


def test_it_forecasts_its_own_runs_for_a_processor_and_two_cards(lesson: nbformat.NotebookNode) -> None:
    """As a table, or, in the first, as a panel."""
    found = next(text for text in (*code(lesson), *html(lesson)) if NEEDS in text)
    assert [machine for machine in MACHINES if machine not in found.replace("this machine", "cpu")] == []


def test_code_in_its_outputs_has_no_backticks(lesson: nbformat.NotebookNode) -> None:
    assert [text for page in html(lesson) for text in re.findall("[^<>]*`[^<>]*", page)] == []


def html(lesson: nbformat.NotebookNode) -> list[str]:
    """The pages among the stored outputs of its visible cells."""
    own = next(source for source in sources() if read(source).cells[0].source == lesson.cells[0].source)
    outputs = [
        output for cell in visible(nbformat.read(own.with_suffix(".ipynb"), 4)) for output in cell.get("outputs", ())
    ]
    return [unescape(output["data"]["text/html"]) for output in outputs if "text/html" in output.get("data", {})]


def test_its_published_recipes_are_those_of_the_benchmark() -> None:
    """The same models, lengths, cards and figures in the notebook and in benchmarks/published.py, and in the results of it."""
    (source,) = sources(["06"])
    (cell,) = [cell.source for cell in read(source).cells if "\nRECIPES = {" in cell.source]
    names = {"tk": tk, "dataclasses": dataclasses, "PUBLISHED": "TITAN-RTX"}
    exec(cell.partition("\ndef beside")[0], names)
    recipes = names["RECIPES"].values()
    for recipe, run in zip(recipes, accelerate_article(), strict=True):
        assert recipe.config.to_dict() == run.config.to_dict()
        assert f"{recipe.cards}x TITAN-RTX" == run.hardware
        assert (recipe.strategy, recipe.seq_len, recipe.rows) == (run.strategy, run.seq_len, run.rows)
        assert (recipe.micro_batch, recipe.epoch) == (run.micro_batch, run.epoch_seconds)
    page = next(page for page in html(read(source)) if "The largest micro-batch" in page)
    for row in json.loads((sources()[0].parents[1] / "benchmarks/results/published.json").read_text())["largest"]:
        if row["published"]["micro_batch"]:
            assert f">{row['forecast']['micro_batch']}<" in page
            assert f">{row['forecast']['epoch_seconds']:,.1f} s<" in page


def test_visible_code_is_half_of_what_it_was() -> None:
    lines = [line for source in LESSONS for cell in code(read(source)) for line in cell.splitlines() if line.strip()]
    assert len(lines) <= MOST_CODE
