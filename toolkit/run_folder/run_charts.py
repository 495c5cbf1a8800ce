"""Pictures of runs over their steps: loss, speed, learning rate and gradient norm, of one run or of several over each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from toolkit.core.charts import SMOOTHED, Point, curve, thinned
from toolkit.core.display import Table

SMALL = 380
"""Pixels: two pictures stand next to each other, and each is legible on a phone."""

SMALL_POINTS = 100
"""Points of a line in a small picture."""

DECAY = 0.9
"""The share of the smoothed loss that comes from the steps before."""


def speed(event: Mapping[str, Any]) -> float | None:
    """Return a step's tokens a second."""
    tokens, seconds = event.get("tokens"), event.get("seconds")
    return tokens / seconds if tokens and seconds else None


def _loads(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [load for event in steps if isinstance(load := event.get("experts"), dict)]


def expert_loads(steps: Sequence[Mapping[str, Any]]) -> list[tuple[float, ...]]:
    """Return for each layer with experts the means over the steps of `ExpertLoad.read`'s `tokens`, `most` and `idle`."""
    try:
        layers = [zip(*(load[name] for name in ("tokens", "most", "idle")), strict=True) for load in _loads(steps)]
        return [tuple(map(fmean, zip(*layer, strict=True))) for layer in zip(*layers, strict=True)]
    except (LookupError, TypeError, ValueError):  # no run of ours wrote it
        return []


def experts_table(steps: Sequence[Mapping[str, Any]]) -> Table | None:
    """Return the load of each layer's experts, means over these steps; None without experts."""
    if not (loads := expert_loads(steps)):
        return None
    rows = [
        (f"{layer}", f"{tokens:,.1f}", f"{most:.2f}", f"{idle:.0%}") for layer, (tokens, most, idle) in enumerate(loads)
    ]
    pairs = [(load.get("imbalance"), load.get("layer_imbalance")) for load in _loads(steps)]
    known = [(share, most) for share, most in pairs if isinstance(share, float) and isinstance(most, float)]
    imbalance = ""
    if known:
        share, most = map(fmean, zip(*known, strict=True))
        imbalance = (
            f" The rank with most tokens got {share:.2f} times the mean of the ranks, {most:.2f} in its fullest layer."
        )
    return Table(
        title="Load of the experts",
        columns=("layer with experts", "tokens of an expert", "largest / mean", "idle experts"),
        rows=rows,
        notes=(f"Means over the steps.{imbalance}",),
    )


CHARTED_FIGURES: tuple[tuple[str, Callable[[Mapping[str, Any]], float | None], str], ...] = (
    ("loss", lambda event: event.get("loss"), "{:,.4g}"),
    ("tokens/s", speed, "{:,.0f}"),
    ("learning rate", lambda event: event.get("lr"), "{:.3g}"),
    ("gradient norm", lambda event: event.get("grad_norm"), "{:,.4g}"),
    (
        "largest expert load / mean",
        lambda event: max((load[1] for load in expert_loads([event])), default=None),
        "{:,.3g}",
    ),
)
"""Figure, its value in a step's event, and its format."""

LOGARITHMIC = ("loss", "gradient norm")
"""Figures that a logarithmic axis is for."""


def smoothed(points: Iterable[Point]) -> list[Point]:
    """Return exponential means over the points before, without the bias to 0 of the first (Kingma and Ba 2015, section 3)."""
    result: list[Point] = []
    mean = share = 0.0
    for place, value in points:
        if value is not None:
            mean, share = DECAY * mean + (1 - DECAY) * value, DECAY * share + 1 - DECAY
        result.append((place, mean / share if value is not None else None))
    return result


def run_pictures(runs: Mapping[str, Sequence[Mapping[str, Any]]], *, log: bool = False) -> list[str]:
    """Return a picture of each figure that a run has.

    Args:
        runs: name → its steps' events. One run has its loss raw and smoothed; of several, each has a smoothed line.
        log: logarithmic axes for the loss and the gradient norm.
    """
    pictures = []
    for figure, value, form in CHARTED_FIGURES:
        lines = {name: [(float(event["step"]), value(event)) for event in steps] for name, steps in runs.items()}
        if not any(number is not None for points in lines.values() for _, number in points):
            continue
        if len(runs) == 1:
            lines = {figure: next(iter(lines.values()))}
        if figure == "loss":
            means = {SMOOTHED if len(runs) == 1 else name: smoothed(points) for name, points in lines.items()}
            lines = means if len(runs) > 1 else lines | means
        axis = log and figure in LOGARITHMIC
        title = figure[0].upper() + figure[1:] + (", smoothed" if figure == "loss" and len(runs) > 1 else "")
        title += ", log axis" if axis else ""
        lines = {name: thinned(points, SMALL_POINTS) for name, points in lines.items()}
        pictures.append(curve(lines, title=title, x="step", y=figure, spell_y=form.format, log=axis, width=SMALL))
    return pictures
