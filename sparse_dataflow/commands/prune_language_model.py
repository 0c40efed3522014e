"""Prunes the projections of a language model of this project: see `sd.prune`."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import MLP, LinearSpec
from sparse_dataflow.core.layouts import model_layouts
from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.model.stacks import ModelWeights
from sparse_dataflow.core.optim.optimizers import TrainState
from sparse_dataflow.core.training.transitions import change_model
from sparse_dataflow.core.weights.dense import Dense
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import pattern_pruning
from sparse_dataflow.interchange.calibration import input_norms
from sparse_dataflow.interchange.load import load
from sparse_dataflow.layers.replace import Where
from sparse_dataflow.pruning import rebuild, second_order
from sparse_dataflow.pruning.groups import Groups
from sparse_dataflow.pruning.rebuild import Rebuilt
from sparse_dataflow.pruning.result import PrunedModel

LEAST_TOKENS = 10
LONGEST_ROW, ROWS = 512, 8
"""Tokens of a row of texts, and rows of a batch."""


def prune_language_model(
    model: Any,
    batches: list,
    groups: Groups | None,
    density: float | None,
    where: Where | None,
    rounds: int,
    pattern: str,
) -> PrunedModel:
    """Prunes an `sd.Model`, or the one that a folder or a name leads to; see `sd.prune`.

    Raises:
      UserError: as `sd.prune`.
    """
    if isinstance(model, str | Path):
        model = load(model)
    if not isinstance(model, Model):
        raise UserError(
            f"model is a {type(model).__name__}; legal: sd.Model, a folder or name of one, or an "
            "nnx model."
        )
    batches = _token_batches(model, batches)
    old, weights = model.model, ModelWeights(jax.device_get(model.params))
    if old.shared_layers:
        raise UserError("All layers share one block; legal: a model with a block for each layer.")
    if groups is None:
        if where is not None:
            raise UserError('where does not go with block="narrow", which prunes all projections.')
        _selected(old, None)
        return _result(model, rebuild.narrowed(old, weights, batches, _half(density), rounds), None)
    names = _selected(old, where)
    specs = {name: _spec(old, name, groups, density, pattern) for name in names}
    new = dataclasses.replace(old, linears={**dict(old.linears), **specs})
    model_layouts.check_layouts(new)
    if pattern:
        old, weights, given = _in_places(old, weights, new, batches)
    else:
        given = None
    result, stored = rebuild.to_blocks(old, weights, new, batches, given, rounds)
    params = _moved(result.params)
    state = TrainState(jnp.zeros((), jnp.int32), params, (), jax.random.key(0))
    state = change_model(state, result.model, new, given=stored)
    return _result(model, result, groups, new, state)


def _moved(params: dict) -> dict:
    """Returns parameters as arrays of jax, and empties `params`: no two copies are in memory."""
    leaves, tree = jax.tree.flatten(params)
    params.clear()
    for place, leaf in enumerate(leaves):
        leaves[place] = jnp.array(leaf)
    return jax.tree.unflatten(tree, leaves)


def _in_places(old, weights, new, batches):
    """Returns (model, weights, layouts): the dense weights with features in the places that suit
    the patterns of `new`."""
    if old.linears:
        raise UserError("pattern moves the features of all projections; legal: a dense model.")
    pattern_pruning.refuse(old, {}, new)
    norms = input_norms(old, weights, batches, dict.fromkeys(old.projections, 0))
    params, layouts = pattern_pruning.moved(old, weights.merged, new, norms, "sd.prune")
    return old, ModelWeights(params), layouts


def _spec(
    model: ModelConfig, name: str, groups: Groups, density: float | None, pattern: str
) -> LinearSpec:
    """Returns how a projection of which groups of weights stay is stored."""
    shape = model.projection_shape(name)
    if groups.is_square:
        spec = LinearSpec("block_sparse", pattern or "random", _half(density), groups.rows)
        try:
            make_layout(spec.pattern, *shape, spec.block, spec.density)
        except UserError as error:
            raise UserError(f"{name}: {error} Or leave it out with `where`.") from None
        return spec
    try:
        share = groups.count(shape, density) / (groups.pool or groups.grid(shape)[0])
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    outputs = groups.cols if groups.cols != groups.rows else 0
    return LinearSpec(
        "masked", "masked", share, groups.rows, span=groups.pool, block_outputs=outputs
    )


def _result(model: Model, result: Rebuilt, groups, new=None, state=None) -> PrunedModel:
    """Returns the pruned model, which no run folder has."""
    masks = {
        name: np.stack([second_order.expanded(mask, groups) for mask in layers])
        for name, layers in result.masks.items()
    }
    params = state.weights.merged if state else result.params
    pruned = dataclasses.replace(
        model,
        folder=Path(),
        variant="sparse" if state else "dense",
        model=new or result.model,
        params=stacks.map_arrays(jnp.asarray, params),
        step=0,
        record=None,
        facts={},
    )
    return PrunedModel(pruned, masks, result.errors)


def _half(density):
    return 0.5 if density is None else density


def _selected(model, where):
    """Returns the projections that are pruned."""
    shapes = {name: model.projection_shape(name) for name in model.projections}
    if model.experts:
        shapes = {name: shape for name, shape in shapes.items() if name not in MLP}
    names = [name for name, shape in shapes.items() if where is None or where(name, shape)]
    if not names:
        raise UserError(f"`where` selects no projection; legal: {', '.join(shapes)}.")
    for name in names:
        if (weight := model.linear(name).weight) is not Dense:
            raise UserError(
                f"{name} has {weight.words} already; legal: dense weights. Or leave it out with "
                "`where`."
            )
    return names


def _token_batches(model: Model, given: list) -> list[np.ndarray]:
    """Returns int32 [batch, sequence] arrays of token arrays or texts."""
    texts = [each for each in given if isinstance(each, str)]
    longest = model.model.longest
    if len(texts) == len(given):
        ids = np.concatenate([np.asarray(model.tokenizer.encode(text), np.int32) for text in texts])
        width = min(LONGEST_ROW, model.context, longest, max(1, len(ids)))
        rows = ids[: len(ids) // width * width].reshape(-1, width)
        given = [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]
    arrays = []
    for each in given:
        array = np.asarray(each)
        if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer):
            raise UserError(
                f"A batch is {array.dtype} of shape {array.shape}; legal: integers [batch, "
                "sequence], or only texts."
            )
        if array.size and not 0 <= array.min() <= array.max() < model.model.vocab_size:
            raise UserError(
                f"A batch has ids from {array.min()} to {array.max()}; legal: 0 to "
                f"{model.model.vocab_size - 1}."
            )
        if array.shape[1] > longest:
            raise UserError(
                f"A batch has sequences of {array.shape[1]} tokens; legal: at most {longest}."
            )
        arrays.append(array.astype(np.int32))
    if sum(array.size for array in arrays) < LEAST_TOKENS:
        raise UserError(f"batches have fewer than {LEAST_TOKENS} tokens; legal: more.")
    return arrays
