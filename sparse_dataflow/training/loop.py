"""One model's training: a step at a time, with metrics, evaluation, checkpoints and resume."""

import functools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from sparse_dataflow.checkpoint.checkpoint import Checkpoints
from sparse_dataflow.config.evolution import EvolutionConfig
from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.data.batches import bits_per_byte
from sparse_dataflow.distributed import processes
from sparse_dataflow.distributed.clock import Clock
from sparse_dataflow.files import storage
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.optim.loss_spikes import Spikes, counts, refuse_hopeless
from sparse_dataflow.optim.optimizers import learning_rate_schedule
from sparse_dataflow.optim.train_state import TrainState
from sparse_dataflow.parallel.executor import SINGLE_DEVICE, Executor
from sparse_dataflow.sparsity.evolution import exchanged_share
from sparse_dataflow.training.metrics import MetricsWriter, Progress, say, seconds_at
from sparse_dataflow.training.phases import phase_before, phases, phases_flops, refuse_unfit
from sparse_dataflow.training.plateau import Plateau, next_begins
from sparse_dataflow.training.programs import (
    Compiled,
    TrainingData,
    changed,
    evolved,
    held_out_nats,
    stepped,
)
from sparse_dataflow.training.saved_state import Kept, identity, saved_state
from sparse_dataflow.training.step import initial_state


