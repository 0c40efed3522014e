"""File format of a model that stores only its blocks and layout tables, in one safetensors file.

config.json has {"format": FORMAT, "model": the fields of `ModelConfig`, "context", "end_of_text",
"text": see `serving.text_rule`, "source": config.json of the model that was imported, if one was,
"layout": digest of the tables,
"forward": what readers need not compute from the model: see `_forward`}.
Tensors have the dotted names of their parameters, with one entry per layer: "embed.tokens",
"blocks.0.qkv.values", "head.norm.scale". Layout tables have the prefix of their values, for
example "blocks.0.qkv.in_index" (int32; see `LayoutTables`). Masked weights have a kernel of the
entries under the mask, [out, inputs of each], and a mask of one bit a block, uint8 [in_blocks,
out_blocks / 8] (see `numpy.packbits`). `serving.run_in_torch`, which is written into the folder, is
a complete reader without jax.
"""

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from sparse_dataflow.core.checkpoint.named_arrays import flatten
from sparse_dataflow.core.config.layer_groups import layer_linear, layer_model
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.model import gpt, rotary, scales, stacks
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import masked_file, tensors
from sparse_dataflow.interchange.serving.readers import write_reader
from sparse_dataflow.interchange.tensors import DTYPES

MODEL_TYPE = "sparse_dataflow"
FORMAT = "sparse_dataflow-1"
CONFIG, SOURCE = "config.json", "source"
READER = "run_in_torch.py"
METADATA = {"sparse_dataflow": FORMAT}
"""Metadata of each file of weights."""


def write(
    folder: Path,
    model: ModelConfig,
    params: dict,
    context: int,
    more: Mapping[str, object],
    dtype: str = DTYPES[0],
) -> list[Path]:
    """Writes config.json, with `more` fields, the reader for PyTorch and the weights into an
    existing folder; returns the weights' files.

    Args:
      dtype: of DTYPES, of the floats.
    """
    write_small_files(folder, model, params, context, more)
    arrays = flatten({name: section for name, section in params.items() if name != "blocks"})
    for i, layer in enumerate(stacks.layers(params["blocks"])):
        arrays |= layer_tensors(model, layer, i)
    return tensors.write(folder, tensors.as_dtype(arrays, dtype), METADATA)


def write_small_files(
    folder: Path,
    model: ModelConfig,
    params: object,
    context: int,
    more: Mapping[str, object],
) -> None:
    """Writes config.json, with `more` fields, and the reader for PyTorch.

    Args:
      params: of the model; only their layouts are read.
    """
    fields = {
        "model_type": MODEL_TYPE,
        "format": FORMAT,
        "model": model.to_json(),
        "context": context,
        **{name: value for name, value in more.items() if value is not None},
        "layout": _digest(params),
        "forward": _forward(model),
    }
    (folder / CONFIG).write_text(json.dumps(fields, indent=1) + "\n")
    write_reader(folder, READER)


def layer_tensors(model: ModelConfig, layer: dict, number: int) -> dict[str, np.ndarray]:
    """Returns the named tensors of a layer.

    Args:
      layer: its parameters with its layouts.
      number: of the layer, from 0.
    """
    others, layouts = stacks.split_layouts(layer)
    stored = {name: _to_file(model, name, module, number) for name, module in others.items()}
    trees = (stored, stacks.layouts_by_name(layouts))
    return {
        f"blocks.{number}.{name}": leaf for tree in trees for name, leaf in flatten(tree).items()
    }


def _forward(model):
    """Returns the factors and rotations of a model's forward pass.

    {"embedding_scale", "query_scale", "logit_scale": factors, see `core.model.scales`, "layers":
    {"window": tokens that a query sees, 0 for all, "frequencies": angles between positions [rotated
    features / 2], empty without rotary positions, "rotation_scale": factor of the rotations} each}
    """
    layers = []
    for i in range(model.num_layers):
        layer = layer_model(model, i)
        numbers = {"frequencies": [], "rotation_scale": 1.0}
        if layer.positions == "rotary":
            angles, scale = rotary.frequencies(layer, int(layer.head_width * layer.rotary_share))
            numbers = {"frequencies": np.asarray(angles).tolist(), "rotation_scale": scale}
        layers.append({"window": layer.window, **numbers})
    return {
        "embedding_scale": scales.embedding_scale(model),
        "query_scale": scales.query_scale(model),
        "logit_scale": scales.logit_scale(model),
        "layers": layers,
    }


