"""Progress of a run, and the seconds until it ends: steps, evaluations, checkpoints, the report.

What has been measured in this run counts; before that a part is estimated from the steps.
"""

import dataclasses
import itertools
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping

from tqdm import tqdm

from sparse_dataflow.core import collectives
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.training import cost
from sparse_dataflow.core.training.loop import Hook, StepDone, Trainer
from sparse_dataflow.files import output
from sparse_dataflow.monitoring import presentation

_FIRST_STEPS = 2
"""Steps of each phase that are slow, as memory is touched for the first time."""

_LEAST_SECONDS = 60.0
"""Least length of the time from which the current speed is taken."""

_MOST_STEPS = 5000
"""Most steps of that time."""

_BESIDE = 5
"""Newest steps of a model with which the seconds of its evaluation are compared."""

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


class _Steps:
    """Seconds of the steps of a model in one phase."""

    def __init__(self):
        self.count, self.total, self.seen = 0, 0.0, 0
        self.newest: deque[float] = deque(maxlen=_BESIDE)

    @property
    def mean(self) -> float:
        """Mean seconds of a step; the mean, as slow steps take time too."""
        return self.total / max(1, self.count)

    def record(self, seconds: float) -> None:
        # The slow first steps count only until there are others.
        if self.seen in (0, _FIRST_STEPS):
            self.count, self.total = 0, 0.0
            self.newest.clear()
        self.seen += 1
        self.count, self.total = self.count + 1, self.total + seconds
        self.newest.append(seconds)


class _Model:
    """What was measured of one model."""

    def __init__(self):
        self.remaining: Remaining | None = None
        self.phase, self.steps = -1, _Steps()
        self.evaluations: list[float] = []  # In steps of their time.
        self.saves: list[float] = []

    def record(self, seconds: Mapping[str, float], remaining: Remaining) -> float:
        """Returns the seconds of the step alone."""
        evaluation, save = seconds.get("evaluation", 0.0), seconds.get("checkpoint", 0.0)
        if remaining.phase != self.phase:
            self.phase, self.steps = remaining.phase, _Steps()
        step = sum(seconds.values()) - evaluation - save
        self.steps.record(step)
        if evaluation:
            # In steps, so that the speed of the machine counts here as well.
            self.evaluations.append(evaluation / max(1e-9, _mean(self.steps.newest)))
        if save:
            self.saves.append(save)
        self.remaining = remaining
        return step

    def seconds_left(self, slowdown: float) -> float:
        """Returns the seconds of what remains.

        Args:
          slowdown: seconds of a step now over those of the mean step so far.
        """
        left = self.remaining
        if left is None:
            return 0.0
        later = sum(steps * flops**SPEED_PER_FLOP for steps, flops in left.later)
        evaluation = _mean(self.evaluations)
        if evaluation is None:
            evaluation = FORWARD_SHARE * left.evaluation_batches
        # The time of an evaluation is proportional to its batches.
        final = evaluation * left.final_batches / max(1, left.evaluation_batches)
        steps = left.steps + later + left.evaluations * evaluation + final
        return steps * self.steps.mean * slowdown + left.saves * (_mean(self.saves[-3:]) or 0.0)


def _mean(values):
    return sum(values) / len(values) if values else None


