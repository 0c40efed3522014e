"""Prunes the projections of a language model of this project: see `sd.prune`."""

import dataclasses
import functools
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import MLP, LinearSpec
from sparse_dataflow.core.layouts import model_layouts
from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.weights.dense import Dense
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import hub_models, huggingface, pattern_pruning
from sparse_dataflow.interchange.load import directory_model, load
from sparse_dataflow.interchange.pruned_directory import PrunedDirectory, digest_of
from sparse_dataflow.layers.replace import Where
from sparse_dataflow.monitoring.time_left import in_words
from sparse_dataflow.pruning import rebuild, second_order
from sparse_dataflow.pruning.groups import Groups
from sparse_dataflow.pruning.layer_by_layer import HeldLayers, Layers
from sparse_dataflow.pruning.rebuild import RebuiltLayer
from sparse_dataflow.pruning.result import PrunedModel
from sparse_dataflow.pruning.stored import InMemory, smaller_layer, sparse_layer

LEAST_TOKENS = 10
LONGEST_ROW, ROWS = 512, 8
"""Tokens of a row of texts, and rows of a batch."""


def prune_language_model(
    model: object,
    batches: list,
    groups: Groups | None,
    density: float | None,
    where: Where | None,
    rounds: int,
    pattern: str,
    out: str | Path | None,
    dtype: str,
    tokens: int | None = None,
) -> PrunedModel:
    """Prunes an `sd.Model`, or the one that a folder or a name leads to; see `sd.prune`.

    Raises:
      UserError: as `sd.prune`.
    """
    model, layers = _opened(model, by_layer=not pattern)
    model.model.refuse_additions("A pruned model", "the weights that they were trained on")
    batches = _token_batches(model, batches, tokens)
    old = model.model
    if old.shared_layers:
        raise UserError("All layers share one block; legal: a model with a block for each layer.")
    if out is not None:
        old.refuse_bidirectional("A reader of the pruned directory", "a model in memory, or a run")
        old.refuse_blocks("A reader of the pruned directory")
    if groups is None and where is not None:
        raise UserError('where does not go with block="narrow", which prunes all projections.')
    names = _selected(old, where)
    before = rebuild.stored_before(old, model.params) if model.params else {}
    # A narrow model needs no layout: what is left is dense, and whole heads and hidden features go.
    if groups is None:
        new, targets = rebuild.narrow_targets(old, _half(density), rounds)
        stored = functools.partial(smaller_layer, old)
    else:
        specs = {name: _spec(old, name, groups, density, pattern) for name in names}
        new = dataclasses.replace(old, linears={**dict(old.linears), **specs})
        model_layouts.check_layouts(new)
        given = None
        if pattern:
            params, given = _in_places(old, model.params, new)
            layers = HeldLayers(params)
        targets = rebuild.sparser_targets(old, new, before, given, rounds)
        stored = functools.partial(sparse_layer, new, before)
    if out is None:
        memory = InMemory(new)
        for layer in _timed(rebuild.rebuilt_layers(old, layers, batches, targets), old.num_layers):
            memory.put(layer, stored(layer))
        params = stacks.map_arrays(jnp.asarray, memory.params(layers.ends()))
        return _result(model, new, groups, memory, params)
    # A stopped pruning goes on where it was, so its folder must be of the same weights, tokens and
    # settings.
    facts = {
        "tokens": digest_of(batches),
        "weights": layers.digest(),
        "source": old.to_json(),
        "groups": groups and dataclasses.asdict(groups),
        "density": density,
        "pattern": pattern,
        "projections": names,
        "rounds": rounds,
    }
    with PrunedDirectory(out, new, dtype, facts) as directory:
        rebuilt = rebuild.rebuilt_layers(
            old, layers, batches, targets, directory.rounded, directory.restored
        )
        for layer in _timed(rebuilt, old.num_layers):
            directory.put(layer, stored(layer))
        folder = directory.finish(layers, model.tokenizer, model.context)
    return PrunedModel(folder, {}, directory.errors)


