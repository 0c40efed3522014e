"""Parameters of a dense model from named tensors, and back, by a row of `architectures`."""

import functools
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np

from sparse_dataflow.core.checkpoint.named_arrays import flatten
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.model import gpt
from sparse_dataflow.core.weights.kind import ROUTER
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import large_pages
from sparse_dataflow.interchange.architectures import Architecture
from sparse_dataflow.interchange.equivalent_forms import (
    fuse_qkv,
    joined_config,
    split_config,
    split_qkv,
)
from sparse_dataflow.interchange.tensors import Tensors

_SHOWN = 5
"""Names of tensors in an error."""

_OUTPUTS = {"head.output": "weight", "head.output_bias": "bias"}
"""Parameter of the output layer -> end of its tensor's name."""


class _Entry(NamedTuple):
    """A tensor of each layer, of each expert, or of the model.

    Attributes:
      name: its name; the first "{}" is the number of the layer, the second that of the expert.
      leaves: dotted names of our parameters, which it has side by side along their last axis.
      shapes: their shapes, of one tensor.
      counts: numbers of layers and experts, the leading axes of our parameters; () for a tensor of
        the model.
      transposed: whether it is stored transposed.
      skip: its first rows, which we do not have.
      offset: what our parameter is above it.
      paired: heads whose features are in the order of llama.cpp's rotations; 0 for none.
    """

    name: str
    leaves: list[str]
    shapes: list[tuple[int, ...]]
    counts: tuple[int, ...]
    transposed: bool
    skip: int
    offset: float
    paired: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        first = self.shapes[0]
        shape = (*first[:-1], sum(shape[-1] for shape in self.shapes))
        shape = (shape[0] + self.skip, *shape[1:])
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape

    def names(self, layers: range | None = None) -> Iterator[str]:
        """Yields the names of the tensors of some layers, in the order of our parameters; None for
        all, and of no layer."""
        axes: list[range] = [range(count) for count in self.counts]
        axes[:1] = axes[:1] if layers is None else [layers]
        return (self.name.format(*i) for i in itertools.product(*axes))


def read(architecture: Architecture, model: ModelConfig, files: Tensors) -> dict:
    """Reads the parameter tree of a dense model; see `gpt`. All arrays are numpy float32.

    Raises:
      UserError: a tensor is missing, damaged or of another shape, or the files have tensors that
        the architecture does not have.
    """
    refuse_others(architecture, model, files)
    return _read(architecture, model, files, _shapes(_stored_config(architecture, model)))


def read_ends(architecture: Architecture, model: ModelConfig, files: Tensors) -> dict:
    """Reads the parameters of `read` that are of no layer: "embed" and "head"."""
    shapes = _shapes(_stored_config(architecture, model))
    ends = {name: section for name, section in shapes.items() if name != "blocks"}
    return _read(architecture, model, files, ends)


def read_layer(architecture: Architecture, model: ModelConfig, files: Tensors, layer: int) -> dict:
    """Reads the "blocks" of `read` of one layer alone, without their first axis."""
    shapes = _shapes(_stored_config(architecture, model))
    blocks = {"blocks": shapes["blocks"]}
    params = _read(architecture, model, files, blocks, range(layer, layer + 1))
    return jax.tree.map(lambda leaf: leaf[0], params["blocks"])


_COLUMNS = 128
"""Columns that are copied together: their lines of a transposed matrix stay in a processor's cache,
so that a copy takes half of the time."""


