"""Pictures: valid SVG, true to their numbers, described for screen readers, legible without all colours."""

from __future__ import annotations

import base64
import html
import json
import math
import re
import sys
import threading
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import runs

from toolkit.config.parallelism import Parallelism
from toolkit.core.charts import HOVERED, POINTS, Bar, bars, curve, figure, thinned
from toolkit.core.display import JsonRecord, Table
from toolkit.core.gantt import SHADES, Span, spans, waits
from toolkit.core.phases import PHASES
from toolkit.core.pictures import COLOURS, OTHER_COLOURS, SERIES, colours, ink_on, luminance
from toolkit.core.units import GiB, MiB
from toolkit.forecasting.mesh_picture import draw_mesh

SVG = "{http://www.w3.org/2000/svg}"
PARTS = list(COLOURS)
CONES = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
"""Machado, Oliveira and Fernandes 2009, table 1, severity 1.0: what is left of linear RGB."""


def parse(image: str) -> ElementTree.Element:
    """The SVG in an image, with what every picture has to have."""
    (match,) = re.finditer(
        r'<img alt="([^"]+)" width="(\d+)" height="(\d+)" [^>]*src="data:image/svg\+xml;base64,([^"]+)">', image
    )
    root = ElementTree.fromstring(base64.b64decode(match[4]))
    assert root.tag == f"{SVG}svg"
    assert root.get("viewBox") == f"0 0 {match[2]} {match[3]}"
    assert "fill: #ffffff" in next(root.iter(f"{SVG}path")).get("style", ""), "white, on a dark page too"
    return root


def described(image: str) -> str:
    """What it says to who cannot see it, behind the title."""
    parse(image)
    return html.unescape(re.findall('alt="([^"]*)"', image)[0]).partition(". ")[2]


def drawn(svg: str) -> dict[str, list[tuple[str, float, float]]]:
    """Part → the colour, left end and width of each of its bars, from left to right."""
    parts: dict[str, list[tuple[str, float, float]]] = {}
    shades = {shade: part for part, shade in COLOURS.items() if part in PARTS}
    for path in parse(svg).iter(f"{SVG}path"):
        if part := shades.get((path.get("style") or "").removeprefix("fill: ")):
            ends = [float(place) for place in re.findall(r"[ML] ([\d.]+)", path.get("d") or "")]
            parts.setdefault(part, []).append((COLOURS[part], min(ends), max(ends) - min(ends)))
    return parts


def strokes(svg: str, width: float) -> list[ElementTree.Element]:
    """The lines of this width in pixels."""
    paths = list(parse(svg).iter(f"{SVG}path"))
    return [path for path in paths if f"stroke-width: {width:g};" in (path.get("style") or "") + ";"]


def texts(svg: str) -> list[str]:
    return [text.text or "" for text in parse(svg).iter(f"{SVG}text")]


