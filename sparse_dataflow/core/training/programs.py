"""The compiled programs of a training, compiled before its clock starts."""

import dataclasses
import functools
import itertools
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors.block_gradients import mean_norms, portions
from sparse_dataflow.core.executors.executor import (
    SINGLE_DEVICE,
    Executor,
    MultiProgramExecutor,
    TracedExecutor,
)
from sparse_dataflow.core.layouts.evolution import METHODS, PhaseSpec
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.model.partition import without_left_out
from sparse_dataflow.core.optim.optimizers import TrainState
from sparse_dataflow.core.step_metrics import StepReport
from sparse_dataflow.core.training.step import (
    abstract_state,
    initial_state,
    jitted_train_step,
    make_eval_step,
)
from sparse_dataflow.core.training.teacher import Teacher
from sparse_dataflow.core.training.transitions import (
    Batches,
    Change,
    change_model,
    update_layouts,
)
from sparse_dataflow.files.errors import UserError


class TrainBatches(Protocol):
    """Training batches by step; `data.batches` has them for stored corpora.

    Attributes:
      batch_size: rows of the global batch.
      example: a batch for programs that need its shape alone.
      skipped_words: how many rows of the corpus were left out, and why; "" for none.
    """

    @property
    def batch_size(self) -> int: ...  # noqa: D102

    @property
    def example(self) -> Batch: ...  # noqa: D102

    def __getitem__(self, step: int, /) -> Batch: ...

    @property
    def skipped_words(self) -> str: ...  # noqa: D102

    def iterate(self, start_step: int) -> Iterator[Batch]:
        """Yields the batches from a step on, without end."""
        ...

    def positions(self, step: int) -> object:
        """Returns what a checkpoint stores besides the step; None for nothing."""

    def resume(self, positions: object) -> None:
        """Takes the `positions` of a checkpoint."""


class EvalBatches(Protocol):
    """Held-out windows in order, the same at every evaluation.

    Attributes:
      batch_size: rows of the global batch.
      total_tokens: targets that count, over all batches and processes.
    """

    @property
    def batch_size(self) -> int: ...  # noqa: D102

    @property
    def total_tokens(self) -> int: ...  # noqa: D102

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Batch: ...

    def __iter__(self) -> Iterator[Batch]: ...


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """The held-out windows of one corpus of a mixture.

    Attributes:
      name: of the corpus, in metrics.
      weight: fraction of the training tokens from this corpus.
      validation: see `TrainingData`, also for the others.
      validation_bytes: UTF-8 bytes of their targets.
      final: windows for the evaluation after the last step.
      final_bytes: UTF-8 bytes of their targets.
    """

    name: str
    weight: float
    validation: EvalBatches
    validation_bytes: int
    final: EvalBatches
    final_bytes: int


@dataclasses.dataclass(frozen=True)
class TrainingData:
    """The batches that a model is trained and evaluated on.

    Attributes:
      train: shuffled batches, indexed by step.
      validation: held-out windows for the periodic evaluations.
      validation_bytes: UTF-8 bytes of their targets.
      final: all held-out windows, for the evaluation after the last step.
      final_bytes: UTF-8 bytes of their targets.
      tokenizer_hash: part of a checkpoint's identity.
      mixture: held-out windows of each corpus of a mixture, of which the fields above have the
        first; () for one corpus.
      teacher: the model that trainings with `training.teacher` distill; None for none.
      features: folder of the stored features of trainings that have them.
    """

    train: TrainBatches
    validation: EvalBatches
    validation_bytes: int
    final: EvalBatches
    final_bytes: int
    tokenizer_hash: str
    mixture: tuple[HeldOut, ...] = ()
    teacher: Teacher | None = None
    features: Path | None = None


