"""SparseGPT (arXiv 2301.00774) and Wanda (arXiv 2306.11695) on the same tokens as `sd.prune`.

python tests/real/rivals.py --run=model.gguf --texts=FOLDER [--density=0.5 | --two_of_four]

Prints the held-out loss of the dense model, of both, and of `sd.prune` in one round. The inputs of
a projection are those that the pruned ones before it give, also inside a layer; both papers prune
the projections of a layer by the inputs that its dense ones give.
"""

import argparse
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from scipy import linalg

import sparse_dataflow as sd
from sparse_dataflow.core.model import stacks
from sparse_dataflow.data import cache
from sparse_dataflow.data.corpora import load_corpus
from sparse_dataflow.pruning.layer_by_layer import HeldLayers, as_params, pruned_layers

COLUMNS, DAMPING = 128, 0.01
"""SparseGPT's: inputs whose errors are passed on at once, and the damping over the mean square."""


def largest(scores, density, two_of_four):
    """bool [in, out]: the weights of the largest scores, of each output or of four inputs."""
    pool = 4 if two_of_four else len(scores)
    stay = 2 if two_of_four else round(density * pool)
    grid = scores.reshape(-1, pool, scores.shape[1])
    ranks = np.argsort(np.argsort(-grid, axis=1, kind="stable"), axis=1, kind="stable")
    return (ranks < stay).reshape(scores.shape)


def wanda(site, density, two_of_four):
    """The largest weights times the norms of their inputs stay as they are."""
    squares = np.diag((site.fit + site.held_out).inputs)
    scores = np.abs(site.kernel) * np.sqrt(squares)[:, None]
    return np.where(largest(scores, density, two_of_four), site.kernel, 0.0)


def sparsegpt(site, density, two_of_four):
    """Weights go in blocks of inputs, and the later inputs make up for each of them."""
    moments = (site.fit + site.held_out).inputs.copy()
    weights = np.array(site.kernel, np.float64)
    dead = np.diag(moments) == 0
    moments[dead, dead] = 1
    weights[dead] = 0
    moments[np.diag_indices_from(moments)] += DAMPING * np.mean(np.diag(moments))
    inverse = linalg.cho_solve(linalg.cho_factor(moments), np.eye(len(moments)))
    upper = linalg.cholesky(inverse)
    for first in range(0, len(weights), COLUMNS):
        block = slice(first, min(first + COLUMNS, len(weights)))
        part, factor = weights[block], upper[block, block]
        scores = np.square(part / np.diag(factor)[:, None])
        if two_of_four:
            stay = largest(scores, density, True)
        else:  # One threshold for all outputs, as the published code has it.
            count = math.ceil(density * scores.size)
            stay = scores >= np.partition(scores.ravel(), -count)[-count]
        errors = np.zeros_like(part)
        for row in range(len(part)):
            kept = np.where(stay[row], part[row], 0.0)
            errors[row] = (part[row] - kept) / factor[row, row]
            part[row:] -= np.outer(factor[row, row:], errors[row])
            part[row] = kept
        weights[block] = part
        weights[block.stop :] -= upper[block, block.stop :].T @ errors
    return weights


def pruned_by(method, model, batches, density, two_of_four):
    """The model with every projection pruned by a method."""
    layers = HeldLayers(jax.device_get(model.params))
    names = model.model.projections
    results = pruned_layers(
        model.model, layers, batches, names, lambda site: method(site, density, two_of_four)
    )
    blocks = as_params((layer for _, layer in results), model.model.num_layers)
    params = {**layers.ends(), "blocks": blocks}
    return dataclasses.replace(model, params=stacks.map_arrays(jnp.asarray, params))


def rows_of(model, texts, tokens, width=512):
    """int32 [rows, width] of the first tokens of texts."""
    ids = np.concatenate([model.tokenizer.encode(text) for text in texts])[:tokens]
    return ids[: len(ids) // width * width].reshape(-1, width).astype(np.int32)


def held_out_loss(model, rows):
    """Mean loss in nats a token."""
    return float(np.mean([sd.loss(model, row[None]) for row in rows]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True)
    parser.add_argument("--texts", required=True)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--tested", type=int, default=6_144)
    parser.add_argument("--density", type=float, default=0.5)
    parser.add_argument("--two_of_four", action="store_true")
    options = parser.parse_args()
    model, corpus = sd.load(options.run), load_corpus(options.texts, cache.FOLDER)
    texts = ([document.text for document in side] for side in (corpus.train, corpus.validation))
    calibration, tested = (
        rows_of(model, side, count)
        for side, count in zip(texts, (options.tokens, options.tested), strict=True)
    )
    batches = np.array_split(calibration, max(1, len(calibration) // 8))
    print(f"dense: {held_out_loss(model, tested):.4f}", flush=True)
    for method in (wanda, sparsegpt):
        pruned = pruned_by(method, model, batches, options.density, options.two_of_four)
        print(f"{method.__name__}: {held_out_loss(pruned, tested):.4f}", flush=True)
    block = "2:4" if options.two_of_four else 1
    density = None if options.two_of_four else options.density
    ours = sd.prune(model, batches, density=density, block=block, rounds=1).model
    print(f"sd.prune: {held_out_loss(ours, tested):.4f}", flush=True)


if __name__ == "__main__":
    main()
