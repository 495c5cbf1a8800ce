"""How results look: one table, as text and as HTML. Every result shows itself through `Result`."""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.core.redaction import redact, redact_all, visible


@dataclass(frozen=True, kw_only=True)
class Table:
    """A titled table. Cells are shown as they are; numbers and cells that begin with a digit stand to the right."""

    columns: Sequence[str]
    rows: Iterable[Sequence[Any]]
    title: str = ""
    notes: Sequence[str] = ()
    """Sentences below the table."""

    def text(self) -> str:
        """Aligned columns for a terminal or a Markdown code block."""
        cells, right = self._cells()
        widths = [max(len(row[i]) for row in [list(self.columns), *cells]) for i in range(len(self.columns))]

        def line(row: Sequence[str]) -> str:
            padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
            return "  ".join(padded).rstrip()

        head = [visible(self.title)] if self.title else []
        rule = "  ".join("-" * width for width in widths)
        return "\n".join(
            [*head, line(list(self.columns)), rule, *(line(row) for row in cells), *map(visible, self.notes)]
        )

    def html(self) -> str:
        """A plain `<table>` with a caption, and headers of columns and rows, readable without a style sheet or a script."""
        caption = (
            f'<caption style="text-align:left;white-space:nowrap">{html.escape(self.title)}</caption>'
            if self.title
            else ""
        )
        cells, right = self._cells()
        # Notebooks set every cell to the right.
        sides = [f' style="text-align:{"right" if numbers else "left"}"' for numbers in right]
        columns = zip(map(str, self.columns), sides, strict=True)
        head = "".join(f'<th scope="col"{side}>{html.escape(name)}</th>' for name, side in columns)
        body = "".join(_row(row, sides) for row in cells)
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}"

    def _repr_html_(self) -> str:
        return redact(self.html())

    def _cells(self) -> tuple[list[list[str]], list[bool]]:
        """What stands in them, and which columns stand to the right."""
        cells = [[visible(str(cell)).replace("\n", "\\n") for cell in row] for row in self.rows]
        return cells, [bool(cells) and all(_numeric(row[i]) for row in cells) for i in range(len(self.columns))]


def _row(row: Sequence[str], sides: Sequence[str]) -> str:
    """A row of HTML, whose first cell says what the others are of."""
    kinds = ['th scope="row"', *["td"] * (len(row) - 1)]
    cells = zip(kinds, sides, row, strict=True)
    return "<tr>" + "".join(f"<{kind}{side}>{html.escape(cell)}</{kind[:2]}>" for kind, side, cell in cells) + "</tr>"


def _numeric(cell: str) -> bool:
    return cell[:1].isdigit() or cell in ("", "-", "–")


class Result:
    """A result that shows itself: `str()` in a terminal, `_repr_html_` in a notebook, `to_json()` for programs."""

    def tables(self) -> list[Table]:
        """What is shown, in order."""
        raise TypeError(f"{type(self).__name__} does not say how it is shown")

    def pictures(self) -> Sequence[str]:
        """Drawings, as SVG, that stand above the tables where HTML is shown."""
        return ()

    def __str__(self) -> str:
        return redact("\n\n".join(table.text() for table in self.tables()))

    def _repr_html_(self) -> str:
        return redact("".join([*self.pictures(), *(table.html() for table in self.tables())]))

    def to_dict(self) -> dict[str, Any]:
        """The result as plain containers, sizes in bytes and times in seconds."""
        if not dataclasses.is_dataclass(self) or isinstance(self, type):
            raise TypeError(f"{type(self).__name__} is no dataclass")
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """`to_dict()` as JSON text."""
        return json.dumps(redact_all(self.to_dict()), indent=2)
