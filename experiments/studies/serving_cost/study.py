"""The study: trains the runs that are left, then reports on all of the folder."""

from pathlib import Path

from sparse_dataflow.commands import measurement
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.hardware.detect import cpu_name
from sparse_dataflow.runs.equal_cost import stored_parameters

from . import arms, decoding, report, runs, text, training
from .options import SHARED
from .runs import Cell

WARMUP = 0.05


def narrow_model(options) -> ModelConfig:
    """Returns the narrow dense model of the options, whose cost all arms have."""
    return model_of(options, options.width, options.heads, options.hidden)


def model_of(options, width: int, heads: int, hidden: int) -> ModelConfig:
    """Returns a dense model of the study's kind."""
    return ModelConfig(
        options.layers,
        width,
        heads,
        hidden,
        vocab_size=options.vocabulary,
        max_len=options.sequence,
        norm="rmsnorm",
        activation="relu",
        biases=(),
    )


def study_serving_cost(options) -> int:
    """Trains and reports; see `experiments.serving_cost`.

    Raises:
      UserError: an arm has no shape of the narrow model's cost, or the folder other settings.
    """
    narrow, folder = narrow_model(options), Path(options.out)
    for name in options.arms:
        arms.served_density(narrow, arms.ARMS[name])
    settings = {name: getattr(options, name) for name in SHARED}
    lines = runs.current_lines(runs.read_lines(folder, settings))
    cells = [
        Cell(arm, optimizer, options.schedule, length)
        for optimizer in options.optimizers
        for length in options.lengths
        for arm in options.arms
    ]
    corpus = text.read(options.corpus, options.vocabulary)
    machine = cpu_name()
    for each in runs.pending(lines, cells, options.trials, lambda _: options.seeds):
        recipe = training.Recipe(
            each.cell.optimizer,
            options.learning_rate * each.multiplier,
            options.vector_rate,
            each.cell.schedule,
            WARMUP,
            options.batch,
        )
        result, _ = training.train(
            narrow,
            arms.ARMS[each.cell.arm],
            recipe,
            narrow_steps(narrow, each.cell.length, options.batch),
            each.seed,
            corpus,
        )
        lines.append(runs.append(folder, each, result, machine))
        print(
            f"{runs.now()} {each.cell} x{each.multiplier:g} seed {each.seed}: tuning "
            f"{result['tuning']:.4f} held out {result['held_out']:.4f} in "
            f"{result['seconds']:.0f} s",
            flush=True,
        )
    if options.decode:
        rows = decoding.measure(narrow, options.arms, rounds=options.decode)
        measurement.keep(str(folder), "decoding", machine, [{"rows": rows}])
    report.write(options, narrow, corpus, lines, decoding.read(folder), folder)
    return 0


def narrow_steps(narrow: ModelConfig, length: int, batch: int) -> int:
    """Returns the steps in which the narrow model reads `length` tokens for each weight."""
    steps = length * stored_parameters(narrow) / (batch * narrow.max_len)
    return max(1, round(steps / training.CHUNK)) * training.CHUNK
