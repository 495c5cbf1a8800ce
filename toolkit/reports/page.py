"""A report as one HTML page: light and dark, without scripts or requests, readable by screen readers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from toolkit.core.display import Table
from toolkit.core.drawing import figure
from toolkit.reports.parts import Section

WIDE = 4
"""Columns above which a table scrolls for itself on a small screen."""

MADE = '<meta name="generator" content="accelerate-toolkit">'
"""Says in its head that a page is a report."""

STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1f2937; --quiet: #4b5563; --rule: #d1d5db; --card: #f3f4f6;
  --good: #166534; --bad: #b91c1c; --on: #1d4ed8; }
@media (prefers-color-scheme: dark) { :root { --ground: #111827; --ink: #e5e7eb; --quiet: #9ca3af; --rule: #374151;
  --card: #1f2937; --good: #86efac; --bad: #fca5a5; --on: #93c5fd; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto,
  sans-serif; }
main, header { max-width: 1180px; margin: 0 auto; padding: 0 24px; }
header { padding-top: 32px; }
h1 { font-size: 1.7rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem; padding-top: .8rem; border-top: 1px solid var(--rule); }
p { margin: .4rem 0; max-width: 80ch; overflow-wrap: anywhere; }
pre { background: var(--card); padding: .8rem 1rem; border-radius: 8px; white-space: pre-wrap; overflow-wrap: anywhere;
  font: .88rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(145px, 1fr)); gap: 12px; margin: 1.2rem 0 0; }
dl > div { background: var(--card); border-radius: 8px; padding: .6rem .9rem; }
dt { color: var(--quiet); font-size: .85rem; }
dd { margin: 0; font-weight: 600; font-size: .95rem; font-variant-numeric: tabular-nums; }
dd.finished { color: var(--good); } dd.failed { color: var(--bad); } dd.going, dd.stopped { color: var(--on); }
table { border-collapse: collapse; margin: .6rem 0 1rem; font-size: .92rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .3rem; white-space: nowrap; }
th, td { padding: .22rem .9rem .22rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; overflow-wrap: break-word; }
td[style*=right] { white-space: nowrap; }
thead th { color: var(--quiet); font-weight: 600; font-size: .85rem; }
tbody th { font-weight: 400; white-space: nowrap; }
table + p { color: var(--quiet); font-size: .88rem; }
summary { cursor: pointer; color: var(--quiet); font-size: .92rem; padding: .3rem 0; }
svg { display: block; margin: .6rem 0 1rem; border: 1px solid var(--rule); border-radius: 8px; }
.tables { display: flex; flex-wrap: wrap; gap: 0 3rem; }
.wide { overflow-x: auto; max-width: 100%; }
footer { max-width: 1180px; margin: 2rem auto; padding: 0 24px; color: var(--quiet); font-size: .85rem; }
@media print { h2, svg, table { break-inside: avoid; } }
""".strip()


def html_page(name: str, status: str, figures: Sequence[tuple[str, str]], sections: Sequence[Section]) -> str:
    """Return the page of a run."""
    cards = "".join(
        f"<div><dt>{escape(what)}</dt><dd{_class(what, status)}>{escape(value)}</dd></div>" for what, value in figures
    )
    body = "".join(part for section in sections for part in _section(section))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{MADE}\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>Run {escape(name)}: {escape(status)}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n"
        f"<header><h1>Run {escape(name)}</h1><dl>{cards}</dl></header>\n<main>{body}</main>\n"
        "<footer>Written by accelerate-toolkit. Bytes are the allocator's; 1 GiB is 1,073,741,824 bytes.</footer>\n"
        "</body>\n</html>\n"
    )


def _class(what: str, status: str) -> str:
    return f' class="{escape(status)}"' if what == "status" else ""


def _section(section: Section) -> Iterator[str]:
    yield f"\n<section><h2>{escape(section.title)}</h2>"
    if section.words:
        yield f"<p>{escape(section.words)}</p>"
    if section.code:
        yield f"<pre>{escape(section.code)}</pre>"
    plain = [_framed(table) for table, svg in section.tables if not svg]
    yield from (figure(svg, table) for table, svg in section.tables if svg)
    if plain:
        yield f'<div class="tables">{"".join(plain)}</div>'
    yield "</section>"


def _framed(table: Table) -> str:
    """Make a wide table reachable by keyboard, with a name."""
    wide = f' class="wide" tabindex="0" role="region" aria-label="{escape(table.title)}"'
    return f"<div{wide if len(table.columns) > WIDE else ''}>{table.html()}</div>"
