"""Turns a matplotlib figure into an SVG element that can stand inside an HTML page. Pure.

Inline SVG needs no namespaces, so none is kept: the page then holds no address at all. Ids are kept
only where something refers to them, and get a prefix, because one page holds many figures.
"""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_EMPTY_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def inline_svg(figure: Figure, *, prefix: str, label: str) -> str:
    """``prefix`` makes ids unique in the page; ``label`` is read by screen readers."""
    FigureCanvasSVG(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata=_EMPTY_METADATA)
    root = ElementTree.fromstring(buffer.getvalue().decode("utf-8"))
    _strip_metadata(root)
    referenced = _references(root)
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = _attributes(element.attrib, referenced, prefix)
        if element.tag != "text" and element.tag != "tspan":
            element.text = element.text if (element.text or "").strip() else None
        element.tail = None
    box = root.attrib["viewBox"]
    root.attrib = {"viewBox": box, "role": "img", "aria-label": label}
    return ElementTree.tostring(root, encoding="unicode")


def _strip_metadata(root: ElementTree.Element) -> None:
    for child in list(root):
        if _local(child.tag) == "metadata":
            root.remove(child)


def _references(root: ElementTree.Element) -> set[str]:
    found: set[str] = set()
    for element in root.iter():
        for name, value in element.attrib.items():
            if _local(name) == "href":
                found.add(value.lstrip("#"))
            found.update(_REFERENCE.findall(value))
    return found


def _attributes(attributes: dict[str, str], referenced: set[str], prefix: str) -> dict[str, str]:
    kept: dict[str, str] = {}
    for name, value in attributes.items():
        local = _local(name)
        if local == "id":
            if value in referenced:
                kept["id"] = f"{prefix}-{value}"
        elif local == "href":
            kept["href"] = f"#{prefix}-{value.lstrip('#')}"
        else:
            kept[local] = _REFERENCE.sub(rf"url(#{prefix}-\1)", value)
    return kept


def _local(name: str) -> str:
    return name.rsplit("}", 1)[-1]
