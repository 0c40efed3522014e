"""Layouts of a model while its training goes on, read from checkpoints."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparse_dataflow.core.checkpoint import named_arrays
from sparse_dataflow.core.layouts import model_layouts
from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.training.phases import Variant, phase_before
from sparse_dataflow.core.training.saved_state import SavedProgress

Layouts = Mapping[str, Sequence[BlockLayout]]
"""Projection -> layout of each layer; a projection that stores every block has none."""


@dataclass(frozen=True)
class SavedLayouts:
    """Layouts of a model at two times of its training.

    Attributes:
      step: steps done when the newest checkpoint was saved; 0 where there is none.
      layouts: at that step.
      first_step: steps done at the earliest time whose layouts are known.
      first_layouts: at that step.
    """

    step: int
    layouts: Layouts
    first_step: int
    first_layouts: Layouts


class LayoutReader:
    """Reads the layouts of one variant again and again, each checkpoint once."""

    def __init__(self, folder: Path, variant: Variant):
        """Reads nothing yet.

        Args:
          folder: of the variant in the run folder.
          variant: with its planned steps.
        """
        self._folder, self._variant = folder / "checkpoints", variant
        # Two: the newest checkpoint and the first one. Bound to this reader, so that its layouts
        # end with it.
        self._read = functools.lru_cache(maxsize=2)(self._layouts_at)
        self._first: tuple[int, Layouts] | None = None

    def read(self) -> SavedLayouts | None:
        """Returns the layouts so far; None where only a checkpoint will have them.

        Raises:
          UserError: a checkpoint is damaged, or was deleted meanwhile.
        """
        evolution = self._variant.evolution
        if self._first is None and not evolution.given_layouts:
            self._first = 0, model_layouts.layouts(self._variant.phases[0].model)
        steps = named_arrays.saved_steps(self._folder)
        if self._first is None and steps:
            self._first = steps[0], self._read(steps[0])
        if self._first is None:
            return None
        if not steps or evolution.method == "static":
            return SavedLayouts(*self._first, *self._first)
        return SavedLayouts(steps[-1], self._read(steps[-1]), *self._first)

    def _layouts_at(self, step):
        planned = self._variant.phases
        models = []

        def shapes(extra):
            phases = SavedProgress.from_extra(extra, planned).phases
            models.append(phases[phase_before(phases, step)].model)
            return {"tables": stacks.layouts_by_name(stacks.stored_layouts(models[0]))}

        (layouts,) = named_arrays.read_part(self._folder, step, shapes).values()
        return stacks.layouts_of(models[0], stacks.layout_tree(models[0], layouts))
