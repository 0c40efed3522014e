"""The table that people decide by: a real model pruned and quantised, by shape.

python tests/real/table.py --model=smollm2                    all rows
python tests/real/table.py --model=smollm2 --rows=single_50   some of them

Each row is scored on held-out prose and Python sources, and kept in a file of
experiments/results/real_models; rows that it has are not computed again.  A row that stopped goes
on with its next layer.  `--print` prints the table of the file, and `--write` writes the tables of
all files on docs/evidence/real_models.md.
"""

import argparse
import dataclasses
import datetime
import gc
import math
import time
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np

import sparse_dataflow as sd
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.projection import layer_weights
from sparse_dataflow.core.weights.dense import Dense
from sparse_dataflow.core.weights.weight import Linear
from sparse_dataflow.hardware import detect
from sparse_dataflow.pruning.layer_by_layer import HeldLayers, as_params
from tests.real import models, results, texts

DENSITY_70 = 45 / 64
"""The density nearest to 0.7 that keeps a whole number of inputs of each projection."""

SHAPES = {
    "single_50": ("single weights, half", {"block": 1}),
    "two_of_four": ("2 of 4", {"block": "2:4"}),
    "rows_16": ("rows of 16, half", {"block": "1x16"}),
    "squares_16": ("16 x 16, half", {"block": 16}),
    "narrow": ("narrow, half", {"block": "narrow"}),
    "single_70": ("single weights, 70%", {"block": 1, "density": DENSITY_70}),
    "rows_4": ("rows of 4, half", {"block": "1x4"}),
    "rows_8": ("rows of 8, half", {"block": "1x8"}),
    "squares_4": ("4 x 4, half", {"block": 4}),
}
ROUNDED = {"q8_0_layers": ("Q8_0", "Q8_0"), "q4_0_layers": ("Q4_0", "Q4_0")}
RIVALS = {
    "sparsegpt_50": ("SparseGPT, half", "sparsegpt", False),
    "wanda_50": ("Wanda, half", "wanda", False),
    "sparsegpt_two_of_four": ("SparseGPT, 2 of 4", "sparsegpt", True),
    "wanda_two_of_four": ("Wanda, 2 of 4", "wanda", True),
}
ENGINE = {
    "llama_cpp_float32": ("float32 in llama.cpp", ("F32", "F32")),
    "llama_cpp_q8_0": ("Q8_0 in llama.cpp", ("Q8_0", "Q8_0")),
    "llama_cpp_file": ("the file itself in llama.cpp", ()),
    "llama_cpp_q4_0": ("Q4_0, rounded again, in llama.cpp", ("Q4_0", "Q8_0")),
}
RECOVERED = "recovered_50"
"""The model of the row `single_50`, trained on by `recover.py`."""

ROWS = ("dense", *ENGINE, *ROUNDED, *SHAPES, RECOVERED, *RIVALS, "layers")


class Scored:
    """Held-out texts, and what a model loses on them."""

    def __init__(self, model, tested):
        sides = {"prose": texts.prose(models.FOLDER)[1], "code": texts.code()[1]}
        self.rows = {k: texts.rows_of(model.tokenizer, side, tested) for k, side in sides.items()}

    def perplexity(self, loss):
        """Returns the perplexity of each text by (row) -> mean loss in nats."""
        return {
            name: math.exp(np.mean([float(loss(row)) for row in rows]))
            for name, rows in self.rows.items()
        }

    def score(self, model):
        """Returns the perplexities of a model."""
        loss = jax.jit(sd.loss)
        return self.perplexity(lambda row: loss(model, row[None]))


