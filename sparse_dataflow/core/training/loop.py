"""The training loop: steps, hooks, resuming from a checkpoint, and several models in turns."""

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import jax
import numpy as np

from sparse_dataflow.core import collectives
from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.checkpoint.checkpoint import Checkpoints
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.executors.executor import SINGLE_DEVICE, Executor
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.optim.by_weight import evaluated
from sparse_dataflow.core.optim.finite import non_finite
from sparse_dataflow.core.optim.loss_spikes import is_accepted
from sparse_dataflow.core.optim.optimizers import TrainState, at_step, learning_rate_schedule
from sparse_dataflow.core.step_metrics import StepReport
from sparse_dataflow.core.training import held_out
from sparse_dataflow.core.training.clock import Clock
from sparse_dataflow.core.training.length import Length
from sparse_dataflow.core.training.phases import (
    Phase,
    Variant,
    phase_before,
    phases_flops,
    refuse_unfit,
    token_flops,
    with_stop,
)
from sparse_dataflow.core.training.programs import Compiled, TrainingData, run_step
from sparse_dataflow.core.training.saved_state import (
    FrozenBase,
    SavedProgress,
    SavedState,
    abstract_saved_state,
    completed,
    identity,
    reading_extra,
    refuse_other_layouts,
)
from sparse_dataflow.core.training.step import initial_state
from sparse_dataflow.files import storage
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.json_files import JsonObject


class DivergedError(UserError):
    """A loss, a gradient or a parameter is not finite."""


@dataclass(frozen=True)
class StepDone:
    """One optimizer step, after it.

    Attributes:
      number: steps done, this one included.
      report: on the host.
      rate: learning rate.
      seconds: that it took.
      params: parameters after it, as the executor places them; the next step donates them.
      limit: highest loss that was accepted; None for no limit.
    """

    number: int
    report: StepReport
    rate: float
    seconds: float
    params: dict | None = None
    limit: np.float32 | None = None

    @functools.cached_property
    def numbers(self) -> dict[str, float]:
        """The number of each metric of the step."""
        return self.report.numbers()

    @property
    def loss(self) -> float:
        """The loss in nats per token."""
        return float(self.report.loss)

    @functools.cached_property
    def gradient_norms(self) -> dict[str, float]:
        """The norm of the gradient of each parameter group."""
        return self.report.gradient_norms

    @property
    def accepted(self) -> bool:
        """Whether the parameters changed."""
        return self.limit is None or is_accepted(self.loss, self.gradient_norms, self.limit)


class Metrics(Protocol):
    """Where a training writes; `monitoring.metrics.MetricsWriter` does so in files."""

    def write(self, row: dict) -> None:
        """Takes a row: {"kind", "step", ...numbers}."""

    def alert(self, kind: str, text: str, step: int) -> None:
        """Takes an alert; any thread may call."""

    def seconds_at(self, step: int, otherwise: float) -> float:
        """Returns the training seconds until `step` by earlier rows, or `otherwise`."""
        ...

    def close(self) -> None:
        """Is called once, at the end."""


class Hook:
    """Something that a training does; the methods here do nothing."""

    def before_step(self, trainer: "Trainer") -> None:
        """Is called when the batch of the next step is at hand; may change the trainer's state."""

    def model_changed(self, new_phase: bool) -> None:
        """Is called when another hook has changed the model or its layouts: what was measured
        before says nothing of the steps that follow.

        Args:
          new_phase: whether the model of the next phase begins.
        """

    def limit(self) -> np.float32 | None:
        """Returns the highest loss that the next step accepts; None for any."""
        return None

    def after_step(self, trainer: "Trainer", step: StepDone) -> None:
        """Is called after each step, also one that was not accepted."""

    def saves_at(self, step: int) -> bool:
        """Returns whether it saves after that step, besides the last one, in every run."""
        return False

    def saved(self) -> JsonObject:
        """Returns what a checkpoint must remember, as JSON values by name."""
        return {}

    def restore(self, extra: JsonObject) -> None:
        """Takes over the values of a checkpoint, which are not trusted.

        Raises:
          ValueError, TypeError or KeyError: they are none that `saved` returned.
        """

    def close(self) -> None:
        """Is called once, at the end of the process's part of the training."""


