"""matplotlib figures as SVG that lives inside an HTML page and takes its colours and font.

Colours are the page's CSS variables (`--ink`, `--sparse`, ...), so one figure serves light and dark
pages; text stays text; ids carry the figure's key, so figures share a page.
"""

import io
import re
from typing import Any
from xml.etree import ElementTree

from markupsafe import Markup
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

PARTS = 9
"""Colours of a stacked bar: --part0 to --part8, and --on-part0 ... for text upon them."""

_NAMES = (
    *("ink", "muted", "rule", "paper", "well", "sparse", "dense"),
    *(f"{kind}{i}" for i in range(PARTS) for kind in ("part", "on-part")),
)

COLOUR = {name: f"#0a{i:02x}0b" for i, name in enumerate(_NAMES, start=1)}
"""CSS variable -> the hex code to draw it with: matplotlib wants a value, and nothing else uses
these."""

Style = dict[Any, object]
"""matplotlib's settings; its releases differ in whether a key is any text or one of a list."""

TEXT: dict[str, Any] = {"va": "center", "parse_math": False}
"""How a label is set: centred on its height, its dollar signs no mathematics."""

STYLE: Style = {
    "svg.fonttype": "none",
    "svg.hashsalt": "sparse_dataflow",
    "path.simplify": False,
    "font.size": 11,
    "text.color": COLOUR["ink"],
    "axes.facecolor": "none",
    "axes.edgecolor": COLOUR["rule"],
    "axes.labelcolor": COLOUR["muted"],
    "axes.labelsize": 11,
    "axes.spines.top": False,
    "grid.color": COLOUR["rule"],
    "grid.linewidth": 0.6,
    "legend.fontsize": 11,
    **{f"{axis}tick.color": COLOUR["rule"] for axis in "xy"},
    **{f"{axis}tick.labelcolor": COLOUR["muted"] for axis in "xy"},
    **{f"{axis}tick.labelsize": 10 for axis in "xy"},
}
"""matplotlib settings under which a figure is drawn and turned into SVG."""

_VARIABLE = {value: f"var(--{name})" for name, value in COLOUR.items()}
_HEX = re.compile("|".join(_VARIABLE))
_FONT = re.compile(r"font: (?:(bold|\d00) )?([\d.]+)px [^;]*")
_DECIMALS = re.compile(r"-?\d+\.\d{3,}(?:e-?\d+)?")


def figure(width: float, height: float) -> Figure:
    """An empty figure without background, in SVG units (CSS pixels where it is not scaled)."""
    made = Figure(figsize=(width / 72, height / 72), dpi=72)
    made.patch.set_visible(False)
    FigureCanvasSVG(made)
    return made


def inline(drawn: Figure, key: str, title: str, description: str) -> Markup:
    """The figure as one `<svg>` element to stand in HTML.

    Args:
      drawn: a figure made and drawn under `STYLE`.
      key: prefix of every id within; unique on the page.
      title: what the figure is called when read aloud.
      description: what it shows, in words.
    """
    buffer = io.BytesIO()
    drawn.savefig(
        buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
    )
    root = ElementTree.fromstring(buffer.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            # A style element inside an inline SVG would rule the whole page.
            if _local(child.tag) in ("metadata", "style"):
                parent.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {
            _local(name): _attribute(_local(name), value, key)
            for name, value in element.attrib.items()
            # Groups are named line2d_1, text_1, ...: only what is referred to keeps its id.
            if not (name == "id" and element.tag == "g")
        }
        element.text, element.tail = _trimmed(element.text), _trimmed(element.tail)
    _name(root, key, title, description)
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _name(root: ElementTree.Element, key: str, title: str, description: str) -> None:
    width, height = (float(v) for v in root.attrib["viewBox"].split()[2:])
    root.attrib = {
        "viewBox": f"0 0 {width:g} {height:g}",
        "width": f"{width:g}",
        "height": f"{height:g}",
        "role": "img",
        "aria-labelledby": f"{key}-title {key}-description",
    }
    for place, (tag, text) in enumerate((("title", title), ("desc", description))):
        element = ElementTree.Element(tag, {"id": f"{key}-{'description' if place else tag}"})
        element.text = text
        root.insert(place, element)


def _attribute(name: str, value: str, key: str) -> str:
    if name == "id":
        return f"{key}-{value}"
    if name == "href":
        return value.replace("#", f"#{key}-", 1)
    if name == "style":
        value = _FONT.sub(lambda m: f"font-weight: {m[1] or 'normal'}; font-size: {m[2]}px", value)
    value = value.replace("url(#", f"url(#{key}-")
    value = _HEX.sub(lambda match: _VARIABLE[match[0]], value)
    # A hundredth of a pixel is enough, and a third of the bytes.
    return " ".join(_DECIMALS.sub(lambda m: f"{float(m[0]):.2f}", value).split())


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _trimmed(text: str | None) -> str | None:
    return text if text and text.strip() else None
