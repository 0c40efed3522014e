"""Reader and writer of Hugging Face directories: config.json, safetensors and tokenizer files.

- Import: GPT-2, OPT, and the sparse form of `sparse_form`.
- Export: GPT-2 (the dense form, which `transformers` loads) and the sparse form.

An export is written to a temporary folder, which is renamed when it is complete.
"""

import contextlib
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
from sparse_dataflow.interchange import architectures, sparse_form, tensors, tokenizer_files
from sparse_dataflow.interchange.dense_form import dense_form

CONFIG = "config.json"
CARD = "README.md"
FORMS = ("dense", "sparse")


class Imported(NamedTuple):
    """An imported model.

    Attributes:
      model: config of the model.
      params: parameter tree in numpy float32; see `gpt`.
      tables: layout tables; empty if the model is dense.
      tokenizer: tokenizer with this project's order of ids, as the embedding of `params`.
      digest: sha256 (hex) of the weight files.
    """

    model: ModelConfig
    params: dict
    tables: dict
    tokenizer: Tokenizer
    digest: str


def is_directory(folder: str | Path) -> bool:
    """Returns whether the folder's config.json has a model_type; that of a run folder has none."""
    try:
        fields = json_files.load(Path(folder) / CONFIG)
    except (OSError, ValueError):
        return False
    return isinstance(fields, dict) and "model_type" in fields


def read(folder: str | Path) -> Imported:
    """Reads a Hugging Face directory of GPT-2, OPT or the sparse form.

    Raises:
      UserError: the folder has no model, the architecture is not supported, or a tensor or the
        tokenizer is missing, damaged or of another shape.
    """
    folder = Path(folder).expanduser()
    fields = _read_config(folder)
    kind = fields.get("model_type")
    if kind == "sparse_dataflow":
        model, params, tables = sparse_form.read(folder)
        size = {"vocab_size": model.vocab_size, "eos_token_id": fields.get("end_of_text")}
        tokenizer, order = tokenizer_files.read(folder, size)
        params["embed"]["tokens"] = params["embed"]["tokens"][order]
        return Imported(model, params, tables, tokenizer, tensors.Tensors(folder).digest())
    if kind not in architectures.ARCHITECTURES:
        raise UserError(
            f"{folder} has a model of type {kind!r}; legal: "
            f"{', '.join(architectures.ARCHITECTURES)}."
        )
    architecture = architectures.ARCHITECTURES[kind]
    try:
        model = architecture.config(fields)
    except UserError as error:
        raise UserError(f"{folder} cannot be imported: {error}") from None
    except json_files.MALFORMED as error:
        raise UserError(
            f"{folder / CONFIG} is damaged ({type(error).__name__}: {error})."
        ) from None
    files = tensors.Tensors(folder)
    prefix = _prefix(files, architecture)
    params = architecture.params(model, lambda name, shape: files.read(prefix + name, shape))
    tokenizer, order = tokenizer_files.read(folder, fields)
    params["embed"]["tokens"] = params["embed"]["tokens"][order]
    return Imported(model, params, {}, tokenizer, files.digest())


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


def _prefix(files, architecture):
    for prefix in architecture.prefixes:
        if prefix + architecture.probe in files.names:
            return prefix
    raise UserError(
        f"{files.folder} has no tensor {architecture.prefixes[0]}{architecture.probe}; the weights "
        "are incomplete or do not match the architecture in its config.json."
    )


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
) -> Path:
    """Exports a model to a Hugging Face directory. If it fails, no folder is left.

    Args:
      folder: folder to create; it must not exist.
      form: "dense": `transformers` loads it as GPT2LMHeadModel; "sparse": only stored blocks.
      model: config of the model.
      params: parameter tree; see `gpt`.
      tables: concrete layout tables.
      tokenizer: tokenizer of the model. If it was imported, the export has its original ids.
      context: sequence length of the training, in tokens.
      card: text of README.md.

    Returns:
      The path of the new folder.

    Raises:
      UserError: GPT-2 cannot represent the model, or the folder exists or cannot be written.
    """
    if form not in FORMS:
        raise UserError(f"The export form {form!r} is unknown; legal: {', '.join(FORMS)}.")
    if form == "dense" and (model.norm, model.positions) != ("layernorm", "learned"):
        raise UserError(
            f"GPT-2 has no {model.norm} with {model.positions} positions, so transformers cannot "
            "load a dense form; legal: the sparse form, or a model with layernorm and learned "
            "positions."
        )
    embed = params["embed"]
    tokens = np.asarray(embed["tokens"])[tokenizer.ids_from_original]
    params = {**params, "embed": {**embed, "tokens": tokens}}
    ids = tokenizer.original_ids
    end_of_text = ids[tokenizer.eot_id] if ids else tokenizer.eot_id
    with _new_folder(Path(folder).expanduser()) as partial:
        if form == "dense":
            dense, weights = dense_form(model, params, tables)
            config = architectures.gpt2_config(dense, end_of_text)
            (partial / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
            tensors.write(partial / tensors.FILE, architectures.gpt2_tensors(dense, weights), {})
        else:
            sparse_form.write(partial, model, params, tables, context, end_of_text)
        # safetensors creates files that only their owner can read.
        shutil.copymode(partial / CONFIG, partial / tensors.FILE)
        tokenizer_files.write(partial, tokenizer, context)
        (partial / CARD).write_text(card, encoding="utf-8")
    return Path(folder).expanduser()


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
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