class Trainer:
    """Trains one model to its last step; `advance` does one step and whatever is due after it.

    The state on disk is one folder: `metrics.jsonl`, `tensorboard/`, `checkpoints/`.
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
        clock: Clock | None = None,
    ):
        """Opens the folder and continues from its newest whole checkpoint, if there is one.

        Args:
          name: of the variant, "sparse" or "dense".
          folder: made if missing.
          model: its config, part of a checkpoint's identity.
          training: likewise.
          data: what to train on.
          programs: from `compile_programs`, one a phase.
          evolution: how the layouts or the model change, likewise; static where None.
          executor: that the programs were compiled for.
          eval_every: steps between evaluations on the held-out windows.
          checkpoint_every: steps between checkpoints.
          keep: checkpoints to keep, beside the best.
          mfu: (model, tokens per second) -> model FLOPs utilisation, or None where the peak is
            unknown.
          position: row of the progress bar.
          start: gives the state before the first step, which is saved at once; drawn from the
            training seed where None.
          clock: is told what this process does; its own where None.

        Raises:
          UserError: the folder cannot be written, or holds checkpoints of another config; the
            evolution does not fit the model or the steps.
        """
        self.name, self.training, self.executor = name, training, executor
        self._clock = clock or Clock()
        self.evolution = evolution or EvolutionConfig()
        refuse_unfit(model, self.evolution, training.steps)
        self.phases = phases(model, self.evolution, training.steps)
        self._data, self._programs, self._mfu = data, programs, mfu
        self._eval_every, self._checkpoint_every = eval_every, checkpoint_every
        processes.on_first(lambda: _make(folder))
        known = identity(model, training, self.evolution, data.tokenizer_hash)
        self._checkpoints = Checkpoints(folder / "checkpoints", keep, config=known)
        self.seconds, self._plateau, self._spikes = 0.0, Plateau(), Spikes()

        def wanted(step, extra):
            self.phases = Kept.read(extra, self.phases).phases
            return saved_state(self.phases, training, step, executor)

        with self._clock.during("checkpoint"):
            restored = self._checkpoints.restore(wanted)
        saved = int(restored[0].step) if restored else None
        if restored:
            kept = Kept.read(restored[1], self.phases)
            self.seconds, self._plateau, self._spikes = kept.seconds, kept.plateau, kept.spikes

        def first_state():
            if restored:
                return executor.place(restored[0])
            draw = functools.partial(initial_state, self.phases[0].model, training, executor)
            return (start or draw)()

        if programs[0].begin is None:
            self.state = first_state()
        else:
            self.state = programs[0].begin(
                name, training, known, saved, first_state, drawn=start is None
            )
        self.step = int(self.state.step)
        if saved is not None and self.step != saved:
            self.seconds = seconds_at(folder, self.step, self.seconds)
        self._phase = phase_before(self.phases, self.step)
        self._tables = self._programs[self._phase].tables(self.state.tables)
        self._batches = data.train.iterate(self.step)
        self._metrics = MetricsWriter(folder, self.step)
        self._progress = Progress(name, training.steps, self.step, position)
        self.last_evaluation: dict | None = None
        if start is not None and not restored:
            self.save()  # A resumed run then needs no other folder.

    @property
    def model(self) -> ModelConfig:
        """The model of the present state."""
        return self.phases[self._phase].model

    @property
    def flops(self) -> float:
        """Model FLOPs of the whole training, in the phases as they are known now."""
        return phases_flops(self.phases, self.evolution, self.training)

    @property
    def finished(self) -> bool:
        """Whether the last step is done."""
        return self.step >= self.training.steps

    def advance(self) -> None:
        """One optimizer step, then evaluation and checkpoint where they are due.

        What changes the model or its layouts comes before the step, so that a checkpoint holds the
        state that a step left, and what follows from it is done again after a resume.

        Raises:
          UserError: a loss or gradient is not finite; names step, parameter group and the last
            good checkpoint.
        """
        self._clock.step = f"step {self.step + 1} of {self.name}"
        with self._clock.during("data"):
            batch = self._put(next(self._batches))
        self._evolve(batch)
        rate = learning_rate_schedule(self.training)(self.step)
        sigmas = self.training.skip_spikes
        limit = self._spikes.limit(sigmas) if sigmas else None
        with self._clock.during("step"):
            start = time.perf_counter()
            self.state, self._tables, report = stepped(
                self._programs[self._phase], self.state, self._tables, batch, rate, limit
            )
            report = jax.tree.map(float, jax.device_get(report))
            elapsed = time.perf_counter() - start
        self._clock.record_step(elapsed)
        self.step += 1
        self.seconds += elapsed
        if limit is not None and not counts(report.loss, report.gradient_norms, limit):
            self._skipped(report.loss, float(limit))
        else:
            self._refuse_non_finite("gradients", report.gradient_norms, report.loss)
            self._spikes = self._spikes.good(report.loss)
            self._tell(report, rate, elapsed)
        if self.step % self._eval_every == 0 or self.finished:
            self._watch(self.evaluate()["bits_per_byte"])
        if self.step % self._checkpoint_every == 0 or self.finished:
            self.save()

    def _skipped(self, loss, limit):
        """Tells of a step whose update was not made; goes back after several."""
        self._spikes = self._spikes.bad()
        row = {"kind": "skipped", "step": self.step, "tokens": self.tokens, "seconds": self.seconds}
        known = {"loss": loss, "limit": limit}
        row |= {name: value if math.isfinite(value) else None for name, value in known.items()}
        self._metrics.write(row)
        say(f"{self.name:>6}: step {self.step} skipped: loss {loss:.4g}, and {limit:.4g} counts")
        if self._spikes.hopeless:
            self._roll_back()

    def _roll_back(self):
        """Goes on with the parameters of a checkpoint from before the steps that were skipped."""
        refuse_hopeless(self.name, self.step, self._spikes)
        self._checkpoints.wait()
        whole = processes.on_first(self._checkpoints.steps)
        target = self._spikes.target(whole, self.step, self._checkpoint_every)
        self._spikes = self._spikes.rolled_back()
        if target is None or phase_before(self.phases, target) != self._phase:
            say(f"{self.name:>6}: no checkpoint of this model from before these steps; going on")
            return
        with self._clock.during("checkpoint"):
            state = saved_state(self.phases, self.training, target, self.executor)
            restored = self._checkpoints.restore(state, target)
        assert restored is not None
        self.state = self.executor.place(restored[0])._replace(step=self.state.step)
        self._tables = self._programs[self._phase].tables(self.state.tables)
        facts = {"tokens": self.tokens, "seconds": self.seconds, "to": target}
        self._metrics.write({"kind": "rollback", "step": self.step, **facts})
        say(f"{self.name:>6}: parameters of step {target} from here on")

    def _tell(self, report, rate, elapsed):
        speed = self.training.batch * self.training.sequence / elapsed
        self._metrics.write(
            {
                "kind": "train",
                "step": self.step,
                "tokens": self.tokens,
                "seconds": self.seconds,
                "loss": report.loss,
                "learning_rate": rate,
                "gradient_norm": math.hypot(*report.gradient_norms.values()),
                "tokens_per_second": speed,
                "mfu": self._mfu(self.model, speed),
            }
        )
        left = self.seconds / self.step * (self.training.steps - self.step)
        self._progress.update(self.step, f"loss {report.loss:.3f}  {speed:,.0f} tokens/s", left)

    def _watch(self, bits_per_byte):
        """Lets the next phase begin where this one's evaluations show no more progress."""
        if not self.evolution.plateau or self._phase + 1 == len(self.phases) or self.finished:
            return
        self._plateau = self._plateau.after(bits_per_byte)
        if self._plateau.stale >= self.evolution.plateau:
            self.phases = next_begins(self.phases, self._phase, self.step)
            self._plateau = Plateau()
            say(f"{self.name:>6}: no progress; the next phase begins after step {self.step}")

    def _evolve(self, batch):
        """Changes the model or its layouts where that is due before the next step."""
        share = exchanged_share(self.evolution, self.step, self.training.steps)
        if not share and self.step != self.phases[self._phase].stop:
            return
        with self._clock.during("evolution"):
            self._evolve_by(share, batch)

    def _evolve_by(self, share, batch):
        start = time.perf_counter()
        if self.step == self.phases[self._phase].stop:
            before, after = self.phases[self._phase : self._phase + 2]
            self.state = changed(self.state, before.model, after.model, self.executor)
            self._phase += 1
        else:
            programs, how = self._programs[self._phase], self.evolution
            self.state = evolved(self.state, self.model, programs, how, share, batch, self.executor)
        self._tables = self._programs[self._phase].tables(self.state.tables)
        elapsed = time.perf_counter() - start
        self.seconds += elapsed
        self._metrics.write(
            {
                "kind": "evolution",
                "step": self.step + 1,
                "tokens": self.tokens,
                "seconds": self.seconds,
                "update_seconds": elapsed,
                "exchanged": share,
                "parameters": sum(leaf.size for leaf in jax.tree.leaves(self.state.params)),
            }
        )

    @property
    def timeline(self) -> list:
        """Spans of the last step; none of an executor that notes none."""
        told = self._programs[self._phase].timeline
        return list(told()) if told else []

    def _put(self, batch):
        self._clock.progress += 1
        return self.executor.put(batch, self.training.batch)

    @property
    def tokens(self) -> int:
        """Training tokens seen."""
        return self.step * self.training.batch * self.training.sequence

    def evaluate(self) -> dict:
        """Loss and bits per byte over the periodic held-out windows; also a row "eval"."""
        data = self._data
        self.last_evaluation = self._evaluate("eval", data.validation, data.validation_bytes)
        return self.last_evaluation

    def evaluate_finally(self) -> dict:
        """The same over all held-out windows; also a row "final"."""
        return self._evaluate("final", self._data.final, self._data.final_bytes)

    def _evaluate(self, kind, batches, total_bytes):
        programs, params = self._programs[self._phase], self.state.params
        with self._clock.during("evaluation"):
            total = held_out_nats(programs, params, self._tables, map(self._put, batches))
        row = {
            "kind": kind,
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "loss": total / batches.total_tokens,
            "bits_per_byte": bits_per_byte(total, total_bytes),
        }
        self._metrics.write(row)
        return row

    def save(self) -> None:
        """Starts a checkpoint of the present step (nothing if there is one).

        Raises:
          UserError: a parameter is not finite, or the folder cannot be written.
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
        if self.training.skip_spikes:
            extra["spikes"] = self._spikes.to_json()
        with self._clock.during("checkpoint"):
            self._checkpoints.save(
                self.step, self.executor.canonical(self.state, self.model), extra, metric
            )

    @property
    def save_again(self) -> bool:
        """Whether the last checkpoint failed for a reason that passes and is due again, here."""
        return self._checkpoints.again

    def save_surely(self) -> None:
        """Returns once a checkpoint of the present step is on disk.

        Raises:
          UserError: as `save`.
        """
        with self._clock.during("checkpoint"):
            self.save()
            for seconds in storage.WAITS:
                if self._checkpoints.ended() is None:
                    return
                time.sleep(seconds)
                self.save()
            self._checkpoints.wait()

    def close(self) -> None:
        """Waits for the checkpoint under way and closes the files.

        Raises:
          UserError: the last rows or the checkpoint could not be written.
        """
        self._progress.close()
        try:
            self._metrics.close()
        finally:
            self._checkpoints.wait()

    def _refuse_non_finite(self, what, norms, loss=0.0):
        broken = [group for group, norm in norms.items() if not math.isfinite(norm)]
        if math.isfinite(loss) and not broken:
            return
        self._checkpoints.wait()
        good = self._checkpoints.steps()
        raise UserError(
            f"{self.name}: step {self.step} is not finite ({what} of "
            f"{', '.join(broken) or 'no group'}{f', loss {loss}' if loss else ''}). Last good "
            f"checkpoint: {f'step {good[-1]}' if good else 'none'}; start a new run with a lower "
            "--learning_rate."
        )


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror}.") from error
