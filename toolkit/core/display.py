"""Tables as text and as HTML, by the templates in this folder; progress bars; `Result`, which shows itself by them."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from typing import Any, ClassVar

from toolkit.core.atomic_io import encode_json
from toolkit.core.glossary import explained
from toolkit.core.redaction import redact, visible

UNLIMITED = 10_000
"""Characters of a line that nothing wraps."""

NARROWEST = 16
"""Characters below which no column is narrowed."""

COMMAND = "    toolkit "
"""The beginning of a line that is a command."""

_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|\S)+""")
"""A word of a shell's command, with its quotes."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A titled table. Numbers, and cells that begin with a digit, are right-aligned."""

    columns: Sequence[str]
    rows: Iterable[Sequence[Any]]
    title: str = ""
    notes: Sequence[str] = ()
    """Sentences below the table."""
    picture: str = ""
    """SVG of the same figures, for a report."""

    def text(self, width: int = UNLIMITED) -> str:
        """Return aligned columns for a terminal or a Markdown code block.

        Args:
            width: characters of a line. Longer texts wrap between words; names and numbers stay whole.
        """
        from io import StringIO

        from rich.box import Box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text  # in which nothing is markup

        cells, right = self._cells()
        rule = Box("    \n    \n -  \n    \n    \n    \n    \n    \n", ascii=True)  # a line below the header
        table = RichTable(box=rule, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        widths = _column_widths(
            [[name, *column] for name, *column in zip(self.columns, *cells, strict=True)], right, width
        )
        for name, numbers, column_width in zip(self.columns, right, widths, strict=True):
            table.add_column(Text(name), justify="right" if numbers else "left", width=column_width)
        for row in cells:
            table.add_row(*map(Text, row))
        console = Console(
            force_jupyter=False, file=StringIO(), width=UNLIMITED, color_system=None, force_terminal=False, emoji=False
        )
        with console.capture() as capture:
            console.print(table)
        lines = [line.rstrip() for line in capture.get().rstrip("\n").split("\n")]
        above = [_wrapped(visible(self.title), width)] if self.title else []
        return "\n".join([*above, *lines, *(_wrapped(visible(note), width) for note in self.notes)])

    def html(self) -> str:
        """Return a plain `<table>` with a caption and headers, readable without a style sheet or a script."""
        cells, right = self._cells()
        sides = ["right" if numbers else "left" for numbers in right]  # notebooks set every cell to the right
        known: set[str] = set()
        columns = [markup(explained(str(name), known)) for name in self.columns]
        rows = [[markup(explained(first, known)), *others] for first, *others in cells]
        return render("table", title=self.title, columns=columns, sides=sides, rows=rows, notes=self.notes)

    def _repr_html_(self) -> str:
        return redact(self.html())

    def _cells(self) -> tuple[list[list[str]], list[bool]]:
        """Return the cells' texts, and for each column whether it is right-aligned."""
        cells = [[visible(str(cell)).replace("\n", "\\n") for cell in row] for row in self.rows]
        return cells, [bool(cells) and all(_numeric(row[i]) for row in cells) for i in range(len(self.columns))]


def _column_widths(columns: Sequence[Sequence[str]], right: Sequence[bool], limit: int) -> list[int]:
    """Return widths that fit the limit if words and numbers stay whole: rich would cut them."""
    widths = [max(map(len, column)) for column in columns]
    needed = [
        max(min(width, NARROWEST), *(len(word) for cell in column for word in ([cell] if numbers else cell.split())))
        for column, numbers, width in zip(columns, right, widths, strict=True)
    ]
    while sum(widths) + 2 * len(widths) - 2 > limit:
        spare = [width if width > least else 0 for width, least in zip(widths, needed, strict=True)]
        if not any(spare):
            break
        widths[spare.index(max(spare))] -= 1
    return widths


def _numeric(cell: str) -> bool:
    return cell[:1].isdigit() or cell in ("", "-", "–")


def _wrapped(text: str, width: int) -> str:
    """Return text in lines of `width` characters. Paths and flags stay whole. Other indented lines are a log's or code."""
    import textwrap

    def fill(line: str) -> str:
        if not line.startswith("    "):
            return textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
        if not line.startswith(COMMAND):
            return line
        first, *arguments = _WORD.findall(line)
        lines = [f"    {first}"]
        for word in arguments:
            if len(lines[-1]) + len(word) + 3 > width:
                lines.append(" " * 7)
            lines[-1] += f" {word}"
        return " \\\n".join(lines)

    return "\n".join(map(fill, text.split("\n")))


class JsonRecord:
    """A dataclass that declares its JSON."""

    json_fields: ClassVar[str] = "*"
    """Names of the JSON in order, between spaces; `*`: all fields. `group.name` nests, `name=other.attribute` renames."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, sizes in bytes and times in seconds."""
        result: dict[str, Any] = {}
        fields = " ".join(each.name for each in dataclasses.fields(self))  # type: ignore[arg-type]
        for word in self.json_fields.replace("*", fields).split():
            path, _, attribute = word.partition("=")
            *groups, name = path.split(".")
            group = reduce(lambda outer, inner: outer.setdefault(inner, {}), groups, result)
            group[name] = plain(reduce(_attribute, (attribute or name).split("."), self))
        return result

    def to_json(self) -> str:
        """Return `to_dict()` as JSON text."""
        return encode_json(self.to_dict(), indent=2)


def _attribute(owner: Any, name: str) -> Any:
    return None if owner is None else getattr(owner, name)


def plain(value: Any) -> Any:
    """Return a value with records as dictionaries, in plain containers."""
    if isinstance(value, JsonRecord):
        return value.to_dict()
    if dataclasses.is_dataclass(value):
        value = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


class Result(JsonRecord):
    """A result that shows itself: `str()` in a terminal, `_repr_html_` in a notebook, `to_json()` for programs."""

    changes: ClassVar[bool] = False
    """Whether it shows something else at another time, as a run does."""

    def headline(self) -> str:
        """Return the answer in a sentence or two, which stands above the tables; empty where the tables are the answer."""
        return ""

    def tables(self) -> list[Table]:
        """Return the tables in order."""
        raise TypeError(f"{type(self).__name__} has no tables")

    def pictures(self) -> Sequence[str]:
        """Return pictures, as HTML, that stand above the tables in HTML."""
        return ()

    def __str__(self) -> str:
        width = shutil.get_terminal_size().columns  # 80 without a terminal
        headline = visible(self.headline())
        parts = [*([_wrapped(headline, width)] if headline else []), *(t.text(width) for t in self.tables())]
        return redact("\n\n".join(parts))

    def _repr_html_(self) -> str:
        headline = f"<p><strong>{html.escape(self.headline())}</strong></p>" if self.headline() else ""
        return redact("".join([headline, *self.pictures(), *(table.html() for table in self.tables())]))


def markup(html: str) -> Any:
    """Return HTML that templates leave as it is; they escape every other value."""
    from markupsafe import Markup

    return Markup(html)


def render(template: str, **values: Any) -> str:
    """Return the HTML of `templates/TEMPLATE.html` with these values."""
    return str(_environment().get_template(f"{template}.html").render(values))


@cache
def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = FileSystemLoader(Path(__file__).with_name("templates"))
    environment = Environment(loader=folder, autoescape=True, undefined=StrictUndefined)
    environment.filters["code"] = lambda text: markup(re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text)))
    return environment


@contextlib.contextmanager
def progress_bar(name: str, total: int, unit: str) -> Iterator[Any]:
    """Show a progress bar on a terminal if the work takes longer than two seconds."""
    from tqdm import tqdm

    with tqdm(total=total, desc=name, unit=unit, unit_scale=bool(unit), delay=2, disable=None, leave=False) as bar:
        yield bar