def lab(shade: str, cones: str) -> tuple[float, float, float]:
    """CIE L*a*b*, under D65."""
    parts = [int(shade[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    line = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    red, green, blue = (min(1.0, max(0.0, sum(a * b for a, b in zip(row, line, strict=True)))) for row in CONES[cones])
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    a, b, c = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * b - 16, 500 * (a - b), 200 * (b - c)


@pytest.mark.parametrize("cones", CONES)
def test_colours_are_told_apart(cones: str) -> None:
    shades = {name: lab(COLOURS[name], cones) for name in PARTS}
    near = {pair: math.dist(shades[pair[0]], shades[pair[1]]) for pair in combinations(PARTS, 2)}
    assert min(near.values()) > 29, min(near, key=lambda pair: near[pair])


@pytest.mark.parametrize("shade", sorted({*COLOURS.values(), *SERIES.values(), *OTHER_COLOURS}))
def test_contrasts(shade: str) -> None:
    """3:1 of a part or a line against the ground, 4.5:1 of the text on it."""
    assert 1.05 / (luminance(shade) + 0.05) >= 3
    light, dark = sorted((luminance(shade), luminance(ink_on(shade))), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_bars_are_as_long_as_what_they_say() -> None:
    rows = [
        Bar(label="forecast", parts={"parameters": 2 * GiB, "optimizer": 4 * GiB, "logits": 0, "buffers": -1}),
        Bar(label="measured", parts={"parameters": 2 * GiB, "transient": 1 * GiB}),
    ]
    svg = bars(rows, title="Peak", limit=8 * GiB, limit_label="a rank has")
    parts = drawn(svg)
    assert list(parts) == ["parameters", "optimizer", "transient"]
    widths = {part: [wide + 1 for _, _, wide in bars] for part, bars in parts.items()}
    assert widths["parameters"][0] == widths["parameters"][1]
    assert widths["optimizer"][0] == pytest.approx(2 * widths["parameters"][0], abs=0.3)
    assert {shade for shade, *_ in parts["parameters"]} == {COLOURS["parameters"]}
    start = parts["parameters"][0][1]
    (limit,) = (path for path in strokes(svg, 2) if "dasharray" in (path.get("style") or ""))
    across = float(re.findall(r"M ([\d.]+)", limit.get("d") or "")[0])
    assert across - start == pytest.approx(4 * widths["parameters"][0], abs=0.6)
    assert described(svg) == (
        "forecast: 6.00 GiB (parameters 2.00 GiB, optimizer 4.00 GiB). "
        "measured: 3.00 GiB (parameters 2.00 GiB, transient 1.00 GiB). The line marks the limit: a rank has 8.00 GiB."
    )


def test_a_rank_without_any_memory_left_has_a_picture() -> None:
    svg = bars([Bar(label="peak", parts={"parameters": 1 * MiB})], title="Peak", limit=0, limit_label="a rank has")
    assert described(svg).endswith("The line marks the limit: a rank has 0 B.")


def test_a_limit_far_away_does_not_shrink_the_bars() -> None:
    svg = bars([Bar(label="peak", parts={"parameters": 1 * MiB})], title="Peak", limit=64 * GiB)
    assert "limit 64.00 GiB: beyond the picture, less than 0.1% of it is used" in texts(svg)
    assert drawn(svg)["parameters"][0][2] > 400
    assert not [path for path in strokes(svg, 2) if "dasharray" in (path.get("style") or "")]


def test_one_legend_and_none_where_labels_say_it() -> None:
    words = texts(bars([Bar(label="peak", parts={"logits": MiB})], title="One"))
    assert words.count("logits 1.0 MiB") == 1
    rows = [Bar(label=f"{name}, forecast", parts={name: MiB}) for name in PHASES]
    words = texts(bars(rows, title="Phases"))
    assert not set(words) & set(PHASES)


def test_a_part_that_nobody_knows_keeps_its_colour() -> None:
    alone = colours(["kv cache"])["kv cache"]
    assert colours(["loss", "kv cache", "logits"]) == {
        "loss": SERIES["loss"], "kv cache": alone, "logits": COLOURS["logits"],
    }  # fmt: skip
    assert not {*OTHER_COLOURS, *SERIES.values()} & {*COLOURS.values()}, "a part's colour means that part"
    names = [f"run {number}" for number in range(len(OTHER_COLOURS))]
    assert len(set(colours(names).values())) == len(names)


def test_nothing_to_draw() -> None:
    assert parse(bars([], title="Peak"))
    assert "nothing yet" in described(curve({"loss": []}, title="Loss", x="step", y="loss"))
    assert parse(curve({}, title="Loss", x="step", y="loss"))
    assert parse(curve({"loss": [(1, None), (2, math.nan)]}, title="Loss", x="step", y="loss"))
    assert parse(curve({"loss": [(7, 1.0)]}, title="Loss", x="step", y="loss"))


def test_a_curve_leaves_gaps_and_says_its_values() -> None:
    points = [(1, 4.0), (2, 3.0), (3, math.nan), (4, 2.0), (5, None), (6, 1.0), (7, math.inf)]
    svg = curve({"loss": points, "evaluation": [(6, 1.5)]}, title="Loss", x="step", y="loss", spell_y="{:.1f}".format)
    line, evaluation = strokes(svg, 2)[:2]
    assert len(re.findall("M", line.get("d") or "")) == 3
    assert len(re.findall("L", line.get("d") or "")) == 1
    shades = [(use.get("style") or "").removeprefix("fill: ") for use in parse(svg).iter(f"{SVG}use")]
    dots = [shades.count(shade) for shade in (SERIES["loss"], SERIES["evaluation"])]
    assert dots == [4, 1], "isolated points, too"
    assert described(svg) == (
        "loss over step. loss: first 4.0, last 1.0, lowest 1.0. evaluation: first 1.5, last 1.5, lowest 1.5."
    )
    ends = [float(end) for end in re.findall(r"[ML] ([\d.]+) ", line.get("d") or "")]
    assert ends == sorted(ends)
    assert SERIES["loss"] in str(line.get("style"))
    assert SERIES["evaluation"] in str(evaluation.get("style"))


def test_a_curve_has_the_values_under_a_pointer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "s3cretNobodyKnows")
    points: list[tuple[float, float | None]] = [(1, 4.0), (2, None), (3, 2.0), (4, 3.0)]
    lines = {"loss": points, "s3cretNobodyKnows": [(3.0, 1.5)]}
    shown = curve(lines, title="Loss", x="step", y="loss", spell_y="{:.1f}".format)
    strips = re.findall(r'<i[^>]* data-at="([^"]*)" style="left:([\d.]+)%;width:([\d.]+)%">', shown)
    assert [text.split("\n")[0] for text, *_ in strips] == [
        "loss: 4.0, step 1",
        "loss: 2.0, step 3",
        "loss: 3.0, step 4",
    ]
    assert "1.5, step 3" in strips[1][0]
    assert "s3cret" not in shown
    ends = [(float(left), float(left) + float(wide)) for _, left, wide in strips]
    assert (ends[0][0], ends[-1][1]) == (0, 100)
    assert all(end == pytest.approx(start, abs=0.01) for (_, end), (start, _) in pairwise(ends))
    assert [start < share < end for (start, end), share in zip(ends[1:], (200 / 3, 99), strict=True)] == [True, True]
    many = curve({"loss": [(step, 1 / step) for step in range(1, 5001)]}, title="Loss", x="step", y="loss")
    assert many.count("data-at=") == HOVERED + 1
    assert "data-at" not in curve({"loss": [(1, None)]}, title="Loss", x="step", y="loss")


def test_a_logarithmic_axis() -> None:
    points: list[tuple[float, float | None]] = [(1, 100.0), (2, 10.0), (3, 0.0), (4, 1.0)]
    svg = curve({"loss": points}, title="Loss", x="step", y="loss", log=True, width=380)
    line = strokes(svg, 2)[0].get("d") or ""
    ends = [float(end) for end in re.findall(r"[ML] [\d.]+ ([\d.]+)", line)]
    assert len(re.findall("M", line)) == 2, "0 leaves a gap"
    assert ends[2] - ends[1] == pytest.approx(ends[1] - ends[0], abs=0.01), "a tenth is as far as a tenth"
    assert {"1", "10", "100"} <= set(texts(svg))
    assert 'width="380"' in svg


def test_long_lines_are_thinned_and_keep_their_ends() -> None:
    points: list[tuple[float, float | None]] = [(step, float(step % 7)) for step in range(10_000)]
    points[5_000], points[6_001] = (5_000, 99.0), (6_001, -99.0)
    points[7_000:7_100] = [(step, None) for step in range(7_000, 7_100)]
    kept = thinned(points)
    assert len(kept) <= POINTS
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert {(5_000, 99.0), (6_001, -99.0)} <= set(kept)
    assert any(value is None for _, value in kept)
    assert [place for place, _ in kept] == sorted(place for place, _ in kept)
    assert len(curve({"loss": points}, title="Loss", x="step", y="loss")) < 24_000
    assert thinned(points[:POINTS]) == points[:POINTS]


def test_what_is_written_into_a_picture_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a secret that would be cut to the length of a label."""
    monkeypatch.setenv("HF_TOKEN", "s3cretNobodyKnows")
    row = Bar(
        label="<b> & a rather long label s3cretNobodyKnows", parts={"<script>": MiB, '" id="1 font-family: x': MiB}
    )
    image = bars([row], title="<script>alert(1)</script>", limit_label="s3cretNobodyKnows", limit=MiB)
    assert "<script" not in image
    assert "s3cret" not in image + " ".join(texts(image))
    assert "<script>alert(1)</script>" in texts(image)


def test_equal_pictures_are_equal_text() -> None:
    """In threads too, and whatever a user has set in matplotlib; his settings stay."""
    import matplotlib

    pictures: list[str] = []

    def add() -> None:
        pictures.append(bars([Bar(label="price in $ and $ 你", parts={"logits": MiB})], title="Peak"))

    before = dict(matplotlib.rcParams)
    add()
    with matplotlib.rc_context({"svg.fonttype": "path", "savefig.bbox": "tight", "text.usetex": True}):
        threads = [threading.Thread(target=add) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert matplotlib.rcParams["svg.fonttype"] == "path"
    assert dict(matplotlib.rcParams) == before
    assert len(pictures) == 4
    assert len(set(pictures)) == 1
    assert "price in $ and $ 你" in texts(pictures[0])


def test_without_matplotlib_the_fix_stands_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shown = runs.expected()._repr_html_()
    assert "<img" not in shown
    assert ": the picture needs matplotlib. <code>pip install matplotlib</code>" in shown
    assert "<table>" in shown
    assert "pip install matplotlib" in curve({"loss": [(1, 2.0)]}, title="<Loss>", x="step", y="loss")


@pytest.mark.parametrize(("rows", "folded"), [(12, False), (13, True)])
def test_a_table_stands_beside_its_picture(rows: int, folded: bool) -> None:
    svg = bars([Bar(label="peak", parts={"logits": MiB})], title="Peak")
    table = Table(title="Peak", columns=("part", "bytes"), rows=(("logits", str(row)) for row in range(rows)))
    shown = figure(svg, table)
    assert svg in shown
    assert shown.count("<tr>") == rows + 1
    assert ("<details><summary>Peak: 13 rows</summary>" in shown) == folded


def test_a_forecast_shows_its_peak() -> None:
    shown = runs.expected()._repr_html_()
    svg = re.findall("<img [^>]*>", shown)[0]
    assert shown.index("<strong>") < shown.index(svg) < shown.index("<table>")
    assert set(drawn(svg)) == set(runs.PARTS)
    assert described(svg).endswith("The line marks the limit: a rank has 256.0 MiB.")


@dataclass
class Declared(JsonRecord):
    json_fields = "* group.name=path.name size=none.size"
    path: Path
    points: tuple[tuple[int, int], ...] = ((1, 2),)
    none: Bar | None = None


def test_a_record_declares_its_json() -> None:
    """All fields, a nested name of an attribute's attribute, and None where there is no owner."""
    expected = {"path": "/a/b", "points": [[1, 2]], "none": None, "group": {"name": "b"}, "size": None}
    assert Declared(Path("/a/b")).to_dict() == json.loads(Declared(Path("/a/b")).to_json()) == expected


def test_a_schedule_shows_what_each_rank_does_and_why_it_waits() -> None:
    """The first rank waits for its backward, the second one for its first micro-batch and after its last."""
    busy = [
        [Span(0, 0, 1, "forward", "0"), Span(0, 4, 6, "backward", "0")],
        [Span(1, 1, 2, "forward", "0"), Span(1, 2, 4, "backward")],
    ]
    idle = [gap for row, own in enumerate(busy) for gap in waits(row, own, 6.0)]
    assert {(gap.row, gap.kind, gap.begin, gap.end) for gap in idle} == {
        (0, "waits between two", 1, 4),
        (1, "waits for its first", 0, 1),
        (1, "waits after its last", 4, 6),
    }
    image = spans(["rank 0", "rank 1"], [*busy[0], *busy[1], *idle], title="1f1b", description="Two ranks", spell=str)
    shades = [path.get("style") or "" for path in parse(image).iter(f"{SVG}path")]
    for shade in SHADES.values():
        assert any(shade in style for style in shades)
    assert described(image).startswith("Two ranks")


def test_a_mesh_shows_every_rank_with_its_layers_and_its_slice() -> None:
    """32 ranks as 4 stages x 4 slices x 2 copies: which ranks read the same samples, and where tokens and labels enter."""
    layers = [{"layers": (8 * stage, 8 * stage + 8)} for stage in range(4)]
    image = draw_mesh(Parallelism(pp=4, dp_replicate=2, tp=4), {"stages": layers})
    shown = texts(image)
    assert sorted(int(text) for text in shown if text.isdigit()) == list(range(32))
    assert [f"layers {8 * stage}–{8 * stage + 7}" in shown for stage in range(4)] == [True] * 4
    assert [shown.count(text) for text in ("samples of dp 0", "samples of dp 1", "tokens", "labels")] == [1] * 4
    assert "stage 3, layers 24–31: 8 ranks from 24" in described(image)
    paths = (path for path in parse(image).iter(f"{SVG}path") if "#6d28d9" in (path.get("style") or ""))
    ends = [[float(place) for place in re.findall(r"[ML] ([\d.]+)", path.get("d") or "")] for path in paths]
    starts = sorted({min(end) for end in ends if max(end) - min(end) < 12})
    cells = sorted({min(end) for end in ends if max(end) - min(end) > 20})
    assert len(starts) == len(cells) == 8, "four slices on each of two stages, in two rows"
    assert [
        round((start - cell) / (starts[3] - cells[3]), 1) for start, cell in zip(starts[:4], cells[:4], strict=True)
    ] == [pytest.approx(slice_ / 3, abs=0.05) for slice_ in range(4)]
