"""Models from and to Hugging Face directories: config.json, safetensors, tokenizer.

Read are GPT-2 and OPT; written are GPT-2 (the dense form, which `transformers` loads) and the
sparse form of `sparse_form`. A directory is written beside its place and renamed when it is whole.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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
    """A model from elsewhere.

    Attributes:
      model: its config.
      params: numpy float32; see `gpt`.
      tables: layout tables; empty where it is dense.
      tokenizer: of the model's vocabulary, whose ids are in this project's order.
      digest: sha256 (hex) of the weights' files.
    """

    model: ModelConfig
    params: dict
    tables: dict
    tokenizer: Tokenizer
    digest: str


def is_directory(folder: str | Path) -> bool:
    """Whether a folder's config.json names a model's architecture, as a run's does not."""
    try:
        fields = json_files.load(Path(folder) / CONFIG)
    except (OSError, ValueError):
        return False
    return isinstance(fields, dict) and "model_type" in fields


def read(folder: str | Path) -> Imported:
    """The model of a Hugging Face directory, of GPT-2 or OPT, or of an export of the sparse form.

    Raises:
      UserError: there is none, its architecture is another, or a tensor or the tokenizer is
        missing, misshaped or damaged.
    """
    folder = Path(folder).expanduser()
    fields = _read_config(folder)
    kind = fields.get("model_type")
    if kind == "sparse_dataflow":
        model, params, tables = sparse_form.read(folder)
        size = {"vocab_size": model.vocab_size, "eos_token_id": fields.get("end_of_text")}
        tokenizer = tokenizer_files.read(folder, size).tokenizer
        return Imported(model, params, tables, tokenizer, tensors.Tensors(folder).digest())
    if kind not in architectures.ARCHITECTURES:
        raise UserError(
            f"{folder} holds a model of type {kind!r}; legal: "
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
        raise UserError(f"{folder} is no Hugging Face directory: it has no {CONFIG}.")
    try:
        fields = json_files.load(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}).") from None
    if not isinstance(fields, dict):
        raise UserError(f"{path} is damaged: it is no JSON object.")
    if not isinstance(fields.get("model_type"), str):
        raise UserError(f"{path} is damaged: it names no model_type.")
    return fields


def _prefix(files, architecture):
    for prefix in architecture.prefixes:
        if prefix + architecture.probe in files.names:
            return prefix
    raise UserError(
        f"{files.folder} has no tensor {architecture.prefixes[0]}{architecture.probe}; the weights "
        "are incomplete, or of another architecture than its config.json says."
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
    """Writes a directory, whole or not at all.

    Args:
      folder: to make; it must not be there.
      form: "dense": `transformers` loads it as GPT2LMHeadModel; "sparse": the stored blocks.
      model: the model's config.
      params: its parameters.
      tables: its concrete layout tables.
      tokenizer: its tokenizer.
      context: tokens that it was trained to see at once.
      card: text of README.md.

    Raises:
      UserError: GPT-2 has no such model, or the folder exists or cannot be written.
    """
    if form not in FORMS:
        raise UserError(f"The form {form!r} is unknown; legal: {', '.join(FORMS)}.")
    if form == "dense" and (model.norm, model.positions) != ("layernorm", "learned"):
        raise UserError(
            f"GPT-2 has no {model.norm} with {model.positions} positions, so there is no dense "
            "form that transformers loads; legal: the sparse form, or a model with layernorm and "
            "learned positions."
        )
    with _new_folder(Path(folder).expanduser()) as partial:
        if form == "dense":
            dense, weights = dense_form(model, params, tables)
            config = architectures.gpt2_config(dense, tokenizer.eot_id)
            (partial / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
            found = architectures.gpt2_tensors(dense, weights)
            tensors.write(partial / tensors.FILE, found, {})
        else:
            sparse_form.write(partial, model, params, tables, context, tokenizer.eot_id)
        # safetensors makes files that their owner alone may read.
        shutil.copymode(partial / CONFIG, partial / tensors.FILE)
        tokenizer_files.write(partial, tokenizer, context)
        (partial / CARD).write_text(card, encoding="utf-8")
    return Path(folder).expanduser()


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` that takes its name if the block succeeds, and else is removed."""
    if folder.exists():
        raise UserError(f"{folder} exists already; name a new folder.")
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        partial.rename(folder)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written: {error.strerror or error}; nothing was left."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
