"""Pictures as images: whole, told in words, and nothing else touched."""

from __future__ import annotations

import re
from base64 import b64decode
from html import unescape
from xml.etree import ElementTree

from toolkit.core.display import Table
from toolkit.core.drawing import Bar, bars, curve, figure, portable
from toolkit.core.units import MiB

FOREIGN = (
    '<svg role="img" xmlns="http://www.w3.org/2000/svg"><title>an icon</title><svg role="img"><path/></svg></svg>'
    """<script>const icon = '<svg class="icon" role="img"></svg>';</script>"""
)


def test_pictures_become_images_that_hold_them() -> None:
    drawn = [
        bars([Bar(label="rank <0> & 1", parts={"logits": MiB})], title='The "peak"'),
        curve({"loss": [(1, 2.0), (2, 1.0)]}, title="Loss", x="step", y="loss"),
    ]
    page = "".join(figure(svg, Table(title="Peak", columns=("part",), rows=[("logits",)])) for svg in drawn) + FOREIGN
    found = portable(page)
    images = re.findall(r"<img [^>]*>", found)
    data = [re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', image) for image in images]
    held = [re.sub(r"toolkit-[0-9a-f]{8}-\d+", "picture", svg) for svg in drawn]
    assert [b64decode(one[1]).decode() for one in data if one] == held
    for svg, image in zip(drawn, images, strict=True):
        root = ElementTree.fromstring(svg)
        words = [root.findtext(f"{{http://www.w3.org/2000/svg}}{kind}") or "" for kind in ("title", "desc")]
        alt = re.search(r'alt="([^"]*)"', image)
        assert alt
        assert unescape(alt[1]) == ". ".join(words)
        width, height = (root.get("viewBox") or "").split()[2:]
        assert f'width="{width}" height="{height}"' in image
    rest = page
    for svg, image in zip(drawn, images, strict=True):
        rest = rest.replace(svg, image)
    assert found == rest


def test_a_kernel_shows_what_is_not_ours_as_it_is() -> None:
    from IPython.display import HTML

    from toolkit.notebook import _html

    isolated = HTML(FOREIGN, metadata={"isolated": True})
    assert _html(isolated) == (FOREIGN, {"isolated": True})
    drawn = curve({"loss": [(1, 2.0), (2, 1.0)]}, title="Loss", x="step", y="loss")
    assert _html(HTML(FOREIGN + drawn, metadata={"isolated": True})) == (portable(FOREIGN + drawn), {"isolated": True})
    assert _html(HTML(FOREIGN + drawn)) == FOREIGN + portable(drawn)
    assert _html(HTML()) is None
