"""A model with its stored blocks and layout tables alone, in one safetensors file.

config.json has {"format": FORMAT, "model": the fields of `ModelConfig`, "context", "end_of_text"}.
Tensors are named as parameters are, a layer apart: "embed.tokens", "blocks.0.qkv.values",
"head.norm.scale"; layout tables lie beside the values they belong to: "blocks.0.qkv.in_index" and
so on (int32; `LayoutTables` says what they hold).  `numpy_reader` is a complete reader without jax.
"""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sparse_dataflow.checkpoint.named_arrays import flatten
from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import tensors
from sparse_dataflow.models import gpt

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
    ends = {name: section for name, section in params.items() if name != "blocks"}
    named = {name: np.asarray(leaf, np.float32) for name, leaf in flatten(ends).items()}
    for i, (own, of_layer) in enumerate(gpt.layers(params["blocks"], tables)):
        for name, leaf in flatten(own).items():
            named[f"blocks.{i}.{name}"] = np.asarray(leaf, np.float32)
        for name, table in flatten(of_layer).items():
            named[f"blocks.{i}.{name}"] = np.asarray(table)
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
    expected = gpt.layout_tables(gpt.layouts(model))
    apart = jax.eval_shape(lambda *stacked: list(gpt.layers(*stacked)), shapes["blocks"], expected)
    layers = [
        (
            _read(files.read, own, f"blocks.{i}."),
            _read(files.read_integers, of_layer, f"blocks.{i}."),
        )
        for i, (own, of_layer) in enumerate(apart)
    ]
    blocks, tables = (gpt.stacked_layers(model, trees) for trees in zip(*layers))
    ends = {name: section for name, section in shapes.items() if name != "blocks"}
    params = {**_read(files.read, ends), "blocks": blocks}
    gpt.layouts_from_tables(model, tables)  # Refuses tables that are no layout's.
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


def _read(read, shapes, prefix=""):
    """The tensors of a tree of shapes, each by its dotted name."""

    def one(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return read(prefix + name, leaf.shape)

    return jax.tree_util.tree_map_with_path(one, shapes)
