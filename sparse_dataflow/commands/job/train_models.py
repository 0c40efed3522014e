"""Trains the models of a run in turns, to the last step or to a signal."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from sparse_dataflow.cluster import processes
from sparse_dataflow.cluster.signals import stop_on_signals
from sparse_dataflow.core import collectives
from sparse_dataflow.core.checkpoint.checkpoint import Checkpoints
from sparse_dataflow.core.executors.executor import Executor
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.optim.optimizers import TrainState
from sparse_dataflow.core.training import cost, hooks
from sparse_dataflow.core.training.clock import Clock
from sparse_dataflow.core.training.loop import StepDone, Trainer, advance_side_by_side
from sparse_dataflow.core.training.phases import FULL_DEPTH, Variant
from sparse_dataflow.core.training.programs import Compiled, TrainingData
from sparse_dataflow.core.training.saved_state import FrozenBase
from sparse_dataflow.core.training.transitions import Change
from sparse_dataflow.files import loopback
from sparse_dataflow.files.addresses import Address
from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.monitoring import goodput, trackers
from sparse_dataflow.monitoring.goodput import GoodputLog, stall_alerts
from sparse_dataflow.monitoring.metrics import MetricsWriter
from sparse_dataflow.monitoring.time_budget import TimeBudget
from sparse_dataflow.monitoring.time_left import Progress, Show, TimeLeft
from sparse_dataflow.monitoring.user_metrics import UserMetrics
from sparse_dataflow.runs.mirror import copied_to

if TYPE_CHECKING:
    from sparse_dataflow.runs.run_config import RunConfig

EVALUATIONS_A_RUN = 8

COMPILE_SHARE = 1.4
"""Seconds in which the report compiles sections and generation, over those of the training step."""

SECTION_STEPS = 6
"""Executions of each section, which make about one step together."""


@dataclasses.dataclass(frozen=True)
class ModelInTurn:
    """One of the models that train in turns.

    Attributes:
      variant: the model and how it is trained.
      programs: compiled, one per phase.
      change: makes the state of a phase that of the next one.
      start: makes the state before the first step; None where it is drawn.
      base: weights that adapters freeze; None without adapters.
    """

    variant: Variant
    programs: list[Compiled]
    change: Change
    start: Callable[[], TrainState] | None = None
    base: FrozenBase | None = None

    @property
    def name(self) -> str:
        """The name of the model, such as "sparse"."""
        return self.variant.name


@dataclasses.dataclass(frozen=True)
class Place:
    """Where and on what a run trains.

    Attributes:
      folder: the run folder.
      check_folder: raises UserError if the folder was deleted or moved.
      mirror: of the checkpoints; None for none.
      chip: whose peak counts for the utilisation.
      executor: runs the programs.
      clock: counts the seconds since the start.
      run_id: of the run, for trackers.
      own: writes that the folder is that of the run; called once all models are restored.
    """

    folder: Path
    check_folder: Callable[[], None]
    mirror: Path | Address | None
    chip: Chip
    executor: Executor
    clock: Clock
    run_id: str
    own: Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Trained:
    """Models after their last step, or after a signal.

    Attributes:
      trainers: one per model, closed.
      goodput_log: of this attempt; ended where the run was stopped.
      stopped: the exit status of a run that a signal ended; None for a finished one.
    """

    trainers: list[Trainer]
    goodput_log: GoodputLog
    stopped: int | None


def train_models(
    config: "RunConfig",
    models: Sequence[ModelInTurn],
    data: TrainingData,
    place: Place,
    metrics: Mapping[str, Callable[[StepDone], float]],
    resume: bool,
) -> Trained:
    """Advances all models to their last step, and evaluates them then.

    Args:
      config: its part `run` says what is saved, evaluated and shown.
      models: at least one.
      data: training and held-out batches.
      place: folder, chip and executor.
      metrics: see `train.train`.
      resume: whether the folder has a run, which goes on.

    Raises:
      UserError: a model diverges, or the folder cannot be written.
    """
    goodput_log = GoodputLog(place.folder, place.clock)
    with contextlib.ExitStack() as stack:
        progress = _progress_of(place.clock, models)
        stack.callback(progress.close)
        trainers = []
        for model in models:
            trainer = _trainer(config, model, data, place, progress, metrics)
            stack.push(functools.partial(_close, trainer))
            trainers.append(trainer)
        place.own()  # Nothing is refused any more.
        for model, trainer in zip(models, trainers, strict=True):
            if config.run.init_from and not trainer.step:
                row = trainer.evaluate()
                loss, bits = row["loss"], row["bits_per_byte"]
                say(
                    f"{model.name:>6}: held-out loss before the first step {loss:.4f} nats, "
                    f"{bits:.4f} bits per byte"
                )
            if resume:
                steps = model.variant.training.steps
                say(f"{model.name:>6}: resumes after step {trainer.step} of {steps}")
        progress.time_left.begin()
        with stop_on_signals(say, config.run.grace) as stop:
            _advance(config, trainers, stop, goodput_log, place)
        # Also where a signal came after the last step.
        stopped = collectives.any_process(bool(stop()))
        finished = all(trainer.finished for trainer in trainers) and not stopped
        if finished:
            for trainer in trainers:
                progress.stage(f"evaluating {trainer.name} on held-out text")
                trainer.evaluate_finally()
                progress.time_left.evaluated(trainer.name)
            progress.stage("writing the report")
    goodput_log.write(ended=not finished)
    return Trained(trainers, goodput_log, None if finished else processes.stopped_status(stop()))


def _progress_of(clock: Clock, models: Sequence[ModelInTurn]) -> Progress:
    """Returns the progress of a run whose models train in turns."""
    compiled = {model.name: model.programs[-1].seconds for model in models}

    def report(name: str, step: float) -> float:
        return COMPILE_SHARE * compiled[name] + SECTION_STEPS * step

    return Progress(TimeLeft(clock.seconds_by_activity, report))


def _trainer(
    config: "RunConfig",
    model: ModelInTurn,
    data: TrainingData,
    place: Place,
    progress: Progress,
    metrics: Mapping[str, Callable[[StepDone], float]],
) -> Trainer:
    v, executor = model.variant, place.executor
    eval_every = config.run.eval_every or max(1, v.training.steps // EVALUATIONS_A_RUN)

    def mfu(trainer, speed):
        dtype = trainer.model.compute_dtype
        return cost.mfu(trainer.token_flops, speed, place.chip, dtype, devices=executor.devices)

    every = eval_every, config.run.checkpoint_every or 2 * eval_every
    names = trackers.tracker_names(config.run.trackers)
    mirror = place.mirror / v.name / "checkpoints" if place.mirror else None
    return Trainer(
        v,
        place.folder / v.name,
        data,
        model.programs,
        hooks.usual(
            *every,
            v.training.skip_spikes,
            record=hooks.Record(mfu, progress.note, UserMetrics(metrics)),
            budget=_budget(config, v, executor),
            change=model.change,
            last=[Show(progress, *every)],
        ),
        executor=executor,
        start=model.start,
        base=model.base,
        clock=place.clock,
        checkpoints=functools.partial(Checkpoints, mirror=copied_to(mirror) if mirror else None),
        metrics=functools.partial(
            MetricsWriter, tracker_names=names, config=config.to_json(), run_id=place.run_id
        ),
    )


def _budget(config: "RunConfig", v: Variant, executor: Executor) -> hooks.Hook | None:
    """Returns what keeps a model to its minutes; None where its number of steps is given, or
    decides more than the learning rate: when layouts, layers or the model change, or a rate
    falls."""
    moves = v.evolution.method != "static" or v.training.schedule == "wsd"
    if config.training.steps or moves or executor.depth != FULL_DEPTH:
        return None
    return TimeBudget(60 * config.run.minutes)


def _advance(
    config: "RunConfig",
    trainers: list[Trainer],
    stop: Callable[[], object],
    goodput_log: GoodputLog,
    place: Place,
) -> None:
    """Trains all to the end, or until `stop()`; saves."""
    goodput_log.write()

    def alert(text):
        for trainer in trainers:
            trainer.alert("stall", text)

    def trace_on_request(path, query):
        if path != "/trace":
            return None
        try:
            seconds = float(query.get("seconds", "5"))
        except ValueError:
            seconds = 0.0
        return "text/plain", goodput.trace_now(place.folder, seconds) + "\n"

    settings = config.run
    profile = goodput.StepProfile(place.folder, settings.profiled_steps)
    with contextlib.ExitStack() as stack:
        stack.callback(profile.close)
        stack.enter_context(stall_alerts(place.clock, alert, settings.stall_alert))
        if settings.profile_server and collectives.is_first():
            served = loopback.served(settings.profile_server, {"POST": trace_on_request})
            stack.enter_context(served)
        profile.update(trainers[0].step)
        for _ in advance_side_by_side(trainers, lambda: bool(stop())):
            profile.update(trainers[0].step)
            place.check_folder()
            goodput_log.write(throttle=True)


def _close(trainer, kind, error, trace) -> None:
    """Closes a trainer; where an error came in one of several processes, the others are told of it
    instead of being waited for."""
    if kind is None or jax.process_count() == 1:
        trainer.close()