def _unchanged(batch: Batch, teacher_share: float, rest: object) -> Batch:
    return batch


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The compiled programs of one model.

    Attributes:
      train_step: (state without its rest, the rest, batch, learning rate) -> (state without its
        rest, StepReport); donates the state. With training.skip_spikes it also takes the highest
        accepted loss.
      eval_step: (params, the rest, batch with weights) -> metrics of `whole.evaluation`.
      seconds: compile time.
      place_layouts: what is not trained, with canonical layouts in numpy -> with layouts as the
        programs take them; fixed if the programs are specialised to them.
      gradient_norms: (params, the rest, iterator over training batches) -> norms of the dense
        gradient's blocks; None if the evolution does not read them.
      update_seconds: measured seconds of one layout update.
      start_state: (variant's name, training, identity of its checkpoints, step of the newest
        checkpoint or None, function that returns the state of that checkpoint or the initial one,
        `from_seed`, `completed` of `training.saved_state`) -> first state of the run; for an
        executor that stores states itself, else None.
      timeline: () -> spans of the last step; none if the executor records none.
      close: () -> None; releases what `start_state` holds, for another run of this process.
      teach: (batch, `TrainingConfig.teacher_share`, the rest) -> batch with what a teacher says of
        it, or with stored features.
    """

    train_step: Callable
    eval_step: Callable
    seconds: float
    place_layouts: Callable = stacks.fixed_layouts
    gradient_norms: Callable | None = None
    update_seconds: float = 0.0
    start_state: Callable | None = None
    timeline: Callable = lambda: ()
    close: Callable = lambda: None
    teach: Callable[[Batch, float, Any], Batch] = _unchanged

    def rest(self, state: TrainState) -> Any:
        """Returns what is not trained, as the programs take it."""
        return self.place_layouts(without_left_out(state.rest))


def compile_programs(
    phase_specs: Sequence[PhaseSpec],
    training: TrainingConfig,
    data: TrainingData,
    evolution: EvolutionConfig | None = None,
    cache: dict | None = None,
    executor: Executor = SINGLE_DEVICE,
    change: Change = change_model,
) -> list[Compiled]:
    """Compiles the train and eval step of each model that is trained in turn.

    Also runs every transition and layout update once, on temporary states, so that nothing
    compiles during training.

    Args:
      phase_specs: from `layouts.evolution.phase_specs`.
      training: batch shape and optimizer settings.
      data: gives the shapes of the batches.
      evolution: how layouts or model change; None for static.
      cache: compiled programs by their inputs; pass the same dict to several calls to compile
        equal programs once.
      executor: how the programs are sharded and run.
      change: makes the state of a phase that of the next one.

    Returns:
      One `Compiled` per entry of `phase_specs`.
    """
    evolution, cache = evolution or EvolutionConfig(), {} if cache is None else cache
    method = METHODS[evolution.method]
    programs = []
    for phase in phase_specs:
        # The rate is an argument of the step, so phases that differ in their schedule alone share a
        # program.
        shape = dataclasses.replace(
            training, steps=1, learning_rate=1.0, warmup=0.0, warmup_steps=(), seed=0
        )
        # A teacher has arrays and no hash.
        key = phase.model, phase.runtime_layouts, shape, executor, id(data.teacher)
        if key not in cache:
            cache[key] = _compile(phase, training, data, executor)
        programs.append(cache[key])
        if method.update is not None:
            programs[-1] = _with_updates(programs[-1], phase, training, data, evolution, executor)
    # Changes between phases compile programs too.  One dry change here, and a phase begins at
    # once.
    for before, after in itertools.pairwise(phase_specs):
        state = initial_state(before.model, training, executor)
        batch = executor.put(data.train.example, data.train.batch_size)
        batches = itertools.repeat(batch)
        convert_state(state, before.model, after.model, batches, executor, change)
    return programs


def _compile(phase, training, data, executor):
    start = time.perf_counter()
    model = phase.model
    batch = executor.put(data.train.example, data.train.batch_size)
    teach: Callable[[Batch, float, Any], Batch] = _unchanged
    example = batch
    if training.teacher:
        if data.teacher is None:
            raise UserError(
                f"training.teacher={training.teacher}: only the main job reads a teacher; leave it "
                "out."
            )
        learn = data.teacher.program(model, executor, batch, training)
        example, teach = learn(batch, 1.0), lambda batch, share, rest: learn(batch, share)
    if training.stored_features != "no":
        from sparse_dataflow.core.training.features import StoredFeatures

        features = StoredFeatures(model, training.stored_features, data.features)
        add = features.program()
        example, teach = features.example(batch), lambda batch, share, rest: add(batch, rest)
    if isinstance(executor, MultiProgramExecutor):
        programs = executor.programs(model, training, data, phase.runtime_layouts)
        programs["place_layouts"] = _with_newest(programs["place_layouts"])
        return Compiled(**programs, seconds=time.perf_counter() - start, teach=teach)
    assert isinstance(executor, TracedExecutor)
    place = functools.partial(executor.place_layouts, model=model, changing=phase.runtime_layouts)
    shapes = executor.placed_shapes(abstract_state(model, training, executor), model)
    # With concrete layouts: a program of a static one is specialised to it.
    rest = stacks.with_layouts(model, shapes.rest)
    rest = place(without_left_out(rest))
    replicated = executor.replicated()
    train_step = jitted_train_step(model, training, executor, shapes)
    eval_step = jax.jit(make_eval_step(model, executor), out_shardings=replicated)
    held_out = executor.put(data.validation[0], data.validation.batch_size)
    arguments = _step_arguments(example, 0.0, no_loss_limit(training))
    return Compiled(
        # What is not trained is an argument of its own: the state is donated, and masks and layouts
        # are used again.
        train_step.lower(shapes._replace(rest=()), rest, *arguments).compile(),
        eval_step.lower(shapes.params, rest, held_out).compile(),
        time.perf_counter() - start,
        _with_newest(place),
        teach=teach,
    )


def _with_newest(place):
    """Returns a `place_layouts` that keeps its last result while what is not trained has the same
    arrays, as that of a state has from one update to the next."""
    previous: list = []
    placed: Any = None

    def newest(rest):
        nonlocal previous, placed
        leaves = jax.tree.leaves(rest)
        same = len(leaves) == len(previous) and all(map(operator.is_, leaves, previous))
        if placed is None or not same:
            previous, placed = leaves, place(rest)
        return placed

    return newest


def _with_updates(programs, phase, training, data, evolution, executor):
    """Adds `gradient_norms` and `update_seconds`; runs two updates and times the second."""
    model, method = phase.model, METHODS[evolution.method]
    if method.reads_gradients:
        measure = programs.gradient_norms or jax.jit(
            functools.partial(executor.growth_norms, model),
            out_shardings=executor.replicated(),
        )
        division = portions(training, evolution.sequences)
        programs = dataclasses.replace(
            programs,
            gradient_norms=lambda params, rest, batches: mean_norms(
                functools.partial(measure, params, rest), batches, division
            ),
        )
    state = initial_state(model, training, executor)
    batch = executor.put(data.train.example, data.train.batch_size)
    # The first update compiles; the second is timed.
    for _ in range(2):
        # Updates get the output state of a step, as in training.
        state, _ = run_step(programs, state, batch, 0.0, no_loss_limit(training))
        jax.block_until_ready(state.params)
        start = time.perf_counter()
        share, batches = lambda _: evolution.share, itertools.repeat(batch)
        state = evolve_layouts(state, model, programs, evolution, share, batches, executor)
        seconds = time.perf_counter() - start
    return dataclasses.replace(programs, update_seconds=seconds)


def refuse_row_shards(evolution: EvolutionConfig, executor: Executor) -> None:
    """Raises UserError if updates could move blocks between shards of a row-parallel weight."""
    shards = executor.tensor_shards
    if evolution.row_shards % shards:
        raise UserError(
            f"--set evolution.row_shards={evolution.row_shards} lets blocks move between the "
            f"mesh's {shards} tensor shards, which must store equally many; legal: multiples of "
            f"{shards}."
        )


def no_loss_limit(training: TrainingConfig) -> np.float32 | None:
    """Returns the `limit` of `run_step` that accepts every finite loss."""
    return np.float32(np.inf) if training.skip_spikes else None


def run_step(
    programs: Compiled,
    state: TrainState,
    batch: Batch,
    learning_rate: float,
    limit=None,
    teacher_share: float = 1.0,
) -> tuple[TrainState, StepReport]:
    """Runs one training step.

    Args:
      programs: of the state's model.
      state: as placed by the executor, with canonical layouts; donated but for its rest.
      batch: as put by the executor.
      limit: highest accepted loss; None if the programs were compiled without a limit.
      teacher_share: see `TrainingConfig`.
    """
    rest = programs.rest(state)
    arguments = _step_arguments(programs.teach(batch, teacher_share, rest), learning_rate, limit)
    after, report = programs.train_step(state._replace(rest=()), rest, *arguments)
    return after._replace(rest=state.rest), report


def _step_arguments(batch, learning_rate, limit):
    """Returns a train step's arguments after the state."""
    return batch, np.float32(learning_rate), *(() if limit is None else (limit,))


