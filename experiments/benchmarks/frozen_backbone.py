"""Steps of a side network and of adapters on one frozen model; see `experiments.side_memory`."""

import concurrent.futures
import multiprocessing
import resource
import sys

import numpy as np

from sparse_dataflow.commands import measurement
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.training import cost
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.detect import cpu_name
from sparse_dataflow.planner import memory, plan_memory
from sparse_dataflow.runs.adapted_model import with_adapters

from . import paired, steps

HEAD = 64
"""Features of a head."""
VOCABULARY = 8192
BACKBONES = ("dense", "int8", "sparse")
TRAININGS = ("lora", "side")
REMATS = ("none", "keep", "full")


def measure(options) -> None:
    """Measures, prints and writes; see the experiment.

    Raises:
      UserError: the width is no multiple of a head.
    """
    if options.width % HEAD:
        raise UserError(f"width={options.width} is not legal; legal: multiples of {HEAD}.")
    name = f"side_memory_{options.width}x{options.layers}"
    measurement.keep(options.keep, name, cpu_name(), _results(options))


def _results(options):
    """Yields what is known after each row."""
    facts: dict = {"options": {n: v for n, v in vars(options).items() if n != "keep"}, "rows": []}
    # First: a new process begins with the largest memory that this one had.
    peaks = _peaks(options)
    rows = [(backbone, "none", peaks) for backbone in BACKBONES]
    for row in rows + [("dense", remat, None) for remat in REMATS[1:]]:
        facts["rows"].append(_row(options, *row))
        yield facts


def _peaks(options):
    """Returns the resident memory of each training on dense weights, in a process of its own."""
    context = multiprocessing.get_context("spawn")

    def peak(name):
        with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
            return pool.submit(_peak_bytes, options, name).result()

    return {name: peak(name) for name in TRAININGS}


def _row(options, backbone, remat, peaks=None):
    """Returns the bytes on one backbone; with `peaks` also the seconds, and on dense weights the
    `peaks`."""
    runs = {name: _training(options, name, backbone) for name in TRAININGS}
    row: dict = {"backbone": backbone, "remat": remat}
    seconds = {}
    for name, training in runs.items():
        model = _model(options, training, backbone, remat)
        step = steps.compiled_step(model, training, steps.random_tokens(model, training))
        flops = cost.flops_per_token(model, training.sequence, adapters=True).total
        row[name] = {
            "program_bytes": step.step_bytes,
            "planned_bytes": plan_memory.training_bytes(model, training).total,
            "trained": memory.term_count(model),
            "flops_per_token": flops,
        }
        seconds[name] = step.run
    row["memory_ratio"] = row["side"]["program_bytes"] / row["lora"]["program_bytes"]
    if peaks:
        times = paired.paired_seconds(seconds, options.rounds)
        row |= paired.paired_ratio(times["side"], times["lora"], "seconds_ratio")
        for name, each in times.items():
            row[name]["step_seconds"] = float(np.median(each))
    if peaks and backbone == BACKBONES[0]:
        row = {**row, **{name: row[name] | peaks[name] for name in TRAININGS}}
        grown = [peaks[n]["peak_bytes"] - peaks[n]["before_bytes"] for n in ("side", "lora")]
        row["resident_ratio"] = grown[0] / max(1, grown[1])
    print(_line(row), flush=True)
    return row


def _line(row):
    gigabytes = [row[name]["program_bytes"] / 1e9 for name in ("side", "lora")]
    line = f"{row['backbone']:>6} {row['remat']:>4}: side {gigabytes[0]:.2f} GB, LoRA "
    line += f"{gigabytes[1]:.2f} GB, {row['memory_ratio']:.2f}"
    if "seconds_ratio" in row:
        seconds = [row[name]["step_seconds"] for name in ("side", "lora")]
        line += (
            f"; {seconds[0]:.2f} and {seconds[1]:.2f} s, {row['seconds_ratio']:.2f} "
            f"({row['seconds_ratio_low']:.2f}-{row['seconds_ratio_high']:.2f})"
        )
    if "resident_ratio" in row:
        line += f"; resident {row['resident_ratio']:.2f}"
    return line


def _training(options, name, backbone):
    trained = {"lora": {"adapter_rank": options.rank}, "side": {"side_width": options.side_width}}
    return TrainingConfig(
        steps=1, batch=options.batch, sequence=options.sequence,
        frozen_dtype="int8" if backbone == "int8" else "compute", **trained[name],
    )  # fmt: skip


def _model(options, training, backbone, remat):
    width = options.width
    base = ModelConfig(
        options.layers, width, width // HEAD, 4 * width, VOCABULARY, options.sequence, remat=remat
    )
    if backbone == "sparse":
        base = base.with_linears(LinearSpec("block_sparse", "monarch", 1 / 8, block=width // 16))
    rank, dtype = training.adapter_rank, training.frozen_dtype
    return with_adapters(base, rank, dtype, side_width=training.side_width)


def _peak_bytes(options, name):
    """Returns the largest resident memory before and after two steps in this process."""

    def resident():
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    training = _training(options, name, BACKBONES[0])
    model = _model(options, training, BACKBONES[0], "none")
    before = resident()
    step = steps.compiled_step(model, training, steps.random_tokens(model, training))
    for _ in range(2):
        float(step.run().loss)
    return {"before_bytes": before, "peak_bytes": resident()}