def calibration(model, tokens):
    """Batches of as many tokens of prose as of Python sources, in turns."""
    sides = [texts.prose(models.FOLDER)[0], texts.code()[0]]
    both = [texts.rows_of(model.tokenizer, side, tokens // 2) for side in sides]
    rows = np.stack(both, axis=1).reshape(-1, texts.WIDTH)
    return np.split(rows, range(8, len(rows), 8))


def as_dense(model):
    """A model with zeros in place of what it does not store."""
    if not model.model.linears:
        return model
    layers = HeldLayers(jax.device_get(model.params))
    config = dataclasses.replace(model.model, linears={}, density_by_depth=())

    def dense_layer(number):
        weights = layer_weights(model.model, layers.layer(number))
        return {
            name: Linear(Dense(np.asarray(value.weight.dense(), np.float32)), value.bias)
            if isinstance(value, Linear)
            else value
            for name, value in weights.items()
        }

    dense = map(dense_layer, range(config.num_layers))
    params = {**layers.ends(), "blocks": as_params(dense, config.num_layers)}
    params = stacks.map_arrays(jnp.asarray, params)
    return dataclasses.replace(model, model=config, params=params)


def in_int8(model):
    """A model whose matrices are rounded to int8, with a scale for each output or token."""

    def rounded(path, leaf):
        if leaf.ndim < 2 or (leaf.ndim == 2 and "embed" not in str(path[0])):
            return leaf
        axis = -1 if "embed" in str(path[0]) else -2
        scale = jnp.max(jnp.abs(leaf), axis=axis, keepdims=True) / 127
        scale = jnp.where(scale == 0, 1.0, scale)
        return jnp.round(leaf / scale) * scale

    return dataclasses.replace(
        model, params=jax.tree_util.tree_map_with_path(rounded, model.params)
    )


def first_layers(model, count):
    """A model of the first layers.  Pruned, they are what they are in a pruned model."""
    smaller = dataclasses.replace(model.model, num_layers=count)
    blocks = jax.tree.map(lambda leaf: leaf[:count], model.params["blocks"])
    return dataclasses.replace(model, model=smaller, params={**model.params, "blocks": blocks})


def with_first_layers(model, pruned):
    """A dense model whose first layers are those of a pruned one, with zeros."""
    count = pruned.model.num_layers
    if count == model.model.num_layers:
        return pruned
    joined = lambda first, all_layers: jnp.concatenate([first, all_layers[count:]])  # noqa: E731
    blocks = jax.tree.map(joined, pruned.params["blocks"], model.params["blocks"])
    return dataclasses.replace(model, params={**model.params, "blocks": blocks})


def stored_bytes(model, groups, each):
    """Bytes of a model: of `each` a value that is not zero, one bit for each group of a layer's
    matrix with zeros, 4 for each scale of int8, and 4 for each number of a norm."""
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
        array = np.asarray(leaf)
        matrix = array.ndim > 2 or (array.ndim == 2 and "embed" in str(path[0]))
        if not matrix:
            total += 4 * array.size
            continue
        # The embedding may have zeros too, but no mask.
        stored = array.size if groups is None or array.ndim == 2 else np.count_nonzero(array)
        total += each * stored
        if groups and stored < array.size:
            total += array.size // groups // 8
        if each == 1:
            outputs = array.shape[0] if array.ndim == 2 else array.shape[0] * array.shape[-1]
            total += 4 * outputs
    return int(total)


def row_of(scored, label, model, groups=None, whole=None):
    """The row of a model: in bfloat16 bytes, and with values in int8.

    Args:
      groups: weights of a group, which has one bit; None for a model without masks.
      whole: the dense model, of whose first layers the model is; None for itself.
    """
    dense = as_dense(model)
    if whole is not None:
        dense = with_first_layers(whole, dense)
    row = {
        "label": label,
        "bytes": stored_bytes(dense, groups, 2),
        "perplexity": scored.score(dense),
    }
    rounded = in_int8(dense)
    row["int8"] = {
        "bytes": stored_bytes(rounded, groups, 1),
        "perplexity": scored.score(rounded),
    }
    return row


def engine_row(scored, label, model, path, types, folder):
    """The row of a file in llama.cpp, by its own logits."""
    from tests.real.llama_logits import Logits
    from tests.real.run import original

    if types:
        path = models.as_type(path, folder, *types)
    engine = Logits(path, context=texts.WIDTH)
    perplexity = scored.perplexity(lambda row: engine.loss([original(model, row)]))
    engine.close()
    return {"label": label, "bytes": path.stat().st_size, "perplexity": perplexity}


def rounded_row(scored, label, model, kind, whole):
    """The row of a model whose layers have the numbers of a type of llama.cpp; ours computes."""
    kind = gguf.GGMLQuantizationType[kind]
    numbers, size = gguf.GGML_QUANT_SIZES[kind]

    def rounded(leaf):
        if leaf.ndim < 3:
            return leaf
        rows = np.ascontiguousarray(np.swapaxes(np.asarray(leaf), -1, -2))
        rows = gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind)
        return jnp.swapaxes(jnp.asarray(rows.reshape(leaf.shape[0], *leaf.shape[:0:-1])), -1, -2)

    blocks = jax.tree.map(rounded, model.params["blocks"])
    count = sum(leaf.size for leaf in jax.tree.leaves(blocks) if leaf.ndim > 2)
    joined = with_first_layers(
        whole, dataclasses.replace(model, params={**model.params, "blocks": blocks})
    )
    whole_bytes = stored_bytes(whole, None, 2) - 2 * count + count * size // numbers
    return {"label": label, "bytes": whole_bytes, "perplexity": scored.score(joined)}


def without_layers(model, batches):
    """A model with half of its layers: those whose outputs differ most from their inputs go last
    (ShortGPT, arXiv 2403.03853)."""
    config, params = model.model, model.params
    x = gpt.embed(config, params["embed"], jnp.asarray(batches[0]))
    layers = HeldLayers(jax.device_get(params))
    angles = []
    run = jax.jit(lambda layer, x: gpt.block(config, layer, x)[0])
    for number in range(config.num_layers):
        y = run(layer_weights(config, layers.layer(number)), x)
        cosine = (x * y).sum(-1) / jnp.linalg.norm(x, axis=-1) / jnp.linalg.norm(y, axis=-1)
        angles.append(float(1 - cosine.mean()))
        x = y
    stay = np.sort(np.argsort(angles)[::-1][: config.num_layers // 2])
    blocks = jax.tree.map(lambda leaf: leaf[stay], params["blocks"])
    smaller = dataclasses.replace(config, num_layers=len(stay))
    return dataclasses.replace(model, model=smaller, params={**params, "blocks": blocks}), stay


def measured(name, model, path, scored, options):
    """Returns a row; see `ROWS`."""
    batches, whole = calibration(model, options.tokens), model
    if options.layers and name != "dense" and name not in ENGINE:
        model = first_layers(model, options.layers)
    if name == "dense":
        return row_of(scored, "dense", model)
    if name in ENGINE:
        label, types = ENGINE[name]
        return engine_row(scored, label, model, path, types, models.FOLDER)
    if name in ROUNDED:
        label, kind = ROUNDED[name]
        return rounded_row(scored, label, model, kind, whole)
    if name == RECOVERED:
        from tests.real import recover

        run = sd.load(recover.RUN)
        tokens = run.step * run.training.batch * run.training.sequence
        label = f"single weights, half, after {tokens:,} tokens"
        return row_of(scored, label, run, 1)
    if name == "layers":
        smaller, stay = without_layers(model, batches)
        return row_of(scored, "half of the layers", smaller) | {"layers": stay.tolist()}
    if name in RIVALS:
        from tests.real import rivals

        label, method, two_of_four = RIVALS[name]
        method = getattr(rivals, method)
        pruned = rivals.pruned_by(method, model, batches, 0.5, two_of_four)
        return row_of(scored, label, pruned, 1, whole)
    label, how = SHAPES[name]
    out = models.FOLDER / f"{options.model}-{name}-{options.tokens}-{model.model.num_layers}"
    if not (out / "config.json").exists():
        sd.prune(model, batches, out=out, **how)
    sides = {"2:4": 1, "narrow": None, 1: 1, 4: 16, 16: 256}.get(how["block"])
    if sides is None and how["block"] != "narrow":
        sides = int(str(how["block"]).split("x")[1])
    return row_of(scored, label, sd.load(out), sides, whole)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2", choices=results.NAMES)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--tokens", type=int, default=16_384, help="of the calibration")
    parser.add_argument("--tested", type=int, default=4096, help="of each held-out text")
    parser.add_argument("--layers", type=int, default=0, help="pruned, the first ones; 0 is all")
    parser.add_argument("--out", default=str(results.FOLDER))
    parser.add_argument("--print", action="store_true")
    parser.add_argument("--write", action="store_true", help="the tables of the page")
    options = parser.parse_args()
    if options.write:
        results.PAGE.write_text(results.page(), "utf-8")
        return
    layers = f"_{options.layers}_layers" if options.layers else ""
    file = Path(options.out) / f"{options.model}{layers}.json"
    if options.print:
        print(results.table(results.load(file)))
        return
    path = getattr(models, options.model)()
    model = sd.load(path)
    scored = Scored(model, options.tested)
    for name in options.rows.split(","):
        if name in results.load(file):
            continue
        start, cpu = time.monotonic(), time.process_time()
        row = measured(name, model, path, scored, options)
        row |= {
            "seconds": round(time.monotonic() - start),
            "core_seconds": round(time.process_time() - cpu),
            "date": datetime.date.today().isoformat(),
            "command": f"python tests/real/table.py --model={options.model} --rows={name} "
            f"--tokens={options.tokens} --tested={options.tested} --layers={options.layers}",
            "machine": detect.cpu_name(),
        }
        results.add(file, name, row)
        print(name, row, flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
