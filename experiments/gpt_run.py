"""The main job: train a GPT, sparse, dense or both side by side, into one run folder."""

import contextlib
import datetime
import functools
import importlib.metadata
import platform
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments import (
    devices,
    flags,
    memory_check,
    recipes,
    relay_plan,
    run_folder,
    run_report,
    step_plan,
)
from experiments.recipes import Variant
from sparse_dataflow.data import cache
from sparse_dataflow.data.batches import EvalBatches, TrainBatches
from sparse_dataflow.data.corpora import load_corpus
from sparse_dataflow.data.tokenizer import Tokenizer, load_tokenizer
from sparse_dataflow.data.tokens import prepare_tokens
from sparse_dataflow.distributed import processes
from sparse_dataflow.distributed.clock import Clock
from sparse_dataflow.files.errors import TEMPORARY
from sparse_dataflow.files.redaction import redacted_json
from sparse_dataflow.hardware import detect as hardware
from sparse_dataflow.hardware.host_memory import keep_freed_memory
from sparse_dataflow.optim.train_state import TrainState
from sparse_dataflow.parallel.executor import ONE_DEVICE, Executor
from sparse_dataflow.parallel.relay.executor import RelayExecutor
from sparse_dataflow.planning import cost, memory
from sparse_dataflow.sparsity.allocation import allocation_table
from sparse_dataflow.training import goodput, starting_point
from sparse_dataflow.training.loop import Trainer
from sparse_dataflow.training.metrics import say
from sparse_dataflow.training.phases import refuse_unfit
from sparse_dataflow.training.programs import Compiled, TrainingData, compile_programs
from sparse_dataflow.training.turns import advance_side_by_side

EVALUATION_WINDOWS = 64
FINAL_WINDOWS = 2048
EVALUATIONS_A_RUN = 8


def run(experiment: str, values, groups, sparse: bool) -> int:
    """Trains what the flags say and leaves a run folder with a report.

    Args:
      experiment: its module name, "gpt13b_sparse".
      values: checked flags.
      groups: the flags that the experiment has.
      sparse: whether the model is the block-sparse one; its dense twin runs where --twin says so.

    Returns:
      The exit status: TEMPORARY where SIGTERM, which is how a machine is taken away, ended it after
      saving; else 0.

    Raises:
      UserError: in words, before the first step where it can be known then.
    """
    keep_freed_memory()
    clock = Clock()
    with devices.joined(experiment, values, groups, clock):
        if values.describe == "yes":
            _describe(values, sparse)
            return 0
        return _run(experiment, values, groups, sparse, clock)


def _describe(values, sparse):
    chip = hardware.detect(["float32" if values.dtype == "auto" else values.dtype])
    names = recipes.settle(values, jax.default_backend(), chip.memory_bytes, sparse)
    executor, variants = devices.executor(values), recipes.variants(values, names)
    devices.check(executor, values, variants, None)
    if processes.first():
        print(devices.printed(executor, variants))


