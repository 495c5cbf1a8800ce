"""Elements of a picture: the frame with its description, text, lines, a legend, colours, round numbers."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Sequence
from html import escape
from itertools import count

from toolkit.core.redaction import redact

COLOURS = {
    "parameters": "#1649ff",
    "master": "#3c0751",
    "gradients": "#a21600",
    "optimizer": "#33a36b",
    "activations": "#cf8000",
    "logits": "#a531ba",
    "buffers": "#465156",
    "workspace": "#4a0000",
    "transient": "#a886b6",
    "load": "#465156",
    "prepare": "#a886b6",
    "forward": "#1649ff",
    "backward": "#a21600",
    "step": "#33a36b",
    "save": "#cf8000",
}
"""A part's or a phase's colour, the same in every picture.

Parts lie at least 29 apart (CIE76), phases too, also as people without red, green or blue cones see them (Machado et al. 2009),
and each has a contrast of at least 3:1 against white.
"""

WIDTH = 760
"""Of a picture's own units; it shrinks with its place and never grows."""

INK, QUIET, GRID, LIMIT = "#1f2937", "#4b5563", "#e5e7eb", "#b91c1c"

MARK = "toolkit-picture"
"""The class of the toolkit's pictures."""

LETTER = 8.0
"""The average width of a wide letter in a font of 13."""

_DRAWN = count(1)


def colour(part: str) -> str:
    """Return the colour of a part or phase. Another name always gets the same one of them."""
    colours = list(COLOURS.values())
    return COLOURS.get(part) or colours[zlib.crc32(part.encode()) % len(colours)]


def luminance(colour: str) -> float:
    """Return the relative luminance of `#rrggbb` by WCAG 2."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def ink_on(ground: str) -> str:
    """Return black or white, whichever has a contrast of 4.5:1 on this ground."""
    return "#ffffff" if luminance(ground) < 0.179 else "#000000"


def svg(title: str, description: str, body: Sequence[str], height: float) -> str:
    """Return the whole picture. Its ids are unique in a page, also after a kernel was restarted."""
    body = [text(12, 24, title, size=15, weight=600), *body]
    digest = hashlib.sha256("".join([description, *body]).encode()).hexdigest()[:8]
    name = f"toolkit-{digest}-{next(_DRAWN)}"
    return redact(
        f'<svg class="{MARK}" xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="{name}-t {name}-d" '
        f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" style="max-width:100%;height:auto" '
        "font-family=\"system-ui,-apple-system,'Segoe UI',Roboto,sans-serif\">"
        f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(description)}</desc>'
        f'<rect width="{WIDTH}" height="{height:.0f}" rx="8" fill="#ffffff"/>{"".join(body)}</svg>'
    )


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 13,
    colour: str = INK,
    anchor: str = "start",
    weight: int = 400,
    hover: str = "",
) -> str:
    """Draw text; `hover` is shown under the pointer."""
    more = (f' text-anchor="{anchor}"' if anchor != "start" else "") + (
        f' font-weight="{weight}"' if weight != 400 else ""
    )
    tooltip = f"<title>{escape(hover)}</title>" if hover not in ("", words) else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}"{more}>{tooltip}{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> str:
    """Draw a straight line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{more}/>'


def ticks(low: float, high: float, *, binary: bool = False) -> list[float]:
    """Return about five round numbers from `low` to `high`; bytes are round in their binary unit."""
    unit = 1024.0 ** max(0, int(math.log(high, 1024))) if binary and high >= 1 else 1.0
    rough = (high - low) / unit / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(nice * power for nice in (1, 2, 5, 10) if nice * power >= rough * 0.999) * unit
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def lay_out(entries: Sequence[tuple[str, str]], y: float) -> tuple[list[str], float]:
    """Draw a legend from line `y` on, of marks drawn around (0, 0) and their labels. Return the next line."""
    elements, x = [], 18.0
    for mark, words in entries:
        wide = len(words) * 6.5 + 38
        if x + wide > WIDTH and x > 18:
            x, y = 18.0, y + 20
        elements += [f'<g transform="translate({x:.1f} {y - 4:.1f})">{mark}</g>', text(x + 20, y, words, size=12)]
        x += wide
    return elements, y + 14 if entries else y - 6