def evolve_layouts(
    state,
    model,
    programs: Compiled,
    evolution: EvolutionConfig,
    share: Callable[[int], float],
    batches: Iterator,
    executor: Executor = SINGLE_DEVICE,
):
    """Returns the state after one layout update.

    Args:
      state: as placed by the executor; must not be used again.
      model: config of the state's model.
      evolution: the method and its settings.
      share: number of stored blocks of a weight -> fraction of them to exchange.
      batches: training batches, as put by the executor, for methods that read gradients.
      executor: that the programs were compiled for.
    """
    method = METHODS[evolution.method]
    choose = method.update
    assert choose is not None
    norms = None
    if method.reads_gradients:
        assert programs.gradient_norms is not None
        norms = programs.gradient_norms(state.params, programs.rest(state), batches)
    # Layouts are chosen on the canonical order of blocks, so that all meshes choose alike.
    state = executor.canonical(state, model)
    state = update_layouts(
        state, model, choose, share, norms, evolution.row_shards, method.mask_gain or 0.0
    )
    return executor.place(state, model)


def convert_state(
    state,
    before,
    after,
    batches: Batches,
    executor: Executor = SINGLE_DEVICE,
    change: Change = change_model,
):
    """Returns the state of model `before`, as placed, as a state of model `after`."""
    state = change(executor.canonical(state, before), before, after, batches)
    return executor.place(state, after)