def _read(architecture, model, files, shapes, layers=None):
    """Reads some sections of a model, of all layers or of some, as `model` has projections."""
    prefix = _prefix(architecture, files)
    arrays: dict[str, np.ndarray] = {}
    for entry in _entries(architecture, model, files.names, shapes, prefix):
        names = list(entry.names(layers))
        stacked = np.empty(0, np.float32)
        read = functools.partial(files.read, shape=entry.shape)
        for number, tensor in enumerate(_one_ahead(read, names)):
            tensor = tensor[entry.skip :]
            tensor = tensor + np.float32(entry.offset) if entry.offset else tensor
            tensor = np.swapaxes(tensor, -1, -2) if entry.transposed else tensor
            tensor = _halves(tensor, entry.paired) if entry.paired else tensor
            if not number:
                stacked = large_pages.empty((len(names), *tensor.shape))
            for start in range(0, tensor.shape[-1], _COLUMNS):
                columns = slice(start, start + _COLUMNS)
                stacked[number, ..., columns] = tensor[..., columns]
        counts = entry.counts if layers is None else (len(layers), *entry.counts[1:])
        stacked = stacked.reshape(*counts, *stacked.shape[1:])
        # One tensor may hold several of our arrays side by side, such as q, k and v.
        ends = np.cumsum([shape[-1] for shape in entry.shapes])[:-1]
        arrays |= zip(entry.leaves, np.split(stacked, ends, axis=-1))
    leaves = [np.ascontiguousarray(arrays[name]) for name in flatten(shapes)]
    params = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
    if "blocks" not in params:
        return params
    return fuse_qkv(model, split_qkv(_stored_config(architecture, model), params))


def _one_ahead(function, items):
    """Yields function(item) of each item; the next one is computed while one is used."""
    with ThreadPoolExecutor(1) as thread:
        ahead = [thread.submit(function, item) for item in items[:1]]
        for item in items[1:]:
            # Two results are in memory at most.
            ahead.append(thread.submit(function, item))
            yield ahead.pop(0).result()
        for last in ahead:
            yield last.result()


def write(architecture: Architecture, model: ModelConfig, params: dict) -> dict[str, np.ndarray]:
    """Returns float32 tensors by name; the inverse of `read`.

    Args:
      architecture: represents the model.
      model: dense config.
      params: its parameter tree.
    """
    stored = _stored_config(architecture, model)
    arrays = flatten(fuse_qkv(stored, split_qkv(model, params)))
    tensors = {}
    for entry in _entries(architecture, stored, (), _shapes(stored), architecture.prefixes[0]):
        stacked = np.concatenate([np.asarray(arrays[leaf]) for leaf in entry.leaves], axis=-1)
        rows = stacked.reshape(-1, *stacked.shape[len(entry.counts) :])
        for name, tensor in zip(entry.names(), rows, strict=True):
            # In the reverse order of `_read`.
            skipped = np.zeros((entry.skip, *tensor.shape[1:]), np.float32)
            tensor = np.concatenate([skipped, tensor]) if entry.skip else tensor
            tensor = tensor - np.float32(entry.offset) if entry.offset else tensor
            tensor = _pairs(tensor, entry.paired) if entry.paired else tensor
            tensor = np.swapaxes(tensor, -1, -2) if entry.transposed else tensor
            tensors[name] = np.asarray(tensor, np.float32)
    return tensors


