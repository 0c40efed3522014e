"""Peak memory of pruning a directory layer by layer; see `experiments.prune_memory`."""

import concurrent.futures
import dataclasses
import json
import math
import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file

from sparse_dataflow.commands import library, measurement
from sparse_dataflow.commands.prune import prune
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.files import json_files, output
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.detect import cpu_name
from sparse_dataflow.interchange import tensors
from sparse_dataflow.runs.families import FAMILIES

from . import pruning_bytes

ROW = 64
"""Tokens of a row."""
HEAD = 64
"""Features of a head."""
ROWS = 8
"""Rows of a batch."""
LAYER = "model.layers."


def measure_pruning(options) -> dict:
    """Draws a model, prunes it and reports; see the experiment.

    Raises:
      UserError: the width is no multiple of a head.
    """
    if options.width % HEAD:
        raise UserError(f"width={options.width} is not legal; legal: multiples of {HEAD}.")
    config = library.preset("pico").dense().change(
        **{f"model__{name}": value for name, value in FAMILIES["llama"].items()},
        model__d_model=options.width, model__d_ff=options.hidden, model__num_layers=1,
        model__num_heads=options.width // HEAD,
    )  # fmt: skip
    shallow = library.init(config, jax.random.key(0))
    expected = pruning_bytes.host_bytes(shallow.model, options.tokens)
    print(_table(expected), flush=True)
    facts = {
        "options": {n: v for n, v in dataclasses.asdict(options).items() if n != "keep"},
        "parameters": options.layers * _layer_parameters(shallow.model),
        "formula": expected | {"sum": sum(expected.values())},
    }
    if options.only_formula:
        return facts
    with tempfile.TemporaryDirectory() as folder:
        draw(library.save(shallow, Path(folder) / "one", form="dense"),
             Path(folder) / "dense", options.layers)  # fmt: skip
        # A process of its own, whose peak is that of the pruning alone.
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
            measured = pool.submit(pruned, folder, options).result()
    facts["measured"] = measured
    peak, before = (measured[name] / 1e9 for name in ("peak_bytes", "before_bytes"))
    print(
        f"measured peak {peak:.2f} GB ({before:.2f} GB before the pruning), "
        f"{1e9 * peak / facts['formula']['sum']:.0%} of the formula, in {measured['seconds']:.0f} s"
    )
    name = f"prune_memory_{options.width}x{options.layers}"
    measurement.keep(options.keep, name, cpu_name(), [facts])
    return facts


def draw(source: Path, folder: Path, layers: int) -> None:
    """Writes a Hugging Face directory of drawn weights, of which one layer is in memory.

    Args:
      source: such a directory with one layer, in float32.
      folder: to make.
      layers: number of layers.
    """
    folder.mkdir()
    arrays = load_file(source / tensors.FILE)
    layer_names = [name for name in arrays if name.startswith(LAYER)]
    rng, places = np.random.default_rng(0), {}

    def write(number, shard):
        path = folder / tensors.shard_name(number + 1, layers + 1)
        tensors.write_file(path, tensors.as_dtype(shard, "bfloat16"), {})
        for name, size in tensors.sizes(path).items():
            places[name] = path.name, size

    write(-1, {name: array for name, array in arrays.items() if name not in layer_names})
    for number in range(layers):
        write(number, {
            name.replace(f"{LAYER}0.", f"{LAYER}{number}."): _like(rng, arrays[name])
            for name in layer_names
        })  # fmt: skip
    tensors.write_index(folder, places)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    settings = json_files.load(folder / "config.json")
    settings["num_hidden_layers"] = layers
    (folder / "config.json").write_text(json.dumps(settings, indent=1) + "\n")


def _like(rng, array):
    """Returns a drawn matrix of the deviation of another one; a vector as it is."""
    if array.ndim < 2:
        return array
    return rng.standard_normal(array.shape, np.float32) * array.std()


def pruned(folder: str, options) -> dict[str, float]:
    """Prunes FOLDER/dense; returns the peak resident bytes of this process, and seconds."""
    rng = np.random.default_rng(1)
    rows = math.ceil(options.tokens / ROW)
    ids = rng.integers(0, 256, (rows, ROW))
    batches = np.array_split(ids, math.ceil(rows / ROWS))
    before, began = _peak(), time.perf_counter()
    prune(
        Path(folder) / "dense", batches, block=options.block, rounds=options.rounds,
        out=Path(folder) / "pruned", dtype="bfloat16",
    )  # fmt: skip
    seconds = time.perf_counter() - began
    return {"before_bytes": before, "peak_bytes": _peak(), "seconds": seconds}


def _peak() -> float:
    """Returns the largest resident memory of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # The peak of `getrusage` has that of the parent before exec, too.
        line = next(each for each in status.read_text().splitlines() if each.startswith("VmHWM"))
        return 1024.0 * int(line.split()[1])
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def _layer_parameters(model: ModelConfig) -> int:
    return sum(math.prod(model.projection_shape(name)) for name in model.projections)


def _table(sizes):
    rows = [
        (name, f"{size / 1e9:.3f}") for name, size in (*sizes.items(), ("sum", sum(sizes.values())))
    ]
    return output.markdown(("what is in memory", "GB"), rows)
