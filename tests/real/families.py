"""Each family of llama.cpp computes what this package does: a drawn model of each is exported to
GGUF, read back, and run in llama.cpp.

python tests/real/families.py [NAME ...]
python tests/real/families.py --table gemma3_text     with llama.cpp's GELU, its table in float16
"""

import dataclasses
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import sparse_dataflow as sd
from sparse_dataflow.core.config import activations
from sparse_dataflow.interchange import huggingface
from tests.interchange import gguf_models
from tests.real.llama_cpp import LlamaCpp

BOUND = 5e-3
"""Largest difference of a log-probability; llama.cpp takes GELU from a table in float16."""


TABLE = "gelu_of_llama_cpp"


def gelu_of_llama_cpp(x):
    """GELU as llama.cpp takes it, from a table of float16 numbers."""
    inputs = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    with np.errstate(all="ignore"):
        table, _ = activations.ACTIVATIONS["gelu"].value_and_derivative(inputs)
        table = table.astype(np.float16).astype(np.float32)
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float16), jnp.uint16)
    return jnp.where(x <= -10, 0, jnp.where(x >= 10, x, jnp.asarray(table)[bits.astype(int)]))


def with_table(model):
    """The model with llama.cpp's GELU."""
    if model.model.activation != "gelu":
        return model
    if TABLE not in activations.ACTIVATIONS:
        activations.register(activations.Activation(TABLE, False, function=gelu_of_llama_cpp))
    return dataclasses.replace(model, model=dataclasses.replace(model.model, activation=TABLE))


def check(name, folder, table):
    """Returns (largest difference of log-probabilities to llama.cpp, largest log-probability)."""
    tokenizer, (config, weights) = gguf_models.tokenizer(), gguf_models.drawn(name)
    # llama.cpp looks for tokens of Phi 3 in each file whose name has its name.
    out = folder / f"drawn{gguf_models.FAMILIES.index(name)}"
    huggingface.write(
        out, "gguf", config, weights, tokenizer, context=128, card="", architecture=name
    )
    model = sd.load(out)
    expected = dataclasses.replace(config, compute_dtype=model.model.compute_dtype)
    same = model.model == expected
    model = with_table(model) if table else model
    engine = LlamaCpp(out / "model.gguf", context=128)
    worst, tested, seed = 0.0, 0, 0
    while tested < 3:
        seed += 1
        ids = np.random.default_rng(seed).integers(0, tokenizer.vocab_size - 1, 40)
        logits = np.asarray(sd.logits(model, ids[None]))[0, -1].astype(np.float64)
        ours = logits - np.logaddexp.reduce(logits)
        rows, theirs = engine.log_probabilities(ids, 200)
        if not len(rows):
            continue
        tested += 1
        worst = max(worst, np.abs(ours[rows] - theirs).max())
    return worst, float(np.ptp(ours)), same


def main(names):
    failed, table = [], "--table" in names
    names = [name for name in names if name != "--table"]
    with tempfile.TemporaryDirectory() as folder:
        for name in names or gguf_models.FAMILIES:
            try:
                worst, spread, same = check(name, Path(folder), table)
                print(
                    f"{name:12} {worst:.2e} of {spread:.1f}, config {'same' if same else 'other'}",
                    flush=True,
                )
                if worst > BOUND:
                    failed.append(name)
            except Exception as error:
                print(f"{name:12} {type(error).__name__}: {str(error)[:300]}", flush=True)
                failed.append(name)
    print("failed:", ", ".join(failed) or "none")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