def stored_shapes(architecture: Architecture, model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor that `write` makes of a model."""
    stored = _stored_config(architecture, model)
    entries = _entries(architecture, stored, (), _shapes(stored), architecture.prefixes[0])
    return {name: entry.shape for entry in entries for name in entry.names()}


def _stored_config(architecture, model):
    """Returns the model with the projections of attention that an architecture has tensors of."""
    joined = "blocks.qkv" in architecture.tensors
    return joined_config(model) if joined else split_config(model)


def _halves(tensor, heads):
    """Returns the features [..., heads * width] of heads with the first feature of each rotation in
    front of all second ones; in `tensor` the two are neighbours."""
    shape = tensor.shape
    return tensor.reshape(*shape[:-1], heads, -1, 2).swapaxes(-1, -2).reshape(shape)


def _pairs(tensor, heads):
    """Inverts `_halves`."""
    shape = tensor.shape
    return tensor.reshape(*shape[:-1], heads, 2, -1).swapaxes(-1, -2).reshape(shape)


def _entries(architecture, model, names, shapes, prefix) -> Iterator[_Entry]:
    """Yields the tensors of a model.

    Args:
      model: gives the numbers of heads.
      names: of the tensors of a checkpoint, which may have the output layer by another name.
      shapes: of the parameters.
      prefix: of the checkpoint's names.
    """
    leaves_by_name: dict[str, list[str]] = {}
    output = _output(architecture, names)
    leaves = flatten(shapes)
    order = list(architecture.tensors)
    # Leaves of one joined tensor are concatenated in the order of the row.
    for leaf in sorted(leaves, key=lambda leaf: _order(order, leaf)):
        name = _name(architecture, leaf, prefix, output)
        leaves_by_name.setdefault(name, []).append(leaf)
    heads = {"q": model.num_heads, "k": model.kv_heads} if architecture.paired else {}
    for name, group in leaves_by_name.items():
        axes = name.count("{}")
        yield _Entry(
            name,
            group,
            [leaves[leaf].shape[axes:] for leaf in group],
            leaves[group[0]].shape[:axes],
            architecture.transposed and group[0].endswith((".kernel", f".{ROUTER}")),
            architecture.position_offset if group[0] == "embed.positions" else 0,
            architecture.norm_offset if group[0].endswith(".scale") else 0.0,
            heads.get(group[0].split(".")[1], 0) if group[0].startswith("blocks.") else 0,
        )


def _order(order, leaf):
    parent = leaf.rpartition(".")[0]
    return len(order) if leaf in _OUTPUTS else order.index(leaf if leaf in order else parent)


def _name(architecture, leaf, prefix, output):
    if leaf in _OUTPUTS:
        return f"{output}.{_OUTPUTS[leaf]}"
    if leaf in architecture.tensors:
        return prefix + architecture.tensors[leaf]
    parent, _, last = leaf.rpartition(".")
    return f"{prefix}{architecture.tensors[parent]}.{'bias' if last == 'bias' else 'weight'}"


def _prefix(architecture, files):
    probe = architecture.tensors["embed.tokens"]
    for prefix in architecture.prefixes:
        if prefix + probe in files.names:
            return prefix
    raise UserError(
        f"{files.folder} has no tensor {architecture.prefixes[0]}{probe}; the weights are "
        "incomplete or do not match the architecture in its config.json."
    )


def _output(architecture, names):
    """Returns the name of the output layer in a checkpoint; it has no prefix."""
    present = (name for name in architecture.outputs if f"{name}.weight" in names)
    return next(present, architecture.outputs[0])


def output_name(architecture: Architecture, files: Tensors) -> str:
    """Returns the name of the weights of the output layer in the files, if they have them."""
    return f"{_output(architecture, files.names)}.weight"


def embedding_name(architecture: Architecture, files: Tensors) -> str:
    """Returns the name of the embedding in the files; raises UserError if it is missing."""
    return _prefix(architecture, files) + architecture.tensors["embed.tokens"]


def refuse_others(architecture: Architecture, model: ModelConfig, files: Tensors) -> None:
    """Raises UserError if the files have tensors that the architecture does not have, or too
    few."""
    prefix, shapes = _prefix(architecture, files), _shapes(_stored_config(architecture, model))
    names: set[str] = set()
    for entry in _entries(architecture, model, files.names, shapes, prefix):
        for name in entry.names():
            if len(names) > len(files.names) and name not in files.names:
                files.refuse_missing(name)  # A config.json may count to millions.
            names.add(name)
    output = output_name(architecture, files)
    others = sorted(
        name
        for name in files.names - names - {output, prefix + output}
        if not name.endswith(architecture.ignored)
    )
    if others:
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        raise UserError(
            f"{files.folder} has tensors that a {architecture.class_name} of its config.json does "
            f"not have: {', '.join(others[:_SHOWN])}{more}."
        )


@functools.lru_cache(maxsize=2)
def _shapes(model):
    return jax.eval_shape(lambda: gpt.init(model, jax.random.key(0)))
