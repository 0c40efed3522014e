"""Seconds until a run ends: steps, evaluations and checkpoints of all models, and the report.

What has been measured in this run counts; before that a part is estimated from the steps.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping

_RECENT = 50
_FIRST_STEPS = 2
"""Steps of each phase that are slow, as memory is touched for the first time."""

FORWARD_SHARE = 0.4
"""Seconds of a held-out sequence over those of a training sequence, until one is measured."""

SPEED_PER_FLOP = 0.6
"""Power of the FLOPs to which the seconds of a step are proportional, until a phase is measured.
Sparse steps gain less time than FLOPs."""


@dataclasses.dataclass(frozen=True)
class Remaining:
    """What a model still has to do after a step.

    Attributes:
      phase: number of its current phase.
      steps: steps left in this phase.
      later: (steps, FLOPs of a step over those of the current phase) of each later phase.
      evaluations: periodic evaluations left.
      saves: checkpoints left.
      evaluation_batches: batches of a periodic evaluation.
      final_batches: batches of the evaluation after the last step; 0 once it is done.
    """

    phase: int
    steps: int
    later: tuple[tuple[int, float], ...] = ()
    evaluations: int = 0
    saves: int = 0
    evaluation_batches: int = 0
    final_batches: int = 0


class _Model:
    """What was measured of one model."""

    def __init__(self):
        self.remaining: Remaining | None = None
        self.phase, self.steps_seen = -1, 0
        self.steps: deque[float] = deque(maxlen=_RECENT)
        self.evaluations: list[float] = []
        self.saves: list[float] = []

    @property
    def step(self) -> float:
        """Mean seconds of a step; the mean, as slow steps take time too."""
        return sum(self.steps) / max(1, len(self.steps))

    def record(self, seconds: Mapping[str, float], remaining: Remaining) -> None:
        evaluation, save = seconds.get("evaluation", 0.0), seconds.get("checkpoint", 0.0)
        if remaining.phase != self.phase:
            self.phase, self.steps_seen = remaining.phase, 0
        if self.steps_seen in (0, _FIRST_STEPS):
            self.steps.clear()
        self.steps_seen += 1
        self.steps.append(sum(seconds.values()) - evaluation - save)
        if evaluation:
            self.evaluations.append(evaluation)
        if save:
            self.saves.append(save)
        self.remaining = remaining

    def seconds_left(self) -> float:
        left = self.remaining
        if left is None:
            return 0.0
        later = sum(steps * flops**SPEED_PER_FLOP for steps, flops in left.later)
        evaluation = _mean(self.evaluations[-3:])
        if evaluation is None:
            evaluation = FORWARD_SHARE * self.step * left.evaluation_batches
        final = evaluation * left.final_batches / max(1, left.evaluation_batches)
        saves = left.saves * (_mean(self.saves[-3:]) or 0.0)
        return (left.steps + later) * self.step + left.evaluations * evaluation + final + saves


def _mean(values):
    return sum(values) / len(values) if values else None


class TimeLeft:
    """Seconds until the end of a run whose models take turns.

    Args:
      seconds_by_activity: () -> {activity: seconds} of this process so far; see `Clock`.
      report: (model's name, its seconds a step) -> estimated seconds of its part of the report.
    """

    def __init__(
        self,
        seconds_by_activity: Callable[[], Mapping[str, float]],
        report: Callable[[str, float], float] = lambda name, step: 0.0,
    ):
        self._seconds, self._report = seconds_by_activity, report
        self._models: dict[str, _Model] = {}
        self._before: dict[str, float] = {}

    def begin(self) -> None:
        """Is called right before the first step of this process."""
        self._before = dict(self._seconds())

    def after_step(self, name: str, remaining: Remaining) -> None:
        """Attributes the time since the last call to a model, which has done one step in it."""
        now = dict(self._seconds())
        spent = {a: s - self._before.get(a, 0.0) for a, s in now.items()}
        self._before = now
        self._models.setdefault(name, _Model()).record(spent, remaining)

    def evaluated(self, name: str) -> None:
        """Is called after the evaluation that follows a model's last step, which an earlier process
        may have done."""
        model = self._models.get(name)
        if model is not None and model.remaining is not None:
            model.remaining = dataclasses.replace(model.remaining, final_batches=0)

    def seconds(self) -> float:
        """Returns the seconds left, the report included."""
        report = sum(self._report(name, model.step) for name, model in self._models.items())
        return report + sum(model.seconds_left() for model in self._models.values())
