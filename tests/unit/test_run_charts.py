"""The curves of a run and of several over each other, and what `run.metrics` has."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest
from runs import event, write

import toolkit as tk
from toolkit.core.errors import RunError
from toolkit.run_folder.run_charts import smoothed
from toolkit.run_folder.status import Progress, page

FIGURES = ["Loss", "Tokens/s", "Learning rate", "Gradient norm"]


def titles(text: str) -> list[str]:
    return [html.unescape(title) for title in re.findall('<img alt="([^".]*)', text)]


def test_a_smoothed_line_follows_without_a_bias_to_zero() -> None:
    """The first is the first value; a constant stays; a jump is followed by a tenth of the way a step, in the limit."""
    assert smoothed([(1, 4.0)]) == [(1, pytest.approx(4.0))]
    assert [mean for _, mean in smoothed([(step, 3.0) for step in range(9)])] == pytest.approx([3.0] * 9)
    points = [(step, 1.0) for step in range(200)] + [(200, 2.0), (201, None), (202, 2.0)]
    means = [mean for _, mean in smoothed(points)]
    assert means[200:] == [pytest.approx(1.1), None, pytest.approx(1.19)]


def test_a_run_has_a_picture_of_each_figure_that_its_steps_have(tmp_path: Path) -> None:
    write(tmp_path / "whole", [event(step) for step in range(1, 9)])
    own = [{key: value for key, value in event(step).items() if key not in ("lr", "grad_norm")} for step in (1, 2)]
    write(tmp_path / "own", own)
    shown = tk.attach(tmp_path / "whole").view(log=True)
    assert titles(shown)[:4] == ["Loss, log axis", "Tokens/s", "Learning rate", "Gradient norm, log axis"]
    assert "loss: first 7.9" in shown
    assert "smoothed: first 7.9" in shown
    assert titles(tk.attach(tmp_path / "own").view())[:2] == ["Loss", "Tokens/s"]


def test_the_load_of_experts_is_shown_for_each_layer(tmp_path: Path) -> None:
    """In the live view and the report. What no run writes is left out."""
    load = {"tokens": [64.0, 64.0], "most": [1.5, 2.0], "idle": [0.0, 0.25], "imbalance": 1.25}
    load["layer_imbalance"] = 1.5
    loads: list[Any] = [load, {**load, "most": [2.5, 2.0], "imbalance": 1.75, "layer_imbalance": 2.0}]
    write(tmp_path / "run", [event(step, experts=load) for step, load in enumerate(loads, start=1)])
    shown, report = tk.attach(tmp_path / "run").view(), tk.report(tmp_path / "run").page()
    assert "Largest expert load / mean" in titles(shown)
    for text in (shown, report):
        assert "The rank with most tokens got 1.50 times the mean of the ranks, 1.75 in its fullest layer." in text
        assert "0 64.0 2.00 0% 1 64.0 2.00 25%" in re.sub(r"\s*(<[^>]*>\s*)+", " ", text)
    for number, crafted in enumerate((7, {"tokens": 3}, {"tokens": [1], "most": ["a"], "idle": [0]})):
        write(tmp_path / f"{number}", [event(step, experts=crafted) for step in (1, 2)])
        assert "Load of the experts" not in tk.attach(tmp_path / f"{number}").view()


@pytest.mark.parametrize(("kind", "drawn"), [("resident", False), ("allocated", True)])
def test_resident_memory_does_not_stand_beside_a_forecast_of_allocations(kind: str, drawn: bool) -> None:
    progress = Progress(step=1, bytes_per_rank=(500, 600), bytes_are=kind, forecast_bytes=300)
    shown = page("a run", "running", progress, [], "")
    (title,) = titles(shown)
    assert title == f"Memory of each rank: {progress.memory_kind}"
    assert ("forecast peak: 300 B" in shown) == drawn
    assert "forecast <abbr" in shown, "in the table of all figures"


def test_runs_over_each_other(tmp_path: Path) -> None:
    write(tmp_path / "one", [event(step) for step in range(1, 9)])
    write(tmp_path / "two", [event(step, loss=2.0) for step in range(1, 5)])
    overlay = tk.compare_runs([tmp_path / "one", tk.attach(tmp_path / "two")])
    shown = overlay._repr_html_()
    assert titles(shown) == ["Loss, smoothed", *FIGURES[1:]]
    assert shown.count(f"{tmp_path / 'two'}: first 2") == 1
    assert [row["step"] for row in overlay.rows] == [8, 4]
    assert overlay.rows[1]["smoothed_loss"] == pytest.approx(2.0)
    assert "log axis" in tk.compare_runs([tmp_path / "one"], log=True)._repr_html_()
    for given, words in (([], "expected a list"), (tmp_path / "one", "expected a list"), ([tmp_path], "holds no run")):
        with pytest.raises(RunError, match=words):
            tk.compare_runs(given)  # type: ignore[arg-type]


def test_metrics_have_the_evaluations(tmp_path: Path) -> None:
    events = [event(1), event(2), {"step": 2, "attempt": 0, "eval_loss": 5.5}, event(3)]
    write(tmp_path, events)
    metrics = tk.attach(tmp_path).metrics
    assert list(metrics["step"]) == [1, 2, 3]
    assert list(metrics["eval_loss"].dropna().items()) == [(1, 5.5)]
