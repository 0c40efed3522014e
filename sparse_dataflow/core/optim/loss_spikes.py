"""Loss spikes: a step whose loss is far above the recent ones is skipped; after several skipped
steps in a row the parameters roll back to a checkpoint from before the spike.

Skipping one bad batch follows OLMo-core's optimizers: no update if the loss is more than some
standard deviations above the mean of the last 128 losses.  Rolling back follows PaLM (arXiv
2204.02311, section 5.1): restart from a checkpoint before the spike and go on with other batches.
In both cases the step number, and with it the batch and the learning rate, keeps advancing.

A change of the model or of its layouts begins a new history: the losses before say nothing of it.

The decision depends only on the step's loss, which is equal on all devices and processes, and on
the losses stored here, which checkpoints save.  So all processes decide alike, and a resumed run
decides as an undisturbed one.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.json_files import JsonObject

WINDOW = 128
"""Number of recent accepted losses whose mean and standard deviation bound the next loss."""

MIN_LOSSES = 8
"""Accepted losses needed for a finite limit; with fewer, only non-finite losses are skipped."""

MAX_SKIPPED = 4
"""Steps skipped in a row after which the parameters roll back."""

MAX_ROLLBACKS = 3
"""Rollbacks without an accepted step in between after which the run ends."""


@dataclasses.dataclass(frozen=True)
class SpikeHistory:
    """The recent losses, skipped steps and rollbacks of a training.

    Attributes:
      losses: losses of the last WINDOW accepted steps.
      skipped: number of steps skipped in a row, up to now.
      rollbacks: number of rollbacks since the last accepted step.
    """

    losses: tuple[float, ...] = ()
    skipped: int = 0
    rollbacks: int = 0

    def loss_limit(self, sigmas: float) -> np.float32:
        """Returns the highest accepted loss: mean + sigmas x standard deviation of `losses`.

        Infinite while there are fewer than MIN_LOSSES losses.
        """
        if len(self.losses) < MIN_LOSSES:
            return np.float32(math.inf)
        return np.float32(np.mean(self.losses) + sigmas * np.std(self.losses))

    def with_accepted(self, loss: float) -> "SpikeHistory":
        """Returns the history after an accepted step."""
        return SpikeHistory((*self.losses, loss)[-WINDOW:])

    def with_skipped(self) -> "SpikeHistory":
        """Returns the history after a skipped step."""
        return dataclasses.replace(self, skipped=self.skipped + 1)

    def with_rollback(self) -> "SpikeHistory":
        """Returns the history after a rollback."""
        return dataclasses.replace(self, skipped=0, rollbacks=self.rollbacks + 1)

    @property
    def needs_rollback(self) -> bool:
        """Whether the parameters must roll back now."""
        return self.skipped >= MAX_SKIPPED

    def rollback_step(self, saved_steps: Sequence[int], step: int) -> int | None:
        """Returns the step of the checkpoint to roll back to.

        Only checkpoints older than the first skipped step are candidates.  The first rollback takes
        the newest candidate, each further one the candidate before it.

        Args:
          saved_steps: steps of the regular checkpoints: a run without a stop has those too.
          step: number of steps done.

        Returns:
          The step, or None if there is no candidate.
        """
        # Steps that were done before the first skipped one.
        before = step - self.skipped
        candidates = sorted(s for s in saved_steps if s <= before)
        return candidates[max(0, len(candidates) - 1 - self.rollbacks)] if candidates else None

    def to_json(self) -> JsonObject:
        """Returns the fields as JSON-able values; `from_json` is the exact inverse."""
        return {**dataclasses.asdict(self), "losses": list(self.losses)}

    @classmethod
    def from_json(cls, saved: JsonObject | None) -> "SpikeHistory":
        """Returns the history that `to_json` gave; an empty one for None."""
        if saved is None:
            return cls()
        losses = tuple(float(loss) for loss in saved["losses"])[-WINDOW:]
        return cls(losses, int(saved["skipped"]), int(saved["rollbacks"]))


def is_accepted(loss: float, norms: Mapping[str, float], limit: np.float32) -> bool:
    """Whether a step's update is applied.

    The compiled step decides the same from the same float32 numbers.
    """
    return all(map(math.isfinite, (loss, *norms.values()))) and loss <= float(limit)


def refuse_more_rollbacks(name: str, step: int, history: SpikeHistory) -> None:
    """Ends a training whose loss spikes again after every rollback.

    Raises:
      UserError: MAX_ROLLBACKS rollbacks were made without an accepted step.
    """
    if history.rollbacks >= MAX_ROLLBACKS:
        raise UserError(
            f"{name}: the loss spikes again at step {step}, after {MAX_ROLLBACKS} rollbacks. "
            "Start a new run with a lower --learning_rate."
        )
