"""How many layers a step of the relay trains."""

import dataclasses

import numpy as np

from sparse_dataflow.files.errors import UserError

GROWN_AT = 0.5
"""Fraction of the steps after which a growing network has all blocks."""


@dataclasses.dataclass(frozen=True)
class DepthSchedule:
    """Schedule of the depth.

    Attributes:
      kind: "constant"; "drop": every block is left out of a step with probability `value`
        (LayerDrop, arXiv 1909.11556, section 3.2); "grow": training starts with the first `value`
        of the blocks, the others join one by one until GROWN_AT of the steps.
      value: a fraction in (0, 1); 0 if the kind is "constant".
    """

    kind: str = "constant"
    value: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "DepthSchedule":
        """Parses "constant", "drop:0.1" or "grow:0.25".

        Raises:
          UserError: an unknown schedule; names the legal ones.
        """
        kind, _, number = text.partition(":")
        try:
            value = float(number) if kind != "constant" else 0.0
        except ValueError:
            value = -1.0
        valid = kind in ("drop", "grow") and 0 < value < 1
        if not valid and text != "constant":
            raise UserError(
                f"--set parallel.depth_schedule={text} is unknown; legal: constant, drop:P (each "
                "block is left out of a step with probability P) or grow:F (training starts with "
                "the first F of the blocks), P and F above 0 and below 1."
            )
        return cls(kind, value)

    def starting_blocks(self, num_layers: int) -> int:
        """Returns the number of blocks in the first step; they are the first of the model."""
        if self.kind != "grow":
            return num_layers
        return max(1, round(self.value * num_layers))

    def active(self, num_layers: int, step: int, steps: int, seed: int) -> tuple[int, ...]:
        """Returns the blocks of step `step` (from 0) of `steps`, ascending, at least one.

        Depends on the arguments alone, so that a resumed run uses the same blocks.
        """
        if self.kind == "drop":
            # From the seed and the step: a resumed run drops the same blocks.
            draws = np.random.default_rng([seed, step]).random(num_layers)
            blocks = np.flatnonzero(draws >= self.value)
            return tuple(map(int, blocks)) or (int(np.argmax(draws)),)
        return tuple(range(int(self._grown(num_layers, np.asarray(step), steps))))

    def mean_share(self, num_layers: int, start: int, stop: int, steps: int) -> float:
        """Returns the mean share of the blocks in the steps from `start` to `stop` of `steps`.

        It is the expected share where the blocks are drawn.
        """
        if self.kind == "drop":  # Where all blocks are dropped, one of them stays.
            return 1 - self.value + self.value**num_layers / num_layers
        if self.kind == "constant" or stop <= start:
            return 1.0
        blocks = self._grown(num_layers, np.arange(start, stop), steps)
        return float(np.mean(blocks)) / num_layers

    def _grown(self, num_layers, step, steps):
        """Returns int [...], the number of blocks in each step of a schedule that draws none."""
        start = self.starting_blocks(num_layers)
        grown = np.minimum(1.0, step / max(1, GROWN_AT * steps))
        return start + ((num_layers - start) * grown).astype(int)
