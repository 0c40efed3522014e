"""Steps whose loss leaps above the last ones': their update is not made; after several in a row the
state goes back to a checkpoint from before them.

For a batch that is bad, the rule of OLMo-core's optimizers: no update beyond some standard
deviations of the last 128 steps.  For parameters that have become so, that of PaLM (arXiv
2204.02311, section 5.1): a checkpoint from before the spike, and other batches.  The number of the
step, with its batch and learning rate, goes on in both.

What decides is the loss as the step tells it, which all devices and processes have alike, and the
losses kept here, which a checkpoint holds: so all decide the same, and a resumed run as it would
have.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparse_dataflow.files.errors import UserError

WINDOW = 128
"""Losses of the last steps that counted, whose mean and deviation bound the next."""

LEAST = 8
"""Losses below which no bound is known; until then only what is not finite is skipped."""

PATIENCE = 4
"""Steps skipped in a row after which it is not the batches that are bad."""

ROLLBACKS = 3
"""Times that the state goes back without one good step in between, before the run ends."""


@dataclasses.dataclass(frozen=True)
class Spikes:
    """What the steps have shown so far.

    Attributes:
      losses: of the last WINDOW steps that were not skipped.
      skipped: steps skipped in a row, up to now.
      rollbacks: times that the state went back since the last good step.
    """

    losses: tuple[float, ...] = ()
    skipped: int = 0
    rollbacks: int = 0

    def limit(self, sigmas: float) -> np.float32:
        """The highest loss that counts: mean + sigmas x standard deviation; infinite at first."""
        if len(self.losses) < LEAST:
            return np.float32(math.inf)
        return np.float32(np.mean(self.losses) + sigmas * np.std(self.losses))

    def good(self, loss: float) -> "Spikes":
        """After a step that counted."""
        return Spikes((*self.losses, loss)[-WINDOW:])

    def bad(self) -> "Spikes":
        """After one that was skipped."""
        return dataclasses.replace(self, skipped=self.skipped + 1)

    def rolled_back(self) -> "Spikes":
        """After the state went back."""
        return dataclasses.replace(self, skipped=0, rollbacks=self.rollbacks + 1)

    @property
    def hopeless(self) -> bool:
        """Whether the state must go back."""
        return self.skipped >= PATIENCE

    def target(self, whole: Sequence[int], step: int, every: int) -> int | None:
        """The step of the checkpoint to go back to after `step` steps; None where there is none.

        Only those count that an undisturbed run makes, every `every` steps, and that are older than
        the first step skipped; the newest at first, then one more before it each time.
        """
        before = step - self.skipped
        found = sorted(s for s in whole if s <= before and s % every == 0)
        return found[max(0, len(found) - 1 - self.rollbacks)] if found else None

    def to_json(self) -> dict[str, Any]:
        """JSON-able; `from_json` is its inverse, to the bit."""
        return {**dataclasses.asdict(self), "losses": list(self.losses)}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any] | None) -> "Spikes":
        """Of `to_json`; the first where nothing was saved."""
        if saved is None:
            return cls()
        losses = tuple(float(loss) for loss in saved["losses"])[-WINDOW:]
        return cls(losses, int(saved["skipped"]), int(saved["rollbacks"]))


def counts(loss: float, norms: Mapping[str, float], limit: np.float32) -> bool:
    """Whether a step counts: what the step's program decides too, of the same float32 numbers."""
    return all(map(math.isfinite, (loss, *norms.values()))) and loss <= float(limit)


def refuse_hopeless(name: str, step: int, spikes: Spikes) -> None:
    """Ends a training that going back does not help.

    Raises:
      UserError: ROLLBACKS were made without a good step after any.
    """
    if spikes.rollbacks >= ROLLBACKS:
        raise UserError(
            f"{name}: the loss of step {step} leaps again, after going back {ROLLBACKS} times; "
            "start a new run with a lower --learning_rate."
        )
