"""The training loop of one model: steps, metrics, evaluation, checkpoints and resume."""

import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from sparse_dataflow.checkpoint.checkpoint import Checkpoints
from sparse_dataflow.config.evolution import EvolutionConfig
from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.data.batches import bits_per_byte
from sparse_dataflow.distributed import processes
from sparse_dataflow.distributed.clock import Clock
from sparse_dataflow.files import storage
from sparse_dataflow.files.addresses import Address
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.models import stacks
from sparse_dataflow.optim.loss_spikes import SpikeHistory, is_accepted, refuse_more_rollbacks
from sparse_dataflow.optim.optimizers import learning_rate_schedule
from sparse_dataflow.optim.train_state import TrainState
from sparse_dataflow.parallel.executor import SINGLE_DEVICE, Executor
from sparse_dataflow.sparsity.evolution import exchanged_share, guide_share, new_shares
from sparse_dataflow.training.monitoring.metrics import MetricsWriter, Progress, say, seconds_at
from sparse_dataflow.training.monitoring.trackers import TENSORBOARD
from sparse_dataflow.training.phases import phase_before, phases, phases_flops, refuse_unfit
from sparse_dataflow.training.plateau import Plateau, with_next_start
from sparse_dataflow.training.programs import (
    Compiled,
    TrainingData,
    convert_state,
    evolve_layouts,
    held_out_nats,
    run_step,
)
from sparse_dataflow.training.routing import non_finite_routers, routing_numbers
from sparse_dataflow.training.saved_state import (
    FrozenBase,
    SavedProgress,
    abstract_saved_state,
    completed,
    identity,
    refuse_other_layouts,
)
from sparse_dataflow.training.step import initial_state


class DivergedError(UserError):
    """A loss, a gradient or a parameter is not finite."""


