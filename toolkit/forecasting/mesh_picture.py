"""The picture of a run's mesh: which rank holds which layers, and which slices of them; which ranks read the same rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.config.parallelism import Parallelism, count_ranks
from toolkit.core.display import Table
from toolkit.core.pictures import GRID, INK, QUIET, WIDTH, ink_on, mark_places, picture

DRAWN_STAGES, DRAWN_ROWS, DRAWN_RANKS = 6, 8, 24
"""The most stages, rows, and ranks of a row that are drawn. Of more, the first ones and the last."""

STAGE_COLOURS = ("#0369a1", "#6d28d9")
"""Of neighbouring stages, in turn."""


def draw_mesh(sizes: Parallelism, pipeline: Mapping[str, Any] | None = None) -> str:
    """Draw ranks as cells: a column for each stage, a row for each rank that reads rows of its own or a part of them.

    A cell is filled where its rank's slice of each matrix lies. Empty where ranks share neither layers nor matrices.

    Args:
        sizes: of the run's mesh.
        pipeline: of a forecast's JSON.
    """
    if max(sizes.pp, sizes.tp, sizes.cp, sizes.ep) == 1:
        return ""
    stages, rows = _shown(sizes.pp, DRAWN_STAGES), _shown(sizes.dp_size * sizes.cp, DRAWN_ROWS)
    slices = _shown(sizes.tp, max(3, DRAWN_RANKS // len(stages)))
    layers = {stage: _layers_of(stage, sizes.pp, pipeline) for stage in stages if stage is not None}
    left = 8.0 * len(_row_label(sizes.dp_size * sizes.cp - 1, sizes)) + 14
    width = (WIDTH - left - 12) / len(stages)
    title = f"{sizes.ranks} ranks: " + " × ".join(f"{name} {size}" for name, size, _ in _dimensions(sizes))

    def draw(axes: Any) -> None:
        axes.set(xlim=(0, WIDTH - left - 12), ylim=(len(rows), 0))
        mark_places(axes, "y", {place + 0.5: _row_label(row, sizes) for place, row in enumerate(rows)}, size=12)
        for column, stage in enumerate(stages):
            middle = (column + 0.5) * width
            text = {"ha": "center", "size": 11, "clip_on": False}
            axes.text(middle, -0.12, "…" if stage is None else layers[stage], va="bottom", color=INK, **text)
            axes.text(middle, len(rows) + 0.1, _inputs_of(stage, sizes.pp), va="top", color=QUIET, **text)
            for number, row in enumerate(rows):
                if stage is not None and row is not None:
                    first, colour = (stage * sizes.dp_size * sizes.cp + row) * sizes.tp, STAGE_COLOURS[stage % 2]
                    _draw_ranks(axes, sizes, first, slices, colour, (column * width + 4, number, width - 8))

    each = sizes.ranks // sizes.pp
    words = [f"{text}: {count_ranks(each)} from {stage * each}".replace("\n", ", ") for stage, text in layers.items()]
    words.append("The ranks of a row read the same samples. A bar is filled where the rank's slice of each matrix lies")
    looks = (("a rank", 12), ("its slice of each matrix", 5)) if sizes.tp > 1 else (("a rank", 12),)
    legend = {name: {"color": STAGE_COLOURS[0], "lw": size} for name, size in looks}
    return picture(title, ". ".join(words) + ".", draw, legend, (left, 12), (40, 44 * len(rows), 26))


def mesh_table(sizes: Parallelism, pipeline: Mapping[str, Any] | None = None) -> Table:
    """Return the dimensions of a mesh with more than one rank, under its picture."""
    columns = ("dimension", "ranks", "they divide")
    return Table(title="Mesh", columns=columns, rows=_dimensions(sizes), picture=draw_mesh(sizes, pipeline))


def _dimensions(sizes: Parallelism) -> list[tuple[str, int, str]]:
    """Return the name of each dimension, its ranks, and what they divide; without those of one rank."""
    divided = {"pp": "layers", "dp_size": "samples", "cp": "each sequence", "tp": "each matrix", "ep": "experts"}
    rows = [(name.removesuffix("_size"), int(getattr(sizes, name)), what) for name, what in divided.items()]
    return [row for row in rows if row[1] > 1]


def _shown(count: int, most: int) -> list[int | None]:
    """Return the numbers that are drawn, with None in the place of those that are left out."""
    return [*range(count)] if count <= most else [*range(most - 2), None, count - 1]


def _row_label(row: int | None, sizes: Parallelism) -> str:
    """Return the data-parallel rank of a row, and its part of the sequence."""
    if row is None:
        return "…"
    return f"samples of dp {row // sizes.cp}" + (f", cp {row % sizes.cp}" if sizes.cp > 1 else "")


def _layers_of(place: int, pp: int, pipeline: Mapping[str, Any] | None) -> str:
    """Return the stages and layers of the ranks at a place of the pipeline."""
    if pipeline is None:
        return "all layers"
    cuts = list(enumerate(stage["layers"] for stage in pipeline["stages"]))[place::pp]
    if len(cuts) > 3:
        return f"{len(cuts)} stages\n{sum(end - first for _, (first, end) in cuts)} layers"
    numbers = ", ".join(str(number) for number, _ in cuts)
    spans = ", ".join(str(first) if end == first + 1 else f"{first}–{end - 1}" for _, (first, end) in cuts)
    return f"stage {numbers}\nlayers {spans}"


def _inputs_of(stage: int | None, pp: int) -> str:
    """Return what the ranks of a place take from their samples: token ids enter at the first stage, labels at the last."""
    if stage is None or 0 < stage < pp - 1:
        return ""
    return "tokens and labels" if pp == 1 else "labels" if stage else "tokens"


def _draw_ranks(
    axes: Any,
    sizes: Parallelism,
    first: int,
    slices: Sequence[int | None],
    colour: str,
    place: tuple[float, int, float],
) -> None:
    """Draw the ranks from `first` on that share a stage and a row, side by side from `place`: left, top, width."""
    from matplotlib.patches import Rectangle

    left, top, whole = place
    width = whole / len(slices)

    def box(begin: float, up: float, wide: float, high: float, shade: str) -> None:
        axes.add_artist(Rectangle((begin, up), wide, high, facecolor=shade, lw=0))

    for number, tp in enumerate(slices):
        x, middle = left + number * width, {"ha": "center", "va": "center", "clip_on": False}
        if tp is None:
            axes.text(x + width / 2, top + 0.5, "…", color=INK, **middle)
            continue
        part = (width - 3) / sizes.tp
        box(x + 1.5, top + 0.06, width - 3, 0.6, colour)
        box(x + 1.5, top + 0.69, width - 3, 0.14, GRID)
        box(x + 1.5 + part * tp, top + 0.69, part, 0.14, colour)
        rank = first + tp
        words = f"{rank}\nexperts {rank % sizes.ep + 1}/{sizes.ep}" if sizes.ep > 1 else str(rank)
        look = {"size": 9 if rank < 1000 else 7, "color": ink_on(colour), "linespacing": 1.0, **middle}
        axes.text(x + width / 2, top + 0.36, words, **look)
