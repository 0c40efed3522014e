"""What pruning a model gives."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PrunedModel:
    """A pruned model, and how well each of its projections gives the dense outputs.

    Attributes:
      model: of the type that was pruned; the path of the new folder if it was written to one.
      masks: path of each pruned weight -> bool, True where a weight stays; of the shape of its
        kernel, or [layers, in, out] for a projection of a language model.  Empty for "narrow", and
        for a folder, which has them.
      errors: path of each pruned weight -> squared error of its outputs on held-out tokens,
        relative to the squared outputs.
    """

    model: Any
    masks: Mapping[str, np.ndarray]
    errors: Mapping[str, float]

    def __repr__(self):
        errors = sorted(self.errors.values()) or [0.0]
        stay = sum(int(mask.sum()) for mask in self.masks.values())
        total = sum(mask.size for mask in self.masks.values())
        share = f", {stay / total:.1%} of their weights" if total else ""
        return (
            f"PrunedModel({type(self.model).__name__}: {len(self.errors)} projections{share}, "
            f"held-out errors {errors[0]:.2%} to {errors[-1]:.2%})"
        )
