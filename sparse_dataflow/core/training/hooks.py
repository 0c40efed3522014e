"""What a training does besides its steps: changes of the model, metrics, evaluations, checkpoints.

A hook is called before and after each step, in the order of the list that the trainer has.  What it
must remember goes into each checkpoint, so that a resumed run does the same.
"""

import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from sparse_dataflow.core import collectives
from sparse_dataflow.core.layouts.evolution import exchanged_share, new_shares
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.optim.loss_spikes import SpikeHistory, refuse_more_rollbacks
from sparse_dataflow.core.step_metrics import Load
from sparse_dataflow.core.training.loop import Hook, StepDone, Trainer
from sparse_dataflow.core.training.phases import phase_before
from sparse_dataflow.core.training.programs import convert_state, evolve_layouts
from sparse_dataflow.core.training.transitions import Change, change_model, host_masks
from sparse_dataflow.files.json_files import JsonObject


class Evolve(Hook):
    """Changes the model or its layouts, as the evolution of the training says.

    Changes come before a step.  So a checkpoint has the state right after a step, and a resumed run
    makes the same changes again.
    """

    def __init__(self, change: Change = change_model):
        """Args:
        change: makes the state of a phase that of the next one; see `pruning.changes`.
        """
        self._change = change

    def before_step(self, trainer: Trainer) -> None:
        """See `Hook`; writes a row "evolution"."""
        evolution, steps = trainer.evolution, trainer.training.steps
        share = functools.partial(exchanged_share, evolution, trainer.step, steps)
        phase_ends = trainer.step == trainer.phase.stop
        if not share() and not phase_ends:
            return
        with trainer.clock.during("evolution"):
            start = time.perf_counter()
            # Read ahead: training reads the same batches again, so a resumed run does as well.
            batches = map(trainer.batch, itertools.count(trainer.step))
            if phase_ends:
                changed = self._next_model(trainer, batches)
            else:
                changed = self._update(trainer, share, batches)
            elapsed = time.perf_counter() - start
        trainer.seconds += elapsed
        row = {
            "update_seconds": elapsed,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(trainer.state.params)),
        }
        # Of the next step: a run that resumes from the checkpoint of this one changes again.
        trainer.write("evolution", row | changed, trainer.step + 1)
        trainer.model_changed(phase_ends)

    def _next_model(self, trainer, batches):
        before = trainer.model
        trainer.phase_number += 1
        after, executor = trainer.model, trainer.executor
        trainer.state = convert_state(trainer.state, before, after, batches, executor, self._change)
        return {"exchanged": 0.0}

    def _update(self, trainer, share, batches):
        """Exchanges blocks; returns the share of new blocks of each projection, and of all of them,
        for the row."""
        before = stacks.layouts_of(trainer.model, trainer.state.rest)
        masks = host_masks(trainer.model, trainer.state.rest)
        trainer.state = evolve_layouts(
            trainer.state,
            trainer.model,
            trainer.programs,
            trainer.evolution,
            share,
            batches,
            trainer.executor,
        )
        after = stacks.layouts_of(trainer.model, trainer.state.rest)
        shares = new_shares(before, after)
        stored = {name: sum(layout.nnz for layout in after[name]) for name in shares}
        for name, mask in host_masks(trainer.model, trainer.state.rest).items():
            stored[name] = int(mask.sum())
            shares[name] = float((mask & ~masks[name]).sum() / stored[name])
        # A state from a checkpoint has another order, in which the sum may have other last bits.
        shares = {name: shares[name] for name in sorted(shares)}
        new = sum(share * stored[name] for name, share in shares.items())
        return {
            "exchanged": new / sum(stored.values()),
            **{f"changed/{name}": share for name, share in shares.items()},
        }


