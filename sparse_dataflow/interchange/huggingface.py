"""Reader and writer of Hugging Face directories: config.json, safetensors and tokenizer files.

- Import and export: each architecture of `architectures`, which `transformers` loads (the dense
  form), and the sparse form of `sparse_form`.

An export is written to a temporary folder, which is renamed when it is complete.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import (
    architectures,
    sparse_form,
    tensor_names,
    tensors,
    tokenizer_files,
)
from sparse_dataflow.interchange.equivalent_forms import (
    dense_form,
    split_config,
    split_qkv,
    with_unit_gate,
    with_zero_biases,
)
from sparse_dataflow.interchange.sparse_form import CONFIG, MODEL_TYPE
from sparse_dataflow.training.run_files import RunRecord

CARD = "README.md"
FORMS = ("dense", "sparse")
AUTO = "auto"
"""Architecture of an export: the first that represents the model."""


class Imported(NamedTuple):
    """An imported model.

    Attributes:
      model: config of the model.
      params: parameter tree in numpy float32; see `gpt`.
      tables: layout tables; empty if the model is dense.
      tokenizer: tokenizer with this project's order of ids, as the embedding of `params`.
      digest: sha256 (hex) of the weight files.
      architecture: name in `architectures.ARCHITECTURES`; "" for the sparse form.
    """

    model: ModelConfig
    params: dict
    tables: dict
    tokenizer: Tokenizer
    digest: str
    architecture: str


def is_directory(folder: str | Path) -> bool:
    """Returns whether the folder's config.json has a model_type; that of a run folder has none."""
    try:
        fields = json_files.load(Path(folder).expanduser() / CONFIG)
    except (OSError, ValueError):
        return False
    return isinstance(fields, dict) and "model_type" in fields


def is_sparse_form(folder: str | Path) -> bool:
    """Returns whether a Hugging Face directory is a sparse form with block-sparse weights."""
    folder = Path(folder).expanduser()
    if _read_config(folder)["model_type"] != MODEL_TYPE:
        return False
    return bool(sparse_form.read_config(folder).sparse_projections)


def read(folder: str | Path) -> Imported:
    """Reads a Hugging Face directory of one of `architectures`, or the sparse form.

    Raises:
      UserError: the folder has no model, the architecture is not supported, or a tensor or the
        tokenizer is missing, damaged or of another shape.
    """
    folder = Path(folder).expanduser()
    fields = _read_config(folder)
    architecture = fields["model_type"]
    if architecture == MODEL_TYPE:
        architecture = ""
        model, params, tables = sparse_form.read(folder)
        fields = {"vocab_size": model.vocab_size, "eos_token_id": fields.get("end_of_text")}
    else:
        model, tables = _read_model(folder, fields), {}
        params = tensor_names.read(architectures.row(fields), model, tensors.Tensors(folder))
    tokenizer, order = tokenizer_files.read(folder, fields)
    params = _reordered(params, order)
    return Imported(model, params, tables, tokenizer, tensors.digest(folder), architecture)


def _read_model(folder, fields):
    """Returns the config of a model of `architectures`."""
    try:
        return architectures.read_config(fields)
    except UserError as error:
        raise UserError(f"{folder} cannot be imported: {error}") from None
    except json_files.MALFORMED as error:
        raise UserError(
            f"{folder / CONFIG} is damaged ({type(error).__name__}: {error})."
        ) from None


def _reordered(params, order):
    """Returns the parameters with the rows of the vocabulary in another order."""
    embed, head = params["embed"], params["head"]
    embed = {**embed, "tokens": np.asarray(embed["tokens"])[order]}
    if "output" in head:
        head = {**head, "output": np.asarray(head["output"])[order]}
    return {**params, "embed": embed, "head": head}


def _read_config(folder):
    path = folder / CONFIG
    if not path.exists():
        raise UserError(f"{folder} is not a Hugging Face directory: it has no {CONFIG}.")
    try:
        fields = json_files.load(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}).") from None
    if not isinstance(fields, dict):
        raise UserError(f"{path} is damaged: it is not a JSON object.")
    if not isinstance(fields.get("model_type"), str):
        raise UserError(f"{path} is damaged: model_type is missing or is not a string.")
    return fields