class Trainer:
    """Trains one model to its last step.

    `advance` does one step; what happens besides is in hooks.  The files are in one folder:
    `metrics.jsonl`, `tensorboard/`, `checkpoints/`.

    Attributes:
      name: of the model, such as "sparse".
      training: batch, steps and optimizer settings.
      evolution: how layouts or model change.
      executor: runs the programs.
      clock: records what this process is doing.
      phases: the models that are trained in turn; a hook may move their first steps.
      length: the number of steps; `revise` changes it.
      phase_number: index of the phase of the state.
      state: as placed by the executor, with canonical tables.
      step: number of steps done.
      seconds: training time so far.
      last_evaluation: newest row of `evaluate`; None before the first of this process.
    """

    def __init__(
        self,
        variant: Variant,
        folder: Path,
        data: TrainingData,
        programs: Sequence[Compiled],
        hooks: Sequence[Hook],
        *,
        executor: Executor = SINGLE_DEVICE,
        start: Callable[[], TrainState] | None = None,
        base: FrozenBase | None = None,
        clock: Clock | None = None,
        metrics: Callable[[Path, int], Metrics],
        checkpoints: Callable[..., Checkpoints] = Checkpoints,
    ):
        """Opens the folder and restores its newest verified checkpoint, if there is one.

        Args:
          variant: the model and how it is trained: the identity of its checkpoints.
          folder: created if missing.
          data: training and held-out batches.
          programs: from `compile_programs`, one per phase.
          hooks: what happens besides the steps, in this order; see `hooks.usual`.
          executor: the executor that the programs were compiled for.
          start: returns the state before the first step, which is saved at once.  If None, the
            state is drawn from the training seed.
          base: frozen weights, which a checkpoint names instead of storing them; None if all
            weights are trained.
          clock: see the attribute; a new one if None.
          metrics: (folder, step) -> where rows and alerts go.
          checkpoints: (folder, config=..., completed=..., is_regular=...) -> checkpoints.

        Raises:
          UserError: the folder cannot be written or has checkpoints of another config, or the
            evolution does not fit the model or the number of steps.
        """
        self.name, self.training, self.executor, self._base = (
            variant.name, variant.training, executor, base,
        )  # fmt: skip
        self.clock, self.evolution = clock or Clock(), variant.evolution
        refuse_unfit(variant.model, self.evolution, self.training.steps)
        self._data, self._programs, self._hooks = data, programs, hooks
        collectives.on_first(lambda: _make_folder(folder))
        saved_config = identity(variant.model, self.training, self.evolution, data.tokenizer_hash)
        self.checkpoints = checkpoints(
            folder / "checkpoints",
            config=saved_config,
            completed=completed,
            is_regular=lambda step: any(hook.saves_at(step) for hook in hooks),
        )
        restored, progress = self._restore(variant.phases)
        self.phases, self.seconds = progress.phases, progress.seconds
        self.length = progress.length or Length(self.training.steps)
        saved_step = None if restored is None else int(restored.step)

        def first_state():
            if restored is None:
                if start:
                    return start()
                return initial_state(self.phases[0].model, self.training, executor)
            phase = self.phases[phase_before(self.phases, int(restored.step))]
            state = restored.state(phase.model)
            refuse_other_layouts(state, phase)
            state = state._replace(rest=base.read()) if base else state
            return executor.place(state, phase.model)

        if programs[0].start_state is None:
            self.state = first_state()
        else:
            self.state = programs[0].start_state(
                self.name, self.training, saved_config, saved_step, first_state,
                from_seed=start is None, completed=completed,
            )  # fmt: skip
        self.step = int(self.state.step)
        self.phase_number = phase_before(self.phases, self.step)
        if progress.positions is not None:
            data.train.resume(progress.positions)
        self._batches = data.train.iterate(self.step)
        self._open_metrics = functools.partial(metrics, folder, self.step)
        self._saved_step = saved_step
        self.last_evaluation: dict | None = None
        if start is not None and restored is None:
            self.save()  # So that a resumed run does not need `start` again.

    @functools.cached_property
    def _metrics(self) -> Metrics:
        return self._open_metrics()

    def begin(self) -> None:
        """Opens the metrics, which drops the rows of later steps than the restored one.

        Until then a resumed training has changed no file, but for damaged checkpoints.
        """
        _ = self._metrics
        if self._saved_step is None:
            return
        if self.step != self._saved_step:
            self.seconds = self._metrics.seconds_at(self.step, self.seconds)
        self.alert("restart", f"resumed after step {self.step} of {self.length.total}")

    def _restore(self, planned):
        """Returns (state of the newest checkpoint or None, progress at that step), with the hooks
        as they were."""
        extra: JsonObject = {}

        def abstract_state(step, saved):
            nonlocal extra
            extra = saved
            phases = SavedProgress.from_extra(extra, planned).phases
            return abstract_saved_state(phases, self.training, step, self.executor)

        with self.clock.during("checkpoint"):
            restored = self.checkpoints.restore(abstract_state)
        if restored is None:
            return None, SavedProgress(0.0, planned)
        with reading_extra():
            for hook in self._hooks:
                hook.restore(extra)
        return restored[0], SavedProgress.from_extra(extra, planned)

    def model_changed(self, new_phase: bool) -> None:
        """Tells all hooks that one of them has changed the model or its layouts."""
        for hook in self._hooks:
            hook.model_changed(new_phase)

    @property
    def phase(self) -> Phase:
        """The phase of the state."""
        return self.phases[self.phase_number]

    @property
    def programs(self) -> Compiled:
        """The compiled programs of the phase."""
        return self._programs[self.phase_number]

    @property
    def model(self) -> ModelConfig:
        """The model of the current phase."""
        return self.phase.model

    @property
    def flops(self) -> float:
        """Model FLOPs of the whole training, with the phases as planned or changed so far, the
        blocks that take part and the forward passes of a teacher."""
        return self._flops(self._data.teacher)

    def _flops(self, teacher):
        depth = self.executor.depth
        return phases_flops(self.phases, self.evolution, self.training, teacher, depth)

    @property
    def token_flops(self) -> float:
        """Model FLOPs of a token of the last step."""
        layers, training = self.model.num_layers, self.training
        last = max(0, self.step - 1)
        active = self.executor.depth.active(layers, last, training.steps, training.seed)
        return token_flops(self.model, training, self._data.teacher, len(active) / layers)

    @property
    def teacher_flops(self) -> float:
        """The part of `flops` in the forward passes of a teacher; 0 without one."""
        return self.flops - self._flops(None)

    @property
    def finished(self) -> bool:
        """Whether the last step is done."""
        return self.step >= self.length.total

    @property
    def progress(self) -> float:
        """Fraction of the training that is done."""
        # Of the schedule, which a revised length stretches over other steps.
        return self.length.schedule_step(self.step) / self.training.steps

    def revise(self, total: int) -> None:
        """Gives the training another number of steps, at least those that are done; the rest of the
        learning rate's schedule is spread over them."""
        self.length = self.length.revised(self.step, total)
        self.phases = with_stop(self.phases, self.length.total)

    def alert(self, kind: str, text: str) -> None:
        """Hands an alert to the trackers; any thread may call."""
        self._metrics.alert(kind, text, self.step)

    def advance(self) -> None:
        """Does one optimizer step, and what the hooks do before and after it.

        Raises:
          DivergedError: a loss or gradient is not finite; names the step, the parameter groups and
            the last good checkpoint.
        """
        self.clock.step = f"step {self.step + 1} of {self.name}"
        with self.clock.during("data"):
            batch = self._put(next(self._batches))
        for hook in self._hooks:
            hook.before_step(self)
        limits = [limit for hook in self._hooks if (limit := hook.limit()) is not None]
        limit = min(limits, default=None)
        with self.clock.during("step"):
            start = time.perf_counter()
            # On the host: rate and share are arguments, so no schedule recompiles the step.
            at = self.length.schedule_step(self.step)
            rate, share = learning_rate_schedule(self.training)(at), self.training.teacher_share(at)
            self.state, report = run_step(self.programs, self.state, batch, rate, limit, share)
            # Waits for the step, so that its seconds are those of the device.
            report = jax.device_get(report)
            elapsed = time.perf_counter() - start
        self.clock.record_step(elapsed)
        self.step += 1
        self.seconds += elapsed
        done = StepDone(self.step, report, rate, elapsed, self.state.params, limit)
        if done.accepted:
            self._refuse_non_finite(done)
        for hook in self._hooks:
            hook.after_step(self, done)

    def write(self, kind: str, values: Mapping[str, object], step: int | None = None) -> JsonObject:
        """Writes a row of metrics, of this step if None; returns it."""
        counters = {"tokens": self.tokens, "seconds": self.seconds}
        row = {"kind": kind, "step": self.step if step is None else step, **counters, **values}
        self._metrics.write(row)
        return row

    def restore_parameters(self, step: int) -> None:
        """Takes parameters, moments and layouts from the checkpoint of an earlier step."""
        with self.clock.during("checkpoint"):
            state = abstract_saved_state(self.phases, self.training, step, self.executor)
            restored = self.checkpoints.restore(state, step)
        assert restored is not None
        placed = self.executor.place(restored[0].state(self.model), self.model)
        if self._base:
            placed = placed._replace(rest=self.state.rest)
        # The step stays, so the batches since that checkpoint are not trained on again.
        self.state = at_step(placed, self.state.step)

    def batch(self, step: int) -> Batch:
        """Returns the batch of a step (from 0) as put by the executor."""
        return self._put(self._data.train[step])

    @property
    def timeline(self) -> list:
        """Spans of the last step; empty if the executor records none."""
        return list(self.programs.timeline())

    def _put(self, batch):
        self.clock.progress += 1
        return self.executor.put(batch, self.training.batch)

    @property
    def tokens(self) -> int:
        """Number of training tokens seen."""
        return self.step * self.training.batch * self.training.sequence

    @property
    def evaluation_batches(self) -> tuple[int, int]:
        """Numbers of batches of a periodic evaluation, and of that after the last step."""
        corpora = self._data.mixture or (self._data,)
        return sum(len(c.validation) for c in corpora), sum(len(c.final) for c in corpora)

    def evaluate(self) -> dict:
        """Evaluates the periodic held-out windows; returns and writes a row "eval"."""
        self.last_evaluation = self._evaluate(
            "eval", lambda corpus: (corpus.validation, corpus.validation_bytes)
        )
        return self.last_evaluation

    def evaluate_finally(self) -> dict:
        """Evaluates all held-out windows; returns and writes a row "final"."""
        return self._evaluate("final", lambda corpus: (corpus.final, corpus.final_bytes))

    def _evaluate(self, kind, windows):
        """Writes the loss of the windows of `TrainingData` or of each `HeldOut`."""
        with self.clock.during("evaluation"):
            # Schedule-free learning evaluates other weights than it trains.
            params = evaluated(self.model, self.training, self.state.moments, self.state.params)
            state = self.state._replace(params=params)
            values = held_out.losses(
                self._data,
                windows,
                lambda batches: held_out.batch_sums(self.programs, state, map(self._put, batches)),
                self.training.hides_tokens,
            )
            return self.write(kind, values)

    def save(self) -> None:
        """Starts a checkpoint of the current step, unless there is one.

        Raises:
          DivergedError: a parameter or a moment is not finite.
          UserError: the folder cannot be written.
        """
        state = self.state
        if self._base:
            state = state._replace(rest=stacks.split_layouts(state.rest)[1])
        # Before the save: the checkpoints before it must not be removed for a broken one.
        if broken := non_finite(state):
            self._refuse(broken)
        last = self.last_evaluation
        # The evaluation of an earlier step says nothing of this state.
        metric = last["bits_per_byte"] if last and last["step"] == self.step else None
        extra: JsonObject = {
            "seconds": self.seconds,
            "data_position": self.step,
            "bits_per_byte": metric,
            "starts": [phase.start for phase in self.phases],
        }
        if self.length.revisions:
            extra["length"] = self.length.revisions
        for hook in self._hooks:
            extra |= hook.saved()
        if (positions := self._data.train.positions(self.step)) is not None:
            extra["data_positions"] = positions
        if self._base:
            extra["base"] = dict(self._base.source)
        with self.clock.during("checkpoint"):
            state = self.executor.canonical(state, self.model)
            saved = SavedState.of(state, has_base=bool(self._base))
            self.checkpoints.save(self.step, saved, extra, metric)

    @property
    def save_retry_due(self) -> bool:
        """Whether this process's last save failed with a transient error and may be retried now."""
        return self.checkpoints.retry_due

    def save_and_wait(self) -> None:
        """Saves the current step and waits until it is on disk, with retries.

        Raises:
          UserError: see `save`.
        """
        with self.clock.during("checkpoint"):
            self.save()
            for seconds in storage.WAITS:
                if self.checkpoints.finish_save() is None:
                    return
                time.sleep(seconds)
                self.save()
            self.checkpoints.wait()

    def close(self) -> None:
        """Waits for the save under way and closes the files.

        Raises:
          UserError: the last rows or the last checkpoint could not be written.
        """
        with contextlib.ExitStack() as stack:
            # Run in reverse, each also if another raised: hooks, metrics, checkpoints, programs.
            stack.callback(self._programs[0].close)
            stack.callback(self.checkpoints.wait)
            if "_metrics" in vars(self):
                stack.callback(self._metrics.close)
            for hook in self._hooks:
                stack.callback(hook.close)

    def _refuse_non_finite(self, step):
        norms = step.gradient_norms
        broken = [group for group, norm in norms.items() if not math.isfinite(norm)]
        if math.isfinite(step.loss) and not broken:
            return
        values = [f"gradients of {', '.join(broken)}"] if broken else []
        values += [f"loss {step.loss}"] if step.loss else []
        self._refuse([*values, *step.report.non_finite()])

    def _refuse(self, values):
        """Ends a training whose state is not finite any more."""
        self.checkpoints.wait()
        good = self.checkpoints.steps()
        self.alert("nan", f"step {self.step} is not finite ({', '.join(values)})")
        raise DivergedError(
            f"{self.name}: step {self.step} is not finite ({', '.join(values)}). Last good "
            f"checkpoint: {f'step {good[-1]}' if good else 'none'}; start a new run with a lower "
            "--learning_rate."
        )


def _make_folder(folder: Path) -> None:
    try:
        storage.make_folder(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be created: {error.strerror}.") from error


def advance_side_by_side(trainers: list[Trainer], stop: Callable[[], bool]) -> Iterator[Trainer]:
    """Advances the trainers in turns until all are finished or `stop()`; yields each after a step.

    The next step goes to the trainer with the smallest fraction of its schedule done, so that all
    see the same drift of the machine's speed.  After `stop()`, every trainer is saved.
    """
    for trainer in trainers:
        trainer.begin()
    while running := [t for t in trainers if not t.finished]:
        # Processes agree before each step: one that stopped alone would leave the others waiting in
        # a collective.  One exchange has all flags.
        stopping, *retries = collectives.any_process(
            bool(stop()), *(t.save_retry_due for t in running)
        )
        if stopping:
            for trainer in running:
                trainer.save_and_wait()
                say(f"{trainer.name:>6} saved at step {trainer.step}")
            return
        for trainer in itertools.compress(running, retries):
            trainer.save()
        trainer = min(running, key=lambda t: t.progress)
        trainer.advance()
        yield trainer
    for trainer in trainers:
        trainer.save_and_wait()