def _run(experiment, values, groups, sparse, clock):
    with run_folder.opened(experiment, values) as folder:
        chip = hardware.detect(["float32" if values.dtype == "auto" else values.dtype])
        names = _settle(values, chip, sparse)
        saved = run_folder.read(folder, experiment, names) if values.resume else None
        # Refuses what cannot be trained, before any work.
        executor, wanted = devices.executor(values), recipes.variants(values, names)
        devices.check(executor, values, wanted, chip.memory_bytes)
        if isinstance(executor, RelayExecutor):
            relay_plan.tell(values, wanted, chip, executor)
        elif executor == ONE_DEVICE:
            memory_check.refuse_too_large(values, wanted, chip.memory_bytes)

        corpus = load_corpus(values.corpus, cache.FOLDER)
        tokenizer = _tokenizer(values, folder, corpus)
        if saved:
            run_folder.refuse_other_data(folder, saved, corpus, tokenizer)
        variants = recipes.variants(values, names, tokenizer.vocab_size)
        if saved:
            variants = [
                v.with_steps(saved["variants"][v.name]["training"]["steps"]) for v in variants
            ]
            run_folder.refuse_other_variants(folder, saved, variants)
        for v in variants:
            _say_allocation(v)
        data = training_data(values, variants[0], corpus, tokenizer, executor)
        if values.steps:
            _refuse_unfit(variants)
        programs: dict[str, list[Compiled]] = {}
        known: dict = {}
        for v in variants:
            say(f"{v.name:>6}: compiling")
            with clock.during("compile"):
                programs[v.name] = compile_programs(
                    v.phase_specs, v.training, data, v.evolution, known, executor
                )
        if not saved:
            with clock.during("compile"):
                steps = step_plan.planned_steps(values, variants, programs, data, executor)
            steps = processes.told(steps)
            variants = [v.with_steps(steps[v.name]) for v in variants]
            _refuse_unfit(variants)
            saved = _config(experiment, values, groups, variants, corpus, tokenizer, chip)
            run_folder.start(folder, saved, tokenizer)

        ledger = goodput.Ledger(folder, clock)
        with stop_on_signals() as stop, contextlib.ExitStack() as stack:
            trainers = []
            for position, v in enumerate(variants):
                how = _Laid(data, programs[v.name], chip, position, executor, clock)
                t = _trainer(values, v, folder, how)
                stack.push(functools.partial(_close, t))
                trainers.append(t)
                if values.resume:
                    say(f"{t.name:>6}: goes on after step {t.step} of {t.training.steps}")
            finished = _train(trainers, stop, ledger)
        ledger.note(ended=not finished)
        if not finished:
            again = f"python -m experiments.{experiment} --resume={shlex.quote(str(folder))}"
            say(f"stopped; go on with: {again}")
            return stopped_status(stop())
        if processes.first():
            for v in variants:
                timeline = programs[v.name][-1].timeline
                if timeline is not None:
                    say(f"{v.name:>6}: {relay_plan.measured(timeline())}")
            seconds = ledger.seconds(sum(t.seconds for t in trainers))
            report = run_report.write(folder, saved, trainers, corpus, tokenizer, chip, seconds)
            ledger.note(ended=True)
            say(report.headline)
            say(goodput.told(seconds))
            say(f"report: {report.path}")
    return 0


def _close(trainer, kind, error, trace) -> None:
    """Ends a trainer well; where an error came in one of several processes, the others are told of
    it instead of being waited for."""
    if kind is None or jax.process_count() == 1:
        trainer.close()


def _settle(values, chip, sparse) -> list[str]:
    """`recipes.settle`, in one line where the scale was chosen here; returns variants' names."""
    chosen = values.scale == "auto"
    names = recipes.settle(values, jax.default_backend(), chip.memory_bytes, sparse)
    if chosen and chip.memory_bytes is not None:
        specs = recipes.linears(values) if sparse else {}
        say(memory.scale_message(chip.memory_bytes, values.scale, specs))
        fit = memory_check.fitting(recipes.variants(values, names), chip.memory_bytes)
        if fit and fit != (values.remat, values.accumulation):
            values.remat, values.accumulation = fit
            say(f"to fit the memory: --remat={fit[0]} --accumulation={fit[1]}")
    return names


def _tokenizer(values, folder, corpus) -> Tokenizer:
    """That of the weights to begin with, or of the flags."""
    if not values.init_from:
        return load_tokenizer(values.tokenizer, corpus, recipes.vocab_size(values), cache.FOLDER)
    if values.resume:
        return Tokenizer.load(folder / run_folder.TOKENIZER)
    return starting_point.read(values.init_from).tokenizer


def _start(values, variant, executor) -> Callable[[], TrainState] | None:
    """What gives the state before the first step where --init_from names weights; a resumed run
    asks for it only where it has no checkpoint."""
    if not values.init_from:
        return None

    def begun():
        weights = starting_point.read(values.init_from)
        model = variant.phases[0].model
        return starting_point.begun_state(weights, model, variant.training, executor)

    return begun


def _say_allocation(variant):
    if variant.model.sparse_projections:
        sequence = variant.training.sequence
        flops = lambda model: cost.flops_per_token(model, sequence).sections  # noqa: E731
        say(allocation_table(variant.model, flops))


