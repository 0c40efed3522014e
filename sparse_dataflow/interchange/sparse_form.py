"""A model with its stored blocks and layout tables alone, in one safetensors file.

config.json has {"format": FORMAT, "model": the fields of `ModelConfig`, "context", "end_of_text"}.
Tensors are named as parameters are, a layer apart: "embed.tokens", "blocks.0.qkv.values",
"head.norm.scale"; layout tables lie beside the values they belong to: "blocks.0.qkv.in_index" and
so on (int32; `LayoutTables` says what they hold). The dense weight of a projection:

    values [nnz, b, b], in_index and in_slot [out_blocks, fan_in]
    W = zeros(in_blocks, b, out_blocks, b)
    for o, position where in_slot[o, position] >= 0:
        W[in_index[o, position], :, o, :] = values[in_slot[o, position]]
    y = x @ W.reshape(in_features, out_features) + bias
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sparse_dataflow import json_files
from sparse_dataflow.errors import UserError
from sparse_dataflow.interchange import tensors
from sparse_dataflow.models import gpt
from sparse_dataflow.models.sizes import ModelConfig
from sparse_dataflow.sparsity.layout import LayoutTables
from sparse_dataflow.training.named_arrays import flatten

FORMAT = "sparse_dataflow-1"
CONFIG = "config.json"


def write(
    folder: Path, model: ModelConfig, params: dict, tables: dict, context: int, end_of_text: int
) -> None:
    """Writes config.json and model.safetensors into a folder that is there."""
    about = {
        "model_type": "sparse_dataflow",
        "format": FORMAT,
        "model": model.to_json(),
        "context": context,
        "end_of_text": end_of_text,
    }
    (folder / CONFIG).write_text(json.dumps(about, indent=1) + "\n")
    named = {
        name: np.asarray(leaf, np.float32) for name, leaf in _parameters(model, params).items()
    }
    for projection, stacked in tables.items():
        for field, layers in zip(LayoutTables._fields, stacked):
            for i, table in enumerate(np.asarray(layers)):
                named[f"blocks.{i}.{projection}.{field}"] = table
    tensors.write(folder / tensors.FILE, named, {"sparse_dataflow": FORMAT})


def read(folder: str | Path) -> tuple[ModelConfig, dict, dict]:
    """The model that `write` wrote: its config, parameters (numpy float32) and layout tables.

    Raises:
      UserError: the folder is of another format, or a tensor is missing, misshaped or damaged.
    """
    folder = Path(folder)
    model = read_config(folder)
    files = tensors.Tensors(folder)
    shapes = jax.eval_shape(lambda: gpt.init(model, jax.random.key(0)))
    read = {name: files.read(name, leaf.shape) for name, leaf in _parameters(model, shapes).items()}
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: _collect(read, _name(path), model, leaf.shape), shapes
    )
    tables = {}
    for projection, expected in gpt.layout_tables(gpt.layouts(model)).items():
        tables[projection] = LayoutTables(
            *(
                np.stack(
                    [
                        files.read_integers(f"blocks.{i}.{projection}.{field}", table.shape[1:])
                        for i in range(model.num_layers)
                    ]
                )
                for field, table in zip(LayoutTables._fields, expected)
            )
        )
    gpt.layouts_of(model, tables)  # Refuses tables that are no layout's.
    return model, params, tables


def read_config(folder: Path) -> ModelConfig:
    """The model of config.json; UserError where it is of another format or damaged."""
    path = Path(folder) / CONFIG
    try:
        fields: dict[str, Any] = json_files.load(path)
        if fields["format"] != FORMAT:
            raise ValueError(f"its format is {fields['format']!r}, not {FORMAT!r}")
        return ModelConfig.from_json(fields["model"])
    except json_files.MALFORMED as error:
        raise UserError(f"{path} is no export of a sparse model ({error}).") from None


def _parameters(model, tree) -> dict[str, Any]:
    """Leaves by name, those of the blocks a layer apart; of shapes too."""
    return dict(_named(model, tree))


def _named(model, tree) -> Iterator[tuple[str, Any]]:
    for name, leaf in flatten(tree).items():
        if not name.startswith("blocks."):
            yield name, leaf
            continue
        rest = name.removeprefix("blocks.")
        for i in range(model.num_layers):
            one = (
                jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
                if isinstance(leaf, jax.ShapeDtypeStruct)
                else leaf[i]
            )
            yield f"blocks.{i}.{rest}", one


def _name(path):
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _collect(read, name, model, shape):
    if not name.startswith("blocks."):
        return read[name]
    rest = name.removeprefix("blocks.")
    return np.stack([read[f"blocks.{i}.{rest}"] for i in range(model.num_layers)]).reshape(shape)
