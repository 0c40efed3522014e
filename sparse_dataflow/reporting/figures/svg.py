"""matplotlib figures as inline SVG with the colours and fonts of an HTML page.

Colours are CSS variables of the page (`--ink`, `--sparse`, ...), so a figure suits light and dark
pages. Text stays text. Ids have the figure's key as prefix, so several figures fit on one page.
"""

import contextlib
import functools
import io
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar
from xml.etree import ElementTree

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from sparse_dataflow.files.errors import escaped, first_line, redact
from sparse_dataflow.reporting.quantities import visible

P = ParamSpec("P")
T = TypeVar("T")
_LOG = logging.getLogger(__name__)

CATEGORIES = 9
"""Number of category colours: --category0 to --category8, with --on-category0 ... for text."""

_NAMES = (
    *("ink", "muted", "rule", "paper", "well", "sparse", "dense", "narrow"),
    *(f"{kind}{i}" for i in range(CATEGORIES) for kind in ("category", "on-category")),
)

COLOUR = {name: f"#0a{i:02x}0b" for i, name in enumerate(_NAMES, start=1)}
"""CSS variable -> unique hex code that matplotlib draws with and `inline` replaces."""

Style = dict[Any, object]
"""matplotlib settings; the type of the keys differs between matplotlib releases."""

TEXT: dict[str, Any] = {"va": "center", "parse_math": False}
"""Arguments of labels: vertically centred, dollar signs are text."""

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
"""matplotlib settings for drawing and saving the figures."""

_VARIABLE = {value: f"var(--{name})" for name, value in COLOUR.items()}
_HEX = re.compile("|".join(_VARIABLE))
_FONT = re.compile(r"font: (?:(bold|\d00) )?([\d.]+)px [^;]*")
_DECIMALS = re.compile(r"-?\d+\.\d{3,}(?:e-?\d+)?")


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty transparent figure; sizes in SVG units (CSS pixels at scale 1)."""
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    figure.patch.set_visible(False)
    FigureCanvasSVG(figure)
    return figure


def drawn(figure: Callable[P, T]) -> Callable[P, T | Markup]:
    """Returns a function of a figure with words in the place of a figure that fails.

    A page has numbers of files, which may be damaged or of somebody else.
    """

    @functools.wraps(figure)
    def draw(*arguments: P.args, **keywords: P.kwargs) -> T | Markup:
        try:
            return figure(*arguments, **keywords)
        except (ArithmeticError, IndexError, ValueError) as error:
            _LOG.warning("a figure cannot be drawn: %s", first_line(error))
            words = visible(escaped(redact(first_line(error))))
            return Markup("<p>This figure cannot be drawn: {}.</p>").format(words.rstrip("."))

    return draw


@contextlib.contextmanager
def drawing(width: float, height: float) -> Iterator[tuple[Figure, Axes]]:
    """Yields a figure under `STYLE` and axes whose units are SVG units, from the top left."""
    with matplotlib.rc_context(STYLE):
        figure = new_figure(width, height)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, width), ylim=(height, 0))
        axes.set_axis_off()
        yield figure, axes


def inline(figure: Figure, key: str, title: str, description: str) -> Markup:
    """Returns the figure as an inline `<svg>` element.

    Args:
      figure: figure drawn under `STYLE`.
      key: prefix of the figure's ids, unique on the page.
      title: accessible title of the figure.
      description: accessible description of the figure.
    """
    buffer = io.BytesIO()
    figure.savefig(
        buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
    )
    root = ElementTree.fromstring(buffer.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            # A style element of an inline SVG would apply to the whole page.
            if _local(child.tag) in ("metadata", "style"):
                parent.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {
            _local(name): _attribute(_local(name), value, key)
            for name, value in element.attrib.items()
            # Nothing refers to the ids of groups (line2d_1, text_1, ...).
            if not (name == "id" and element.tag == "g")
        }
        element.text, element.tail = _trimmed(element.text), _trimmed(element.tail)
    _set_title(root, key, title, description)
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _set_title(root: ElementTree.Element, key: str, title: str, description: str) -> None:
    width, height = (float(v) for v in root.attrib["viewBox"].split()[2:])
    root.attrib = {
        "viewBox": f"0 0 {width:g} {height:g}",
        "width": f"{width:g}",
        "height": f"{height:g}",
        "role": "img",
        "aria-labelledby": f"{key}-title {key}-description",
    }
    labels = (("title", "title", title), ("desc", "description", description))
    for index, (tag, suffix, text) in enumerate(labels):
        element = ElementTree.Element(tag, {"id": f"{key}-{suffix}"})
        element.text = text
        root.insert(index, element)


def _attribute(name: str, value: str, key: str) -> str:
    if name == "id":
        return f"{key}-{value}"
    if name == "href":
        return value.replace("#", f"#{key}-", 1)
    if name == "style":
        value = _FONT.sub(lambda m: f"font-weight: {m[1] or 'normal'}; font-size: {m[2]}px", value)
    value = value.replace("url(#", f"url(#{key}-")
    value = _HEX.sub(lambda match: _VARIABLE[match[0]], value)
    # Two decimals are enough and reduce the size to a third.
    return " ".join(_DECIMALS.sub(lambda m: f"{float(m[0]):.2f}", value).split())


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _trimmed(text: str | None) -> str | None:
    return text if text and text.strip() else None
