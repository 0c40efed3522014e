"""The main job: train a GPT, sparse, dense or both side by side, into one run folder."""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np

from experiments import flags, recipes, run_report
from sparse_dataflow.data.batches import EvalBatches, TrainBatches
from sparse_dataflow.data.corpora import load_corpus
from sparse_dataflow.data.tokenizer import load_tokenizer
from sparse_dataflow.data.tokens import prepare_tokens
from sparse_dataflow.errors import UserError
from sparse_dataflow.execution.host_memory import keep_freed_memory
from sparse_dataflow.models.sizes import SIZES, ModelConfig
from sparse_dataflow.planning import cost, hardware, memory
from sparse_dataflow.training.loop import (
    Trainer,
    TrainingData,
    advance_side_by_side,
    compile_programs,
)
from sparse_dataflow.training.metrics import say
from sparse_dataflow.training.optimizer import TrainingConfig
from sparse_dataflow.training.step import initial_state

CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "sparse_dataflow"
EVALUATION_WINDOWS = 128
FINAL_WINDOWS = 2048
EVALUATIONS_A_RUN = 10


@dataclasses.dataclass(frozen=True)
class Variant:
    """One model of a run: its name ("sparse" or "dense"), what it is and how it is trained."""

    name: str
    model: ModelConfig
    training: TrainingConfig