def training_data(values, variant, corpus, tokenizer, executor=ONE_DEVICE) -> TrainingData:
    """The batches of a variant's shape, drawn by `values.seed`, and the held-out windows."""
    tokens = prepare_tokens(corpus, tokenizer, cache.FOLDER)
    say(
        f"corpus {corpus.name}: {tokens.train.documents:,} documents, "
        f"{len(tokens.train.tokens):,} training tokens; "
        f"{tokens.validation.documents:,} documents held out"
    )
    shape = variant.training.batch, variant.training.sequence
    rows = executor.rows(variant.training.batch)
    periodic = EvalBatches(tokens.validation.tokens, *shape, EVALUATION_WINDOWS, rows)
    final = EvalBatches(tokens.validation.tokens, *shape, FINAL_WINDOWS, rows)
    return TrainingData(
        TrainBatches(tokens.train.tokens, *shape, values.seed, rows),
        periodic,
        periodic.total_bytes(tokenizer.token_bytes),
        final,
        final.total_bytes(tokenizer.token_bytes),
        tokenizer.content_hash,
    )


def _refuse_unfit(variants):
    for v in variants:
        refuse_unfit(v.model, v.evolution, v.training.steps)


def _config(experiment, values, groups, variants, corpus, tokenizer, chip) -> dict:
    config = {
        "experiment": experiment,
        "command": [f"python -m experiments.{experiment}", *sys.argv[1:]],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": _versions(),
        "machine": f"{chip.name} ({platform.machine()})",
        "flags": flags.as_dict(values, groups),
        "corpus": {"name": corpus.name, "hash": corpus.content_hash},
        "tokenizer": tokenizer.content_hash,
        "variants": {v.name: v.to_json() for v in variants},
        **({"init_from": starting_point.read(values.init_from).about} if values.init_from else {}),
    }
    return redacted_json(config)


class _Laid(NamedTuple):
    """What a trainer is given beside its variant."""

    data: TrainingData
    programs: list[Compiled]
    chip: Any
    position: int
    executor: Executor
    clock: Clock


def _trainer(values, variant: Variant, folder: Path, laid: _Laid) -> Trainer:
    executor = laid.executor
    eval_every = values.eval_every or max(1, variant.training.steps // EVALUATIONS_A_RUN)

    def mfu(model, speed):
        if getattr(values, "depth_schedule", "constant") != "constant":
            return None  # The FLOPs of a step change with its depth.
        flops = cost.flops_per_token(model, variant.training.sequence).total
        return cost.mfu(flops, speed / executor.devices, laid.chip, model.compute_dtype)

    return Trainer(
        variant.name,
        folder / variant.name,
        variant.model,
        variant.training,
        laid.data,
        laid.programs,
        eval_every=eval_every,
        checkpoint_every=values.checkpoint_every or 2 * eval_every,
        evolution=variant.evolution,
        executor=executor,
        mfu=mfu,
        position=laid.position,
        start=_start(values, variant, executor),
        clock=laid.clock,
    )


def _train(trainers: list[Trainer], stop, ledger: goodput.Ledger) -> bool:
    """Trains and evaluates all to the end; False if `stop()` came before, after saving."""
    ledger.note()
    for _ in advance_side_by_side(trainers, stop):
        ledger.note(at_once=False)
    finished = all(trainer.finished for trainer in trainers)
    if finished:
        for trainer in trainers:
            trainer.evaluate_finally()
    return finished


@contextlib.contextmanager
def stop_on_signals():
    """Yields a function that tells which of SIGINT and SIGTERM came first, 0 while none did.

    A second SIGINT interrupts.
    """
    came = []

    def note(number, frame):
        came.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        say("stopping: finishing this step and saving (Ctrl-C again to stop at once)")

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: came[0] if came else 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stopped_status(number: int) -> int:
    """Exit status of a run that this signal ended after saving; the same on all processes.

    SIGTERM is how a machine is taken away: TEMPORARY asks the scheduler for another start.  One who
    presses Ctrl-C is there to do so: 0.
    """
    return TEMPORARY if processes.anywhere(number == signal.SIGTERM) else 0


def _versions():
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tokenizers")
    return {
        "python": platform.python_version(),
        "sparse_dataflow": importlib.metadata.version("sparse_dataflow"),
        **{package: importlib.metadata.version(package) for package in packages},
    }
