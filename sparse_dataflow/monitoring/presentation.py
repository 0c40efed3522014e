"""How the numbers of a step are shown: one table of known names, and a default for all others."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

LEGAL_NAME = re.compile(r"[A-Za-z_][\w./-]{0,59}", re.ASCII)
"""Names of metrics; pages leave out other names, which a damaged file may have."""

COUNTERS = ("kind", "step", "tokens", "seconds")
"""What each row has besides metrics."""

MOST_FIGURES = 24
"""Figures of metrics on a page at most."""


class Presentation(NamedTuple):
    """How a number is shown.

    Attributes:
      title: of its figure.
      line: format of its text in the line of progress; "" leaves it out.
      figure: whether pages draw it over the steps.
    """

    title: str
    line: str = ""
    figure: bool = True


KNOWN = {
    "loss": Presentation("Training loss", "loss {:.3f}", figure=False),  # The curve of losses.
    "tokens_per_second": Presentation("Tokens per second", "{:,.0f} tokens/s"),
    "gradient_norm": Presentation("Gradient norm"),
    "learning_rate": Presentation("Learning rate", figure=False),
    "mfu": Presentation("MFU", figure=False),
    "balance_loss": Presentation("Load-balance loss of experts"),
    "router_z_loss": Presentation("Z-loss of routers"),
    "dropped": Presentation("Share of choices dropped"),
    "busiest_expert": Presentation("Busiest expert / even load"),
}


def presentation(name: str) -> Presentation:
    """Returns how a number is shown; a name that is not known is its own title and text."""
    return KNOWN.get(name) or Presentation(name.replace("_", " "), f"{name} {{:.4g}}")


def line(row: Mapping[str, object]) -> str:
    """Returns the text of a row "train" in the line of progress."""
    shown = ((presentation(name).line, row[name]) for name in row if name not in COUNTERS)
    return " ".join(form.format(value) for form, value in shown if form and value is not None)


def figure_names(histories: Iterable[Sequence[Mapping[str, object]]]) -> list[str]:
    """Returns the names of the metrics that pages draw, known ones first.

    Args:
      histories: rows of metrics.jsonl of each variant.
    """
    present: dict[str, None] = {}
    for rows in histories:
        for row in rows:
            if row.get("kind") == "train":
                present |= {
                    name: None
                    for name, value in row.items()
                    if name not in present and isinstance(value, int | float)
                }
    ordered = [
        *(name for name in KNOWN if name in present),
        *(n for n in present if n not in KNOWN),
    ]
    legal = (name for name in ordered if name not in COUNTERS and LEGAL_NAME.fullmatch(name))
    return [name for name in legal if presentation(name).figure][:MOST_FIGURES]
