"""Prunes a trained dense GPT to 1/4 of its blocks, and trains it until it has recovered.

    python examples/prune_and_recover.py

`run.init_from` takes the dense run, or a Hugging Face directory, and keeps the largest blocks of
each projection.  The comparison is a sparse model that is trained from scratch for as many steps.
A minute on two CPU cores.
"""

import pathlib
import random
import tempfile

import sparse_dataflow as sd


def read_texts(count):
    """Returns the first modules of the standard library, as strings."""
    paths = sorted(pathlib.Path(random.__file__).parent.glob("*.py"))[:count]
    return [path.read_text(encoding="utf-8") for path in paths]


def held_out(run):
    """Returns the last held-out loss of a run, in bits per byte."""
    return [row["bits_per_byte"] for row in run.metrics() if row["kind"] == "eval"][-1]


def main(folder=None, dense_steps=300, steps=100, texts=60):
    """Trains three models into `folder`; returns {name: held-out bits per byte}."""
    folder = pathlib.Path(folder or tempfile.mkdtemp())
    texts = read_texts(texts)
    config = sd.preset("pico").change(
        sparsity__density=0.25, sparsity__block=16, run__twin="no", training__steps=steps
    )

    def train(name, config, **changes):
        return sd.train(config.change(run__out=str(folder / name), **changes), texts=texts)

    dense = train("dense", config.dense(), training__steps=dense_steps)
    runs = {
        "dense": dense,
        "sparse from scratch": train("scratch", config),
        "pruned and recovered": train("recovered", config, run__init_from=str(dense.folder)),
    }
    losses = {name: held_out(run) for name, run in runs.items()}
    for name, loss in losses.items():
        print(f"{name:>20}: {loss:.3f} bits per byte")
    return losses


if __name__ == "__main__":
    main()
