"""Page of a search for a parallel plan: the answer, the plans, the commands and four figures."""

import dataclasses
from collections.abc import Mapping, Sequence

from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.planner.step_time import Section
from sparse_dataflow.reporting import templates

from . import search_figures


@dataclasses.dataclass(frozen=True)
class Page:
    """Content of the page.

    Attributes:
      title: model and chips.
      headline: the answer in one sentence.
      band: error band of the step times, as a sentence.
      rows: best plans as rows of a table, fastest first.
      verdicts: of the compiler, on each row.
      recommended: index of the plan to run.
      times: group of terms -> seconds, of each row.
      frontier: the plan that ran on Frontier beside the recommended one, or "".
      dtype: dtype of the matrix products.
      models: label -> section name -> `Section`, of the roofline.
      effects: choice -> Shapley effect on throughput.
      levels: choice -> level -> first-order effect on throughput.
      scaling: (chips, tokens per second) of the best plans of this batch.
      command: command of one process.
      launcher: command that starts it on all chips, or "".
    """

    title: str
    headline: str
    band: str
    rows: Sequence[Mapping]
    verdicts: Sequence[str]
    recommended: int
    times: Sequence[Mapping]
    frontier: str
    chip: Chip
    chips: int
    dtype: str
    models: Mapping[str, Mapping[str, Section]]
    effects: Mapping[str, float]
    levels: Mapping[str, Mapping]
    scaling: Sequence[tuple[int, float]]
    command: str
    launcher: str


def render(page: Page) -> str:
    """Returns the page as HTML that needs no network."""
    contents = {
        "page": page,
        "roofline": search_figures.roofline(page.chip, page.dtype, page.models),
        "times": search_figures.times(page.times, page.recommended),
        "sensitivity": search_figures.sensitivity(page.effects, page.levels),
        "scaling": search_figures.scaling(page.scaling, page.chips),
    }
    return templates.html("search.html.jinja", contents)