def _timed(layers: Iterator[RebuiltLayer], count: int) -> Iterator[RebuiltLayer]:
    """Yields the layers, and says after each how long the others will take."""
    start, done = time.monotonic(), 0
    for layer in layers:
        yield layer
        done, rest = done + 1, count - layer.number - 1
        if rest:
            left = (time.monotonic() - start) / done * rest
            say(f"prune: layer {layer.number + 1} of {count} is done, {in_words(left)} left")


def _opened(model: object, by_layer: bool) -> tuple[Model, Layers]:
    """Returns a model and its weights; of a directory that is read in parts without params."""
    if isinstance(model, str | Path):
        folder = hub_models.local_folder(model)
        if by_layer and huggingface.is_directory(folder) and not huggingface.has_own_form(folder):
            opened = huggingface.open_dense(folder)
            return directory_model(opened.folder, opened.model, opened.tokenizer, {}), opened
        model = load(folder)
    if not isinstance(model, Model):
        raise UserError(
            f"model is a {type(model).__name__}; legal: sd.Model, a folder or name of one, or an "
            "nnx model."
        )
    return model, HeldLayers(jax.device_get(model.params))


def _in_places(old, params, new):
    """Returns (params, layouts): the dense weights with features in the places that suit the
    patterns of `new`."""
    if old.linears:
        raise UserError("pattern moves the features of all projections; legal: a dense model.")
    pattern_pruning.refuse(old, {}, new)
    return pattern_pruning.moved(old, jax.device_get(params), new, "sd.prune")


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
            raise UserError(f"{name}: {error} In Python `where` leaves it out.") from None
        return spec
    try:
        share = groups.count(shape, density) / (groups.pool or groups.grid(shape)[0])
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    outputs = groups.cols if groups.cols != groups.rows else 0
    return LinearSpec(
        "masked", "masked", share, groups.rows, span=groups.pool, block_outputs=outputs
    )


def _result(model: Model, new: ModelConfig, groups, memory: InMemory, params) -> PrunedModel:
    """Returns the pruned model, which no run folder has."""
    masks = {}
    if groups is not None:
        for name in memory.masks[0]:
            each = [second_order.expanded(layer[name], groups) for layer in memory.masks]
            masks[name] = np.stack(each)
    pruned = dataclasses.replace(
        model,
        folder=Path(),
        variant="dense" if groups is None else "sparse",
        model=new,
        params=params,
        step=0,
        record=None,
        facts={},
    )
    return PrunedModel(pruned, masks, memory.errors)


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
                f"{name} has {weight.words} already; legal: dense weights, of a run by export "
                "--run=RUN --variant=dense --to=DIR. In Python `where` leaves it out."
            )
    return names


def _token_batches(model: Model, given: list, tokens: int | None) -> list[np.ndarray]:
    """Returns int32 [batch, sequence] arrays of token arrays or texts, of which so many tokens are
    read."""
    texts = [each for each in given if isinstance(each, str)]
    longest = model.model.longest
    if len(texts) == len(given):
        ids = np.concatenate([np.empty(0, np.int32), *_first_ids(model.tokenizer, texts, tokens)])[
            :tokens
        ]
        width = min(LONGEST_ROW, model.context, longest, max(1, len(ids)))
        rows = ids[: len(ids) // width * width].reshape(-1, width)
        given = [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]
    elif tokens is not None:
        raise UserError(f"tokens={tokens} with token arrays; legal: None, or texts.")
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


def _first_ids(tokenizer: Tokenizer, texts: list[str], tokens: int | None) -> Iterator[np.ndarray]:
    """Yields the ids of texts, one after the other, until there are enough."""
    count = 0
    for text in texts:
        [ids] = tokenizer.encode_documents([text])
        yield ids
        count += len(ids)
        if tokens is not None and count >= tokens:
            return