class Trainer:
    """Trains one model to its last step.

    `advance` does one step with its evaluation and checkpoint.  The files are in one folder:
    `metrics.jsonl`, `tensorboard/`, `checkpoints/`.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        model: ModelConfig,
        training: TrainingConfig,
        data: TrainingData,
        programs: Sequence[Compiled],
        *,
        evolution: EvolutionConfig | None = None,
        executor: Executor = SINGLE_DEVICE,
        eval_every: int,
        checkpoint_every: int,
        keep: int = 3,
        mfu: Callable[[ModelConfig, float], float | None] = lambda model, tokens_per_second: None,
        position: int = 0,
        start: Callable[[], TrainState] | None = None,
        base: FrozenBase | None = None,
        clock: Clock | None = None,
        mirror: Path | Address | None = None,
        trackers: Sequence[str] = (TENSORBOARD,),
        config: Mapping[str, Any] | None = None,
    ):
        """Opens the folder and resumes from its newest verified checkpoint, if there is one.

        Args:
          name: of the variant, such as "sparse".
          folder: created if missing.
          model: config of the model; part of a checkpoint's identity.
          training: batch, steps and optimizer settings; part of a checkpoint's identity.
          data: training and held-out batches.
          programs: from `compile_programs`, one per phase.
          evolution: how layouts or model change, part of a checkpoint's identity; None for static.
          executor: the executor that the programs were compiled for.
          eval_every: steps between evaluations on the held-out windows.
          checkpoint_every: steps between checkpoints.
          keep: number of newest checkpoints to keep, in addition to the best one.
          mfu: (model, tokens per second) -> model FLOPs utilisation, or None if the chip's peak is
            unknown.
          position: row of the progress bar.
          start: returns the state before the first step, which is saved at once.  If None, the
            state is drawn from the training seed.
          base: frozen weights, which a checkpoint names instead of storing them; None if all
            weights are trained.
          clock: records what this process is doing; a new one if None.
          mirror: folder or address of a second copy of the checkpoints; None for none.
          trackers: names of the trackers of metrics and alerts.
          config: the `RunConfig` as JSON, for trackers.

        Raises:
          UserError: the folder cannot be written or has checkpoints of another config, or the
            evolution does not fit the model or the number of steps.
        """
        self.name, self.training, self.executor, self._base = name, training, executor, base
        self._clock = clock or Clock()
        self.evolution = evolution or EvolutionConfig()
        refuse_unfit(model, self.evolution, training.steps)
        self._data, self._programs, self._mfu = data, programs, mfu
        self._eval_every, self._checkpoint_every = eval_every, checkpoint_every
        processes.on_first(lambda: _make_folder(folder))
        saved_config = identity(model, training, self.evolution, data.tokenizer_hash)
        self._checkpoints = Checkpoints(
            folder / "checkpoints",
            keep,
            config=saved_config,
            completed=completed,
            mirror=mirror / "checkpoints" if mirror else None,
        )
        restored, progress = self._restore(phases(model, self.evolution, training.steps))
        self.phases, self.seconds = progress.phases, progress.seconds
        self._plateau, self._spikes = progress.plateau, progress.spikes
        saved_step = None if restored is None else int(restored.step)

        def first_state():
            if restored is None:
                return start() if start else initial_state(self.phases[0].model, training, executor)
            phase = self.phases[phase_before(self.phases, int(restored.step))]
            refuse_other_layouts(restored.tables, phase)
            frozen = base.read() if base else ()
            return executor.place(restored._replace(frozen=frozen), phase.model)

        if programs[0].start_state is None:
            self.state = first_state()
        else:
            self.state = programs[0].start_state(
                name, training, saved_config, saved_step, first_state, from_seed=start is None
            )
        self.step = int(self.state.step)
        if saved_step is not None and self.step != saved_step:
            self.seconds = seconds_at(folder, self.step, self.seconds)
        self._phase = phase_before(self.phases, self.step)
        self._tables = self._programs[self._phase].tables(self.state.tables)
        if progress.positions is not None:
            data.train.resume(progress.positions)
        self._batches = data.train.iterate(self.step)
        self._metrics = MetricsWriter(folder, self.step, trackers, config)
        self._progress = Progress(name, training.steps, self.step, position)
        self.last_evaluation: dict | None = None
        if saved_step is not None:
            self.alert("restart", f"resumed after step {self.step} of {training.steps}")
        if start is not None and restored is None:
            self.save()  # So that a resumed run does not need `start` again.

    def _restore(self, planned):
        """Returns (state of the newest checkpoint or None, progress at that step)."""
        progress = SavedProgress(0.0, planned, Plateau(), SpikeHistory())

        def abstract_state(step, extra):
            nonlocal progress
            progress = SavedProgress.from_extra(extra, planned)
            return abstract_saved_state(progress.phases, self.training, step, self.executor)

        with self._clock.during("checkpoint"):
            restored = self._checkpoints.restore(abstract_state)
        return restored[0] if restored else None, progress

    @property
    def model(self) -> ModelConfig:
        """The model of the current phase."""
        return self.phases[self._phase].model

    @property
    def flops(self) -> float:
        """Model FLOPs of the whole training, with the phases as planned or changed so far, and the
        forward passes of a teacher."""
        return phases_flops(self.phases, self.evolution, self.training, self._data.teacher)

    @property
    def teacher_flops(self) -> float:
        """The part of `flops` in the forward passes of a teacher; 0 without one."""
        return self.flops - phases_flops(self.phases, self.evolution, self.training)

    @property
    def finished(self) -> bool:
        """Whether the last step is done."""
        return self.step >= self.training.steps

    def alert(self, kind: str, text: str) -> None:
        """Hands an alert to the trackers; any thread may call."""
        self._metrics.alert(kind, text, self.step)

    def advance(self) -> None:
        """Does one optimizer step, then the evaluation and the checkpoint that are due.

        Changes of the model or its layouts come before the step.  So a checkpoint holds the state
        right after a step, and a resumed run makes the same changes again.

        Raises:
          DivergedError: a loss or gradient is not finite; names the step, the parameter groups and
            the last good checkpoint.
        """
        self._clock.step = f"step {self.step + 1} of {self.name}"
        with self._clock.during("data"):
            batch = self._put(next(self._batches))
        self._evolve()
        rate = learning_rate_schedule(self.training)(self.step)
        sigmas = self.training.skip_spikes
        limit = self._spikes.loss_limit(sigmas) if sigmas else None
        with self._clock.during("step"):
            start = time.perf_counter()
            self.state, self._tables, report = run_step(
                self._programs[self._phase],
                self.state,
                self._tables,
                batch,
                rate,
                limit,
                guide_share(self.step, self.phases[self._phase].stop),
            )
            report = jax.device_get(report)
            report = report._replace(
                loss=float(report.loss),
                gradient_norms={name: float(n) for name, n in report.gradient_norms.items()},
            )
            elapsed = time.perf_counter() - start
        self._clock.record_step(elapsed)
        self.step += 1
        self.seconds += elapsed
        if limit is not None and not is_accepted(report.loss, report.gradient_norms, limit):
            self._record_skipped(report.loss, float(limit))
        else:
            self._refuse_non_finite("gradients", report.gradient_norms, report.loss, report.routing)
            self._spikes = self._spikes.with_accepted(report.loss)
            self._record_step(report, rate, elapsed)
        if self.step % self._eval_every == 0 or self.finished:
            self._check_plateau(self.evaluate()["bits_per_byte"])
        if self.step % self._checkpoint_every == 0 or self.finished:
            self.save()

    def _write_row(self, kind, step=None, **values):
        """Writes a row of metrics; returns it."""
        counters = {"tokens": self.tokens, "seconds": self.seconds}
        row = {"kind": kind, "step": self.step if step is None else step, **counters, **values}
        self._metrics.write(row)
        return row

    def _record_skipped(self, loss, limit):
        """Records a skipped step; rolls back after several."""
        self._spikes = self._spikes.with_skipped()
        values = {"loss": loss, "limit": limit}
        finite = {name: v if math.isfinite(v) else None for name, v in values.items()}
        self._write_row("skipped", **finite)
        text = f"step {self.step} skipped: loss {loss:.4g}, limit {limit:.4g}"
        say(f"{self.name:>6}: {text}")
        self.alert("spike", text)
        if self._spikes.needs_rollback:
            self._roll_back()

    def _roll_back(self):
        """Restores the parameters of a checkpoint from before the skipped steps."""
        refuse_more_rollbacks(self.name, self.step, self._spikes)
        self._checkpoints.wait()
        saved_steps = processes.on_first(self._checkpoints.steps)
        target = self._spikes.rollback_step(saved_steps, self.step, self._checkpoint_every)
        self._spikes = self._spikes.with_rollback()
        if target is None or phase_before(self.phases, target) != self._phase:
            say(f"{self.name:>6}: no rollback: this phase has no checkpoint from before the spike")
            return
        with self._clock.during("checkpoint"):
            state = abstract_saved_state(self.phases, self.training, target, self.executor)
            restored = self._checkpoints.restore(state, target)
        assert restored is not None
        self.state = self.executor.place(restored[0], self.model)._replace(
            step=self.state.step, frozen=self.state.frozen
        )
        self._tables = self._programs[self._phase].tables(self.state.tables)
        self._write_row("rollback", to=target)
        text = f"rolled back to the parameters of step {target}"
        say(f"{self.name:>6}: {text}")
        self.alert("rollback", text)

    def _record_step(self, report, rate, elapsed):
        speed = self.training.batch * self.training.sequence / elapsed
        self._write_row(
            "train",
            loss=report.loss,
            learning_rate=rate,
            gradient_norm=math.hypot(*report.gradient_norms.values()),
            tokens_per_second=speed,
            mfu=self._mfu(self.model, speed),
            **routing_numbers(report.routing),
        )
        if report.routing and (self.step % self._eval_every == 0 or self.finished):
            self._write_row("routing", load=report.routing.load.tolist())
        left = self.seconds / self.step * (self.training.steps - self.step)
        self._progress.update(self.step, f"loss {report.loss:.3f}  {speed:,.0f} tokens/s", left)

    def _check_plateau(self, bits_per_byte):
        """Starts the next phase if the evaluations of this one no longer improve."""
        if not self.evolution.plateau or self._phase + 1 == len(self.phases) or self.finished:
            return
        self._plateau = self._plateau.after(bits_per_byte)
        if self._plateau.stale >= self.evolution.plateau:
            self.phases = with_next_start(self.phases, self._phase, self.step)
            self._plateau = Plateau()
            say(f"{self.name:>6}: plateau: the next phase starts after step {self.step}")

    def _evolve(self):
        """Changes the model or its layouts if that is due before the next step."""
        share = exchanged_share(self.evolution, self.step, self.training.steps)
        if not share and self.step != self.phases[self._phase].stop:
            return
        with self._clock.during("evolution"):
            self._evolve_now(share)

    def _evolve_now(self, share):
        start, changed = time.perf_counter(), {}
        if self.step == self.phases[self._phase].stop:
            before, after = self.phases[self._phase : self._phase + 2]
            self.state = convert_state(self.state, before.model, after.model, self.executor)
            self._phase += 1
        else:
            programs = self._programs[self._phase]
            layouts = functools.partial(stacks.layouts_from_tables, self.model)
            old = layouts(self.state.tables)
            self.state = evolve_layouts(
                self.state,
                self.model,
                programs,
                self.evolution,
                share,
                # Read ahead: training reads the same batches again, so a resumed run does as well.
                (self._put(self._data.train[step]) for step in itertools.count(self.step)),
                self.executor,
            )
            shares = new_shares(old, layouts(self.state.tables))
            changed = {f"changed/{name}": share for name, share in shares.items()}
        self._tables = self._programs[self._phase].tables(self.state.tables)
        elapsed = time.perf_counter() - start
        self.seconds += elapsed
        self._write_row(
            "evolution",
            self.step + 1,
            update_seconds=elapsed,
            exchanged=share,
            parameters=sum(leaf.size for leaf in jax.tree.leaves(self.state.params)),
            **changed,
        )

    @property
    def timeline(self) -> list:
        """Spans of the last step; empty if the executor records none."""
        return list(self._programs[self._phase].timeline())

    def _put(self, batch):
        self._clock.progress += 1
        return self.executor.put(batch, self.training.batch)

    @property
    def tokens(self) -> int:
        """Number of training tokens seen."""
        return self.step * self.training.batch * self.training.sequence

    def evaluate(self) -> dict:
        """Evaluates the periodic held-out windows; returns and writes a row "eval"."""
        self.last_evaluation = self._evaluate(
            "eval", lambda corpus: (corpus.validation, corpus.validation_bytes)
        )
        return self.last_evaluation

    def evaluate_finally(self) -> dict:
        """Evaluates all held-out windows; returns and writes a row "final"."""
        return self._evaluate("final", lambda corpus: (corpus.final, corpus.final_bytes))

    def _evaluate(self, kind, held_out):
        """Writes the loss of the windows, or of each corpus of a mixture and their mean.

        `held_out` returns the windows and their bytes, of `TrainingData` or of a `HeldOut`.
        """
        with self._clock.during("evaluation"):
            if not self._data.mixture:
                loss, bits = self._loss(*held_out(self._data))
                return self._write_row(kind, loss=loss, bits_per_byte=bits)
            values = {"loss": 0.0, "bits_per_byte": 0.0}
            token_bytes = 0.0
            for source in self._data.mixture:
                batches, total_bytes = held_out(source)
                loss, bits = self._loss(batches, total_bytes)
                values |= {f"loss/{source.name}": loss, f"bits_per_byte/{source.name}": bits}
                values["loss"] += source.weight * loss
                token_bytes += source.weight * total_bytes / batches.total_tokens
            # Of text that is drawn with the weights.
            values["bits_per_byte"] = bits_per_byte(values["loss"], token_bytes)
            return self._write_row(kind, **values)

    def _loss(self, batches, total_bytes):
        """Returns the loss of held-out windows in nats a token and in bits per byte."""
        weights = self.state._replace(tables=self._tables).weights
        total = held_out_nats(self._programs[self._phase], weights, map(self._put, batches))
        return total / batches.total_tokens, bits_per_byte(total, total_bytes)

    def save(self) -> None:
        """Starts a checkpoint of the current step, unless there is one.

        Raises:
          DivergedError: a parameter is not finite.
          UserError: the folder cannot be written.
        """
        parameter_norms = self._programs[self._phase].parameter_norms
        norms = jax.device_get(parameter_norms(self.state.params))
        self._refuse_non_finite("parameters", norms)
        last = self.last_evaluation
        metric = last["bits_per_byte"] if last and last["step"] == self.step else None
        extra = {
            "seconds": self.seconds,
            "data_position": self.step,
            "bits_per_byte": metric,
            "starts": [phase.start for phase in self.phases],
            "plateau": self._plateau.to_json(),
        }
        if (positions := self._data.train.positions(self.step)) is not None:
            extra["data_positions"] = positions
        if self.training.skip_spikes:
            extra["spikes"] = self._spikes.to_json()
        if self._base:
            extra["base"] = dict(self._base.source)
        with self._clock.during("checkpoint"):
            saved = self.executor.canonical(self.state._replace(frozen=()), self.model)
            self._checkpoints.save(self.step, saved, extra, metric)

    @property
    def save_retry_due(self) -> bool:
        """Whether this process's last save failed with a transient error and may be retried now."""
        return self._checkpoints.retry_due

    def save_and_wait(self) -> None:
        """Saves the current step and waits until it is on disk, with retries.

        Raises:
          UserError: see `save`.
        """
        with self._clock.during("checkpoint"):
            self.save()
            for seconds in storage.WAITS:
                if self._checkpoints.finish_save() is None:
                    return
                time.sleep(seconds)
                self.save()
            self._checkpoints.wait()

    def close(self) -> None:
        """Waits for the save under way and closes the files.

        Raises:
          UserError: the last rows or the last checkpoint could not be written.
        """
        self._progress.close()
        try:
            self._metrics.close()
        finally:
            self._checkpoints.wait()

    def _refuse_non_finite(self, kind, norms, loss=0.0, routing=()):
        broken = [group for group, norm in norms.items() if not math.isfinite(norm)]
        if math.isfinite(loss) and not broken:
            return
        self._checkpoints.wait()
        good = self._checkpoints.steps()
        values = [f"{kind} of {', '.join(broken)}"] if broken else []
        values += [f"loss {loss}"] if loss else []
        values += [f"router of layer {layer}" for layer in non_finite_routers(routing)[:1]]
        self.alert("nan", f"step {self.step} is not finite ({', '.join(values)})")
        raise DivergedError(
            f"{self.name}: step {self.step} is not finite ({', '.join(values)}). Last good "
            f"checkpoint: {f'step {good[-1]}' if good else 'none'}; start a new run with a lower "
            "--learning_rate."
        )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be created: {error.strerror}.") from error