def _to_file(model, name, module, layer):
    """Returns the arrays of a module of a layer as they are stored."""
    if name not in model.masked_projections:
        return module
    return masked_file.packed(module, layer_linear(model, name, layer))


def read(folder: str | Path) -> tuple[ModelConfig, dict]:
    """Reads the model that `write` wrote.

    Returns:
      (config, parameter tree in numpy float32 with its layouts).

    Raises:
      UserError: the folder has another format, or a tensor is missing, damaged or of another
        shape.
    """
    folder = Path(folder)
    model = read_config(folder)
    files = tensors.Tensors(folder)
    tensors.refuse_larger(folder, model, tensors.stored_bytes(folder))
    shapes = jax.eval_shape(lambda: gpt.init(model, jax.random.key(0)))
    layers = [read_layer(files, model, layer, i) for i, layer in enumerate(layer_shapes(model))]
    other_sections = {name: section for name, section in shapes.items() if name != "blocks"}
    blocks = stacks.stacked_layers(model, layers)
    params = {**_read_tree(files.read, other_sections), "blocks": blocks}
    stacks.layouts_of(model, params)  # Raises UserError for tables of no legal layout.
    digest = _digest(params)
    if json_files.load(folder / CONFIG).get("layout") not in (None, digest):
        raise UserError(
            f"{folder} has the tables of another layout than its config.json; restore its files "
            "from one export."
        )
    return model, params


def layer_shapes(model: ModelConfig) -> list[dict]:
    """Returns the shapes of the parameters of each layer, with those of its layouts."""
    shapes = jax.eval_shape(lambda: gpt.init(model, jax.random.key(0)))
    expected = merged(shapes, stacks.stored_layouts(model))["blocks"]
    return jax.eval_shape(lambda tree: list(stacks.layers(tree)), expected)


def read_layer(files: tensors.Tensors, model: ModelConfig, shapes: dict, number: int) -> dict:
    """Reads the parameters of a layer with its layouts.

    Args:
      shapes: those of the layer, see `layer_shapes`.
      number: of the layer, from 0.
    """
    shapes, layouts = stacks.split_layouts(shapes)
    by_name = stacks.layouts_by_name(layouts)
    layouts = _read_tree(files.read_integers, by_name, f"blocks.{number}.")
    arrays = _read_layer(files, model, shapes, number)
    return stacks.layer_with_layouts(model, arrays, layouts)


def read_config(folder: Path) -> ModelConfig:
    """Reads the model config in config.json.

    Raises:
      UserError: the file is damaged or has another format.
    """
    path = Path(folder) / CONFIG
    try:
        fields: json_files.JsonObject = json_files.load(path)
        if fields["format"] != FORMAT:
            raise ValueError(f"its format is {fields['format']!r}, not {FORMAT!r}")
        return ModelConfig.from_json(fields["model"])
    except json_files.MALFORMED as error:
        raise UserError(f"{path} is not a sparse export that can be read ({error}).") from None


def _digest(params):
    """Returns the sha256 (hex) of the layout tables of all layers."""
    combined = hashlib.sha256()
    for name, table in sorted(flatten(stacks.layouts_by_name(params)).items()):
        combined.update(f"{name}{np.shape(table)}".encode())
        combined.update(np.ascontiguousarray(table, "<i4").tobytes())
    return combined.hexdigest()


def _read_layer(files, model, shapes, layer):
    """Reads the parameters of a layer."""

    def read(at, name, shape, dtype=""):
        if dtype:
            return files.read_integers(f"{at}.{name}", shape, dtype)
        return files.read(f"{at}.{name}", shape)

    modules = {}
    for name, module in shapes.items():
        at = f"blocks.{layer}.{name}"
        packed: dict[str, np.ndarray] = {}
        if name in model.masked_projections:
            spec, shape = layer_linear(model, name, layer), module[masked_file.KERNEL].shape
            try:
                packed = masked_file.unpacked(functools.partial(read, at), shape, spec)
            except ValueError as error:
                raise UserError(
                    f"{files.folder}: {at} is not as its config.json says: {error}; restore its "
                    "files from one export."
                ) from None
        others = {leaf: shape for leaf, shape in module.items() if leaf not in packed}
        modules[name] = {**_read_tree(files.read, others, f"{at}."), **packed}
    return modules


def _read_tree(read, shapes, prefix=""):
    """Reads a tensor for each leaf of a tree of shapes, by its dotted name."""

    def read_leaf(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return read(prefix + name, leaf.shape)

    return jax.tree_util.tree_map_with_path(read_leaf, shapes)