class SkipSpikes(Hook):
    """Skips steps whose loss is far above the recent ones, and rolls back after several; see
    `optim.loss_spikes`."""

    def __init__(self, sigmas: float):
        """Begins with no history.

        Args:
          sigmas: `TrainingConfig.skip_spikes`.
        """
        self._sigmas, self._history = sigmas, SpikeHistory()

    def model_changed(self, new_phase: bool) -> None:
        self._history = SpikeHistory()

    def limit(self) -> np.float32:
        return self._history.loss_limit(self._sigmas)

    def after_step(self, trainer: Trainer, step: StepDone) -> None:
        """See `Hook`; writes rows "skipped" and "rollback"."""
        if step.accepted:
            self._history = self._history.with_accepted(step.loss)
            return
        # A count alone: the loss of a skipped step must not raise the limit of later ones.
        self._history = self._history.with_skipped()
        assert step.limit is not None
        values = {"loss": step.loss, "limit": float(step.limit)}
        finite = {name: v if math.isfinite(v) else None for name, v in values.items()}
        trainer.write("skipped", finite)
        text = f"step {trainer.step} skipped: loss {step.loss:.4g}, limit {step.limit:.4g}"
        say(f"{trainer.name:>6}: {text}")
        trainer.alert("spike", text)
        if self._history.needs_rollback:
            self._roll_back(trainer)

    def _roll_back(self, trainer):
        """Restores the parameters of a checkpoint from before the skipped steps."""
        refuse_more_rollbacks(trainer.name, trainer.step, self._history)
        # A checkpoint that is still being written counts too.
        trainer.checkpoints.wait()
        # Of process 0, so that all processes roll back to the same step.
        saved_steps = collectives.on_first(trainer.checkpoints.regular_steps)
        target = self._history.rollback_step(saved_steps, trainer.step)
        self._history = self._history.with_rollback()
        # Parameters of another phase may have other shapes.
        if target is None or phase_before(trainer.phases, target) != trainer.phase_number:
            say(
                f"{trainer.name:>6}: no rollback: this phase has no checkpoint from before the "
                "spike"
            )
            return
        trainer.restore_parameters(target)
        trainer.write("rollback", {"to": target})
        text = f"rolled back to the parameters of step {target}"
        say(f"{trainer.name:>6}: {text}")
        trainer.alert("rollback", text)

    def saved(self) -> JsonObject:
        return {"spikes": self._history.to_json()}

    def restore(self, extra: JsonObject) -> None:
        self._history = SpikeHistory.from_json(extra.get("spikes"))


class Record(Hook):
    """Writes a row "train" after each accepted step, with every metric of the step."""

    def __init__(
        self,
        mfu: Callable[[Trainer, float], float | None] = lambda trainer, tokens_per_second: None,
        note: Callable[[str, int, int, dict], None] = lambda name, step, steps, row: None,
        more: Callable[[StepDone], Mapping[str, float]] = lambda step: {},
    ):
        """Args:
        mfu: (trainer, tokens per second of its last step) -> model FLOPs utilisation, or None if
          the chip's peak is unknown.
        note: (name, step, steps, row) -> None, for those who show progress.
        more: (step) -> more numbers for its row.
        """
        self._mfu, self._note, self._more = mfu, note, more

    def after_step(self, trainer: Trainer, step: StepDone) -> None:
        if not step.accepted:
            return
        training = trainer.training
        # Tokens per second of this step alone.
        speed = training.batch * training.sequence / step.seconds
        numbers = {**step.numbers, **self._more(step)}
        row = {
            **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
            "learning_rate": step.rate,
            "tokens_per_second": speed,
            "mfu": self._mfu(trainer, speed),
        }
        row = trainer.write("train", row)
        self._note(trainer.name, trainer.step, trainer.length.total, row)


class Evaluate(Hook):
    """Evaluates the periodic held-out windows."""

    def __init__(self, every: int):
        """Begins with no evaluation.

        Args:
          every: steps between evaluations; the last step has one too.
        """
        self._every = every

    def after_step(self, trainer: Trainer, step: StepDone) -> None:
        """See `Hook`; writes rows "eval", and "routing" for a model with experts."""
        if trainer.step % self._every and not trainer.finished:
            return
        for metric in step.report.metrics.values():
            if step.accepted and isinstance(metric, Load):
                trainer.write("routing", {"load": metric.shares().tolist()})
        trainer.evaluate()


class Save(Hook):
    """Starts a checkpoint every so many steps, and after the last."""

    def __init__(self, every: int):
        """Args:
        every: steps between checkpoints.
        """
        self._every = every

    def saves_at(self, step: int) -> bool:
        return step % self._every == 0

    def after_step(self, trainer: Trainer, step: StepDone) -> None:
        if self.saves_at(trainer.step) or trainer.finished:
            trainer.save()


def usual(
    eval_every: int,
    checkpoint_every: int,
    skip_spikes: float = 0.0,
    *,
    record: Hook | None = None,
    budget: Hook | None = None,
    change: Change = change_model,
    last: Sequence[Hook] = (),
) -> list[Hook]:
    """Returns the hooks of a training of this project, in their order.

    Args:
      eval_every: steps between evaluations on the held-out windows.
      checkpoint_every: steps between checkpoints.
      skip_spikes: `TrainingConfig.skip_spikes`; 0 for none.
      record: writes the rows "train"; `Record()` if None.
      change: see `Evolve`.
      budget: may revise the number of steps, before other hooks ask whether a step is the last.
      last: hooks after all others, such as one that shows the time left.
    """
    spikes = [SkipSpikes(skip_spikes)] if skip_spikes else []
    saves = [Evaluate(eval_every), Save(checkpoint_every)]
    budgets = [budget] if budget else []
    # Changes come before a step.  A budget comes before those who ask whether a step is the last.
    return [Evolve(change), *spikes, *budgets, record or Record(), *saves, *last]