class TimeLeft:
    """Seconds until the end of a run whose models take turns.

    A busy machine slows all models alike.  So the speed of the coming time is that of the last
    steps of all models, over a time as long as the one that is left.

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
        self._recent: deque[tuple[float, _Steps, float]] = deque(maxlen=_MOST_STEPS)
        self._left = 0.0

    def begin(self) -> None:
        """Is called right before the first step of this process."""
        self._before = dict(self._seconds())

    def after_step(self, name: str, remaining: Remaining) -> None:
        """Attributes the time since the last call to a model, which has done one step in it."""
        now = dict(self._seconds())
        spent = {a: s - self._before.get(a, 0.0) for a, s in now.items()}
        self._before = now
        model = self._models.setdefault(name, _Model())
        step = model.record(spent, remaining)
        # The slow first steps say nothing of the machine's speed.
        if model.steps.seen > _FIRST_STEPS:
            self._recent.append((sum(now.values()), model.steps, step))

    def evaluated(self, name: str) -> None:
        """Is called after the evaluation that follows a model's last step, which an earlier process
        may have done."""
        model = self._models.get(name)
        if model is not None and model.remaining is not None:
            model.remaining = dataclasses.replace(model.remaining, final_batches=0)

    def seconds(self) -> float:
        """Returns the seconds left, the report included."""
        slowdown = self._slowdown()
        models = self._models.items()
        report = sum(self._report(name, model.steps.mean * slowdown) for name, model in models)
        self._left = report + sum(model.seconds_left(slowdown) for _, model in models)
        return self._left

    def _slowdown(self) -> float:
        """Returns the seconds of the newest steps over those of as many mean steps."""
        if not self._recent:
            return 1.0
        # As far back as the time ahead: for an hour, the last minute is too short a sample.
        begin = self._recent[-1][0] - max(_LEAST_SECONDS, self._left)
        newest = list(itertools.takewhile(lambda step: step[0] > begin, reversed(self._recent)))
        expected = sum(steps.mean for _, steps, _ in newest)
        return sum(seconds for *_, seconds in newest) / max(1e-9, expected)


LINE_SECONDS = 15.0
"""Seconds between two lines of a log, and before the first."""

_REDRAW_SECONDS = 0.2
_SEPARATOR = " · "


class Progress:
    """The models of a run that train in turns, and the time left until the run ends.

    Args:
      time_left: estimates the rest of the run, the report included.
    """

    def __init__(self, time_left: TimeLeft):
        self.time_left = time_left
        self._start = self._last = time.monotonic()
        self._models: dict[str, tuple[int, int, str]] = {}
        self._bar: tqdm | None = None
        terminal = sys.stderr is not None and sys.stderr.isatty() and collectives.is_first()
        self._terminal = terminal and not output.is_quiet()

    def note(self, name: str, step: int, steps: int, row: Mapping[str, object]) -> None:
        """Takes the row of a model's newest step, which the next line shows."""
        self._models[name] = step, steps, presentation.line(row)

    def after_step(self, name: str, remaining: Remaining) -> None:
        """Takes over what a model has left after a step, and shows a line if it is time."""
        self.time_left.after_step(name, remaining)
        pause = _REDRAW_SECONDS if self._terminal else LINE_SECONDS
        ended = all(step >= steps for step, steps, _ in self._models.values())
        if time.monotonic() - self._last > pause or ended:
            self._show(self._line())

    def stage(self, activity: str) -> None:
        """Shows what happens after the last step, such as "writing the report"."""
        left = in_words(self.time_left.seconds())
        self._show(f"all steps are done{_SEPARATOR}{left} left{_SEPARATOR}{activity}")

    def close(self) -> None:
        """Ends the line on a terminal, which stays on the screen."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _head(self):
        left = self.time_left.seconds()
        done = time.monotonic() - self._start
        return f"{done / max(1e-9, done + left):3.0%}{_SEPARATOR}{in_words(left)} left"

    def _line(self):
        models = [
            f"{name} {step}/{steps} {text}" for name, (step, steps, text) in self._models.items()
        ]
        return _SEPARATOR.join([self._head(), *models])

    def _show(self, line):
        self._last = time.monotonic()
        if not self._terminal:
            say(line)
            return
        if self._bar is None:
            self._bar = tqdm(total=1, bar_format="{desc}", file=sys.stderr)
        width = shutil.get_terminal_size().columns - 1
        self._bar.set_description_str(line[:width])


class Show(Hook):
    """Shows the progress and the time left; the last hook, as it times the others."""

    def __init__(self, progress: Progress, eval_every: int, checkpoint_every: int):
        """Args:
        progress: of all models of the run.
        eval_every: steps between evaluations.
        checkpoint_every: steps between checkpoints.
        """
        self._progress, self._every = progress, (eval_every, checkpoint_every)

    def after_step(self, trainer: Trainer, step: StepDone) -> None:
        """See `Hook`."""
        self._progress.after_step(trainer.name, remaining(trainer, *self._every))


def remaining(trainer: Trainer, eval_every: int, checkpoint_every: int) -> Remaining:
    """Returns what a trainer still has to do."""
    step, steps, number = trainer.step, trainer.length.total, trainer.phase_number
    sequence = trainer.training.sequence

    def events(every):
        """Counts the multiples of `every` after this step, and the last step."""
        return 0 if step >= steps else steps // every - step // every + bool(steps % every)

    flops = [cost.flops_per_token(phase.model, sequence).total for phase in trainer.phases]
    later = [
        (phase.steps, flops[number + 1 + i] / flops[number])
        for i, phase in enumerate(trainer.phases[number + 1 :])
    ]
    periodic, final = trainer.evaluation_batches
    return Remaining(
        phase=number,
        steps=trainer.phase.stop - step,
        later=tuple(later),
        evaluations=events(eval_every),
        saves=events(checkpoint_every),
        evaluation_batches=periodic,
        final_batches=final,
    )


def in_words(seconds: float) -> str:
    """Returns a duration to about 5%, such as "45 s", "4 min 30 s", "12 min", "3 h 20 min"."""
    # The limits are where rounding would give 100 s and 10 min.
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 595:
        minutes, rest = divmod(10 * round(seconds / 10), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        hours, rest = divmod(10 * round(minutes / 10), 60)
        return f"{hours} h {rest} min" if rest else f"{hours} h"
    return f"{minutes / 60 / 24:.1f} days"