def run(experiment: str, values, groups, sparse: bool) -> None:
    """Trains what the flags say and leaves a run folder with a report.

    Args:
      experiment: its module name, "gpt13b_sparse".
      values: checked flags.
      groups: the flags that the experiment has.
      sparse: whether the model is the block-sparse one; its dense twin runs where --twin says so.

    Raises:
      UserError: in words, before the first step where it can be known then.
    """
    keep_freed_memory()
    folder = _run_folder(experiment, values)
    backend = jax.default_backend()
    chip = hardware.detect(["float32" if values.dtype == "auto" else values.dtype])
    values.scale = _scale(values, backend, chip, recipes.linears(values) if sparse else {})
    names = ["sparse" if sparse else "dense"]
    if sparse:
        if values.twin == "auto":
            values.twin = "yes" if values.scale in recipes.LAPTOP_SCALES else "no"
        names += ["dense"] * (values.twin == "yes")

    dense = recipes.model_config(values, values.scale, SIZES[values.scale].vocab_size, backend)
    if sparse:
        recipes.sparse_config(values, dense)  # refuses an illegal layout before any work
    corpus = load_corpus(values.corpus, CACHE)
    vocab_size = values.vocab_size or SIZES[values.scale].vocab_size
    tokenizer = load_tokenizer(values.tokenizer, corpus, vocab_size, CACHE)
    tokens = prepare_tokens(corpus, tokenizer, CACHE)
    say(
        f"corpus {corpus.name}: {tokens.train.documents:,} documents, "
        f"{len(tokens.train.tokens):,} training tokens; "
        f"{tokens.validation.documents:,} documents held out"
    )
    dense = dataclasses.replace(dense, vocab_size=tokenizer.vocab_size)
    models = {"dense": dense, "sparse": recipes.sparse_config(values, dense) if sparse else None}
    shape = recipes.training_config(values, values.scale, dense, steps=1)
    held_out = tokens.validation.tokens
    periodic = EvalBatches(held_out, shape.batch, shape.sequence, EVALUATION_WINDOWS)
    final = EvalBatches(held_out, shape.batch, shape.sequence, FINAL_WINDOWS)
    data = TrainingData(
        TrainBatches(tokens.train.tokens, shape.batch, shape.sequence, seed=values.seed),
        periodic,
        periodic.total_bytes(tokenizer.token_bytes),
        final,
        final.total_bytes(tokenizer.token_bytes),
        tokenizer.content_hash,
    )

    programs, variants = {}, []
    for name in names:
        training = recipes.training_config(values, values.scale, models[name], steps=1)
        say(f"{name:>6}: compiling")
        programs[name] = compile_programs(
            models[name], training, data, initial_state(models[name], training)
        )
        variants.append(Variant(name, models[name], training))
    config_file = folder / "config.json"
    if values.resume:
        config = json.loads(config_file.read_text())
        _refuse_other_experiment(config, experiment, values.resume)
        steps = {name: config["variants"][name]["training"]["steps"] for name in names}
    else:
        steps = _planned_steps(values, variants, programs, data)
    variants = [
        dataclasses.replace(v, training=dataclasses.replace(v.training, steps=steps[v.name]))
        for v in variants
    ]
    if not values.resume:
        config = {
            "experiment": experiment,
            "command": [f"python -m experiments.{experiment}", *sys.argv[1:]],
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": _versions(),
            "machine": f"{chip.name} ({platform.machine()})",
            "flags": flags.as_dict(values, groups),
            "corpus": {"name": corpus.name, "hash": corpus.content_hash},
            "tokenizer": tokenizer.content_hash,
            "variants": {
                v.name: {
                    "model": v.model.to_json(),
                    "training": dataclasses.asdict(v.training),
                }
                for v in variants
            },
        }
        _write_new(folder, config, tokenizer)

    trainers = [
        Trainer(
            v.name,
            folder / v.name,
            v.model,
            v.training,
            data,
            programs[v.name],
            eval_every=values.eval_every or max(1, v.training.steps // EVALUATIONS_A_RUN),
            checkpoint_every=values.checkpoint_every
            or values.eval_every
            or max(1, v.training.steps // EVALUATIONS_A_RUN),
            mfu=_mfu(v, chip),
            position=position,
        )
        for position, v in enumerate(variants)
    ]
    if values.resume:
        for t in trainers:
            say(f"{t.name:>6}: goes on after step {t.step} of {t.training.steps}")
    finished = _train(trainers)
    if not finished:
        say(f"stopped; go on with: python -m experiments.{experiment} --resume={folder}")
        return
    report = run_report.write(folder, config, trainers, corpus, tokenizer, chip)
    say(report.headline)
    say(f"report: {report.path}")


def _scale(values, backend, chip, linears):
    if values.scale != "auto":
        return values.scale
    scale = memory.choose_scale(chip.memory_bytes, backend, linears)
    if chip.memory_bytes is not None:
        say(memory.scale_message(chip.memory_bytes, scale, linears))
    return scale


def _run_folder(experiment, values):
    """The run's folder, proven writable; nothing is kept of one that is refused."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = Path(values.out or f"runs/{experiment}-{stamp}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"Run folder {folder} cannot be written: {error.strerror}; name another with --out."
        ) from error
    return folder


def _write_new(folder, config, tokenizer):
    try:
        tokenizer.save(folder / "tokenizer.json")
        partial = folder / "config.json.new"
        partial.write_text(json.dumps(config, indent=1) + "\n")
        partial.replace(folder / "config.json")
    except OSError as error:
        raise UserError(f"Run folder {folder} cannot be written: {error.strerror}.") from error


def _refuse_other_experiment(config, experiment, folder):
    if config["experiment"] != experiment:
        raise UserError(
            f"{folder} is a run of {config['experiment']}; go on with it by "
            f"python -m experiments.{config['experiment']} --resume={folder}."
        )


def _planned_steps(values, variants, programs, data):
    """Steps of each variant: as many as the flag says, or as fit into its minutes.

    Step times are taken in turn, on a throw-away state, so that all see the same machine; the plan
    is kept in config.json and a resumed run keeps it.
    """
    if values.steps:
        return {v.name: values.steps for v in variants}
    states = {v.name: initial_state(v.model, v.training)._replace(tables=()) for v in variants}
    times = {v.name: [] for v in variants}
    tokens = data.train[0]["tokens"]
    for _ in range(6):
        for name in states:
            start = time.perf_counter()
            states[name], report = programs[name].train_step(states[name], tokens, np.float32(0))
            jax.block_until_ready(report)
            times[name].append(time.perf_counter() - start)
    seconds = {name: float(np.median(t[1:])) for name, t in times.items()}
    steps = {name: max(1, round(values.minutes * 60 / s)) for name, s in seconds.items()}
    for name in steps:
        say(f"{name:>6}: {1e3 * seconds[name]:.0f} ms a step, {steps[name]} steps planned")
    return steps


def _mfu(variant, chip):
    flops = cost.flops_per_token(variant.model, variant.training.sequence).total
    dtype = variant.model.compute_dtype
    return lambda tokens_per_second: cost.mfu(flops, tokens_per_second, chip, dtype)


def _train(trainers) -> bool:
    """Trains all to the end; False if a signal stopped them, after saving."""
    with _stop_on_signals() as stop, contextlib.ExitStack() as stack:
        for trainer in trainers:
            stack.callback(trainer.close)
        for _ in advance_side_by_side(trainers, stop):
            pass
        finished = all(trainer.finished for trainer in trainers)
        if finished:
            for trainer in trainers:
                trainer.evaluate_finally()
    return finished


@contextlib.contextmanager
def _stop_on_signals():
    """Yields a function that tells whether SIGINT or SIGTERM came; a second SIGINT interrupts."""
    came = []

    def note(number, frame):
        came.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        say("stopping: finishing this step and saving (Ctrl-C again to stop at once)")

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _versions():
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tokenizers")
    return {
        "python": platform.python_version(),
        "sparse_dataflow": importlib.metadata.version("sparse_dataflow"),
        **{package: importlib.metadata.version(package) for package in packages},
    }
