"""File format of a model that stores only its blocks and layout tables, in one safetensors file.

config.json has {"format": FORMAT, "model": the fields of `ModelConfig`, "context", "end_of_text",
"source": config.json of the model that was imported, if one was, "layout": digest of the tables}.
Tensors have the dotted names of their parameters, with one entry per layer: "embed.tokens",
"blocks.0.qkv.values", "head.norm.scale". Layout tables have the prefix of their values, for
example "blocks.0.qkv.in_index" (int32; see `LayoutTables`). `numpy_reader` is a complete reader
without jax.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sparse_dataflow.core.checkpoint.named_arrays import flatten
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.adapters import merged
from sparse_dataflow.core.model.stacks import ModelWeights
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import tensors

MODEL_TYPE = "sparse_dataflow"
FORMAT = "sparse_dataflow-1"
CONFIG, SOURCE = "config.json", "source"


def write(
    folder: Path,
    model: ModelConfig,
    weights: ModelWeights,
    context: int,
    more: Mapping[str, Any],
) -> list[Path]:
    """Writes config.json, with `more` fields, and the weights into an existing folder; returns the
    weights' files."""
    fields = {
        "model_type": MODEL_TYPE,
        "format": FORMAT,
        "model": model.to_json(),
        "context": context,
        **{name: value for name, value in more.items() if value is not None},
        "layout": _digest(weights),
    }
    params = weights.merged
    (folder / CONFIG).write_text(json.dumps(fields, indent=1) + "\n")
    other_sections = {name: section for name, section in params.items() if name != "blocks"}
    arrays = {name: np.asarray(leaf, np.float32) for name, leaf in flatten(other_sections).items()}
    for i, layer in enumerate(stacks.layers(params["blocks"])):
        of_layer, layouts = stacks.split_layouts(layer)
        for name, leaf in flatten(of_layer).items():
            arrays[f"blocks.{i}.{name}"] = np.asarray(leaf, np.float32)
        for name, table in flatten(stacks.tables_by_name(layouts)).items():
            arrays[f"blocks.{i}.{name}"] = np.asarray(table)
    return tensors.write(folder, arrays, {"sparse_dataflow": FORMAT})


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
    shapes = jax.eval_shape(lambda: gpt.init(model, jax.random.key(0)))
    expected = merged(shapes["blocks"], stacks.with_layouts(model, {}).get("blocks", ()))
    layers = []
    for i, layer in enumerate(jax.eval_shape(lambda tree: list(stacks.layers(tree)), expected)):
        of_layer, layouts = stacks.split_layouts(layer)
        tables = _read_tree(files.read_integers, stacks.tables_by_name(layouts), f"blocks.{i}.")
        arrays = _read_tree(files.read, of_layer, f"blocks.{i}.")
        layers.append(merged(arrays, stacks.beside(model, tables)["blocks"]) if tables else arrays)
    other_sections = {name: section for name, section in shapes.items() if name != "blocks"}
    blocks = stacks.stacked_layers(model, layers)
    params = {**_read_tree(files.read, other_sections), "blocks": blocks}
    stacks.layouts_of(model, params)  # Raises UserError for tables of no legal layout.
    digest = _digest(ModelWeights(params))
    if json_files.load(folder / CONFIG).get("layout") not in (None, digest):
        raise UserError(
            f"{folder} has the tables of another layout than its config.json; restore its files "
            "from one export."
        )
    return model, params


def read_config(folder: Path) -> ModelConfig:
    """Reads the model config in config.json.

    Raises:
      UserError: the file is damaged or has another format.
    """
    path = Path(folder) / CONFIG
    try:
        fields: dict[str, Any] = json_files.load(path)
        if fields["format"] != FORMAT:
            raise ValueError(f"its format is {fields['format']!r}, not {FORMAT!r}")
        return ModelConfig.from_json(fields["model"])
    except json_files.MALFORMED as error:
        raise UserError(f"{path} is not a sparse export that can be read ({error}).") from None


def _digest(weights):
    """Returns the sha256 (hex) of the layout tables of all layers."""
    combined = hashlib.sha256()
    for name, table in sorted(flatten(stacks.tables_by_name(weights.merged)).items()):
        combined.update(f"{name}{np.shape(table)}".encode())
        combined.update(np.ascontiguousarray(table, "<i4").tobytes())
    return combined.hexdigest()


def _read_tree(read, shapes, prefix=""):
    """Reads a tensor for each leaf of a tree of shapes, by its dotted name."""

    def read_leaf(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return read(prefix + name, leaf.shape)

    return jax.tree_util.tree_map_with_path(read_leaf, shapes)
