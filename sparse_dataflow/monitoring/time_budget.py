"""A training that ends at its seconds, however fast the machine turns out to be."""

from sparse_dataflow.core import collectives
from sparse_dataflow.core.training.loop import Hook, StepDone, Trainer

REVISED_AT = (*(number / 20 for number in range(1, 20)), 0.98)
"""Fractions of a training after which it gets the steps that its seconds allow."""

SAME_LENGTH = 0.01
"""Change of the number of steps that is too small to be made: the plan was right."""


class TimeBudget(Hook):
    """Gives a training as many steps as fit into its seconds, by the steps that it has done.

    The plan before the first step measured a few steps.  A machine that gets busy, or was, would
    give models that are compared different times.
    """

    def __init__(self, seconds: float):
        """Args:
        seconds: of training, as `Trainer.seconds` counts them.
        """
        self._budget = seconds
        self._since = (0, 0.0)
        self._done = 0

    def after_step(self, trainer: Trainer, step: StepDone) -> None:
        """See `Hook`; may revise the number of steps."""
        if trainer.finished or self._done == len(REVISED_AT):
            return
        if not self._since[0]:  # The first step of a process is no measure of the others.
            self._done = sum(trainer.progress > share for share in REVISED_AT)
            self._since = trainer.step, trainer.seconds
            return
        first, seconds = self._since
        if trainer.progress < REVISED_AT[self._done] or trainer.step == first:
            return
        # One step of a short training may pass several of the marks.
        self._done = sum(trainer.progress >= share for share in REVISED_AT)
        self._since = trainer.step, trainer.seconds

        def possible():
            mean = (trainer.seconds - seconds) / (trainer.step - first)
            return trainer.step + max(0, round((self._budget - trainer.seconds) / mean))

        # Process 0 decides: clocks differ, and all processes must train the same number of steps.
        total, before = collectives.on_first(possible), trainer.length.total
        if abs(total - before) > SAME_LENGTH * before:
            trainer.revise(total)
