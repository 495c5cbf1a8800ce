"""Pictures for places that take no SVG: a notebook that was not executed here, and GitHub, keep its words and drop its lines."""

from __future__ import annotations

import re
from base64 import b64encode
from html import escape, unescape

from toolkit.core.drawing.elements import MARK

# None of ours has another inside.
_PICTURE = re.compile(f'<svg class="{MARK}".*?</svg>', re.DOTALL)
_BOX = re.compile(r'viewBox="0 0 ([\d.]+) ([\d.]+)"')
_NAME = re.compile(r"toolkit-[0-9a-f]{8}-\d+")
_WORDS = re.compile(r"<(title|desc) [^>]*>(.*?)</\1>", re.DOTALL)


def portable(html: str) -> str:
    """Replace every picture of ours with an image that contains it, with its title and description as alternative text.

    Pictures of others stay as they are.

    Tooltips are lost: the table holds their text.
    """
    return _PICTURE.sub(lambda match: _image(match[0]), html)


def _image(svg: str) -> str:
    words = ". ".join(unescape(word) for _, word in _WORDS.findall(svg)[:2])
    box = _BOX.search(svg)
    # Both are known before it is decoded, so that a view which is redrawn twice a second does not jump.
    size = f'width="{box[1]}" height="{box[2]}" ' if box else ""
    # An image is a page of its own: equal pictures get equal text.
    data = b64encode(_NAME.sub("picture", svg).encode()).decode()
    return (
        f'<img alt="{escape(words)}" {size}decoding="sync" style="max-width:100%;height:auto" '
        f'src="data:image/svg+xml;base64,{data}">'
    )