def write(
    folder: str | Path,
    form: str,
    model: ModelConfig,
    params: dict,
    tables: dict,
    tokenizer: Tokenizer,
    *,
    context: int,
    card: str,
    architecture: str = AUTO,
) -> Path:
    """Exports a model to a Hugging Face directory. If it fails, no folder is left.

    Args:
      folder: folder to create; it must not exist.
      form: "dense": `transformers` loads it; "sparse": only stored blocks.
      model: config of the model.
      params: parameter tree; see `gpt`.
      tables: concrete layout tables.
      tokenizer: tokenizer of the model. If it was imported, the export has its original ids.
      context: sequence length of the training, in tokens.
      card: text of README.md.
      architecture: of the dense form: a name in `architectures.ARCHITECTURES`, or "auto" for the
        first that represents the model.

    Returns:
      The path of the new folder.

    Raises:
      UserError: the architecture cannot represent the model, or the folder exists or cannot be
        written.
    """
    if form not in FORMS:
        raise UserError(f"The export form {form!r} is unknown; legal: {', '.join(FORMS)}.")
    if form == "sparse":
        model.refuse_experts("The sparse form", "form=dense, or the run folder")
        if model.low_rank_projections:
            raise UserError(
                "The sparse form stores blocks, and weights of sparsity.pattern=low_rank are two "
                "factors; legal: form=dense, or the run folder."
            )
    if architecture not in (AUTO, *architectures.ARCHITECTURES):
        raise UserError(
            f"The architecture {architecture!r} is unknown; legal: {AUTO}, "
            f"{', '.join(architectures.ARCHITECTURES)}."
        )
    params = _reordered(params, tokenizer.ids_from_original)
    ids = tokenizer.original_ids
    end_of_text = ids[tokenizer.eot_id] if ids else tokenizer.eot_id
    if form == "dense":
        plain = _plain(model)
        name = architectures.choose(plain) if architecture == AUTO else architecture
        representation = architectures.represent(name, plain)
    with new_folder(Path(folder).expanduser()) as partial:
        if form == "dense":
            special = dict.fromkeys(("bos_token_id", "eos_token_id"), end_of_text)
            config = {**representation.fields, **special, "torch_dtype": "float32"}
            (partial / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
            dense, weights = dense_form(model, params, tables)
            arrays = _tensors(name, representation, dense, weights)
            files = tensors.write(partial, arrays, {})
        else:
            files = sparse_form.write(partial, model, params, tables, context, end_of_text)
        for path in files:  # safetensors creates files that only their owner can read.
            shutil.copymode(partial / CONFIG, path)
        tokenizer_files.write(partial, tokenizer, context)
        (partial / CARD).write_text(card, encoding="utf-8")
    return Path(folder).expanduser()


def preferred(architecture: str, record: RunRecord, model: ModelConfig) -> str:
    """Returns the architecture of an export: that of the weights that the run began with if
    `architecture` is "auto" and it represents the model."""
    began = (record.init_from or {}).get("architecture") or AUTO
    if architecture != AUTO or began not in architectures.ARCHITECTURES:
        return architecture
    try:
        architectures.represent(began, _plain(model))
    except UserError:
        return AUTO
    return began


def _plain(model):
    return dataclasses.replace(model, linears={}, parametrization="standard")


def _tensors(name, representation, dense, params):
    """Returns the named tensors of a dense model as an architecture represents it."""
    params = split_qkv(dense, params)
    if representation.model.gated_mlp and not dense.gated_mlp:
        params = with_unit_gate(params)
    target = split_config(representation.model)
    params = with_zero_biases(target, params)
    return tensor_names.write(architectures.ARCHITECTURES[name], target, params)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder that is renamed to `folder` on success and removed on failure.

    Its name is random, so it never replaces a folder of a killed export or of another program.
    """
    if os.path.lexists(folder):
        raise UserError(f"{folder} exists already; name a new folder.")
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
    created = [path for path in partial.parents if not path.exists()]
    remove = False
    try:
        partial.mkdir(parents=True)
        remove = True
        yield partial
        # POSIX replaces an existing folder only if it is empty.
        partial.rename(folder)
        remove = False
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written: {error.strerror or error}. No partial export is left."
        ) from error
    finally:
        if remove:
            shutil.rmtree(partial, ignore_errors=True)
            with contextlib.suppress(OSError):
                for path in created:
                    path.rmdir()
