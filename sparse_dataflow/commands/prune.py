"""`sd.prune`: prunes a language model, a run, a Hugging Face directory or any nnx model."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparse_dataflow.core.config import arguments
from sparse_dataflow.core.config.projections import MLP, LinearSpec
from sparse_dataflow.core.layouts import model_layouts
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.model.stacks import ModelWeights
from sparse_dataflow.core.optim.optimizers import TrainState
from sparse_dataflow.core.training.transitions import change_model
from sparse_dataflow.core.weights.dense import Dense
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange.load import load
from sparse_dataflow.layers.prune import prune_linears
from sparse_dataflow.layers.replace import Where
from sparse_dataflow.pruning import rebuild, second_order
from sparse_dataflow.pruning.groups import Groups
from sparse_dataflow.pruning.projection import Target
from sparse_dataflow.pruning.rebuild import ROUNDS, Rebuilt
from sparse_dataflow.pruning.result import PrunedModel

NARROW = "narrow"
LEAST_TOKENS = 10
LONGEST_ROW, ROWS = 512, 8
"""Tokens of a row of texts, and rows of a batch."""


@arguments.checked
def prune(
    model: Any,
    batches: Any,
    *,
    density: float | None = None,
    block: int | str = 16,
    where: Where | None = None,
    rounds: int = ROUNDS,
    call: Callable[[Any, Any], Any] | None = None,
) -> PrunedModel:
    """Removes weights of a trained model, and fits the others to the outputs of the whole model.

    What goes is chosen by the error that the other weights cannot make up for (second order, as in
    SparseGPT), and what stays is a least-squares fit, one projection after the other, each on what
    the pruned ones before it give.  The damping of each fit is that of the least error on held-out
    tokens.  The model does not change.

    Square blocks become block-sparse weights, which store and compute less.  Other shapes become
    dense weights with zeros.

    Args:
      model: an `sd.Model`; a run folder, Hugging Face directory or name on the hub, which is
        loaded; or any nnx model.
      batches: calibration data.  For a language model token arrays, int [batch, sequence], or
        texts.  For an nnx model what `call` takes.  Give several times as many tokens as a
        projection has inputs.
      density: fraction of each projection that stays; None for 0.5, and for N / M of N of M.
      block: what is removed together: 16 or "16x16" (squares), "1x16" (1 input x 16 outputs), 1
        (single weights), "2:4" (2 of 4 inputs stay), or "narrow" (heads and hidden features of a
        language model, which becomes a smaller dense one).
      where: (path, linear) -> whether to prune it; None for all.  For a language model it gets the
        name of a projection, such as "mlp_in", and its shape.
      rounds: in how many rounds weights go.
      call: (model, batch) applies an nnx model; None for `model(batch)`.

    Raises:
      UserError: no projection is selected, a projection has no such density or shares its kernel,
        or activations are not finite; names the legal values.

    Examples:
        >>> model = sd.init(sd.preset("pico").dense(), jax.random.key(0))
        >>> tokens = np.arange(1024).reshape(16, 64) % 512
        >>> pruned = sd.prune(model, [tokens], density=0.5, block=32)
        >>> pruned.model.model.linear("mlp_in").density
        0.5
        >>> sorted(pruned.masks)
        ['attn_out', 'mlp_in', 'mlp_out', 'qkv']
    """
    if rounds < 1:
        raise UserError(f"rounds={rounds}; legal: 1 or more.")
    groups = None if block == NARROW else Groups.parse(block)
    if isinstance(model, nnx.Module):
        if groups is None:
            raise UserError('block="narrow" is for language models; legal for nnx models: a shape.')
        inputs = _listed(batches)
        apply = call or (lambda module, batch: module(batch))
        return prune_linears(model, inputs, groups, density, rounds, where, apply)
    if isinstance(model, str | Path):
        model = load(model)
    if not isinstance(model, Model):
        raise UserError(
            f"model is a {type(model).__name__}; legal: sd.Model, a folder or name of one, or an "
            "nnx model."
        )
    if call is not None:
        raise UserError("call is for nnx models; legal for language models: None.")
    return _prune_language_model(
        model, _token_batches(model, batches), groups, density, where, rounds
    )


def _prune_language_model(model, batches, groups, density, where, rounds):
    old, weights = model.model, ModelWeights(jax.device_get(model.params))
    if groups is None:
        if where is not None:
            raise UserError('where does not go with block="narrow", which prunes all projections.')
        return _result(model, rebuild.narrowed(old, weights, batches, _half(density), rounds), None)
    names = _selected(old, where)
    if groups.rows == groups.cols > 1:
        spec = LinearSpec("block_sparse", "random", _half(density), groups.rows)
        new = old.with_linears(spec, names)
        model_layouts.check_layouts(new)
        result, layouts = rebuild.to_blocks(old, weights, new, batches, rounds=rounds)
        key = jax.random.key(0)
        params = jax.tree.map(jnp.array, result.params)
        state = TrainState(jnp.zeros((), jnp.int32), params, (), key)
        state = change_model(state, result.model, new, given=layouts)
        return _result(model, result, groups, new, state)
    targets = {
        name: Target(groups, groups.count(old.projection_shape(name), density), rounds)
        for name in names
    }
    alike = {
        name: functools.partial(lambda target, _: target, each) for name, each in targets.items()
    }
    return _result(model, rebuild.rebuilt(old, weights, batches, alike), groups)


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
    for name, spec in dict(model.linears).items():
        if spec.weight is not Dense:
            raise UserError(f"{name} has {spec.weight.words} already; legal: a dense model.")
    shapes = {name: model.projection_shape(name) for name in model.projections}
    if model.experts:
        shapes = {name: shape for name, shape in shapes.items() if name not in MLP}
    names = [name for name, shape in shapes.items() if where is None or where(name, shape)]
    if not names:
        raise UserError(f"`where` selects no projection; legal: {', '.join(shapes)}.")
    return names


def _listed(batches) -> list:
    """Returns the batches as a list."""
    single = hasattr(batches, "shape") or isinstance(batches, str | bytes | Mapping)
    if single or not isinstance(batches, Iterable):
        raise UserError("batches is not a list of batches; legal: a list with one or more.")
    if not (batches := list(batches)):
        raise UserError("batches is empty; legal: a list with one or more.")
    return batches


def _token_batches(model: Model, batches: Any) -> list[np.ndarray]:
    """Returns int32 [batch, sequence] arrays of token arrays or texts."""
    given = _listed(batches)
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
