"""Reader and writer of Hugging Face directories: config.json, safetensors and tokenizer files.

- Import and export: each architecture of `architectures`, which `transformers` loads (the dense
  form), and the sparse form of `sparse_form`.
- Export alone: programs of `serving.program_form`.

An export is written to a temporary folder, which is renamed when it is complete.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.optim.matrix_leaves import VOCABULARY
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.evaluation.run_files import RunRecord
from sparse_dataflow.files import json_files, storage
from sparse_dataflow.files.addresses import local_path
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import large_pages
from sparse_dataflow.interchange import (
    architectures,
    source_config,
    sparse_form,
    special_tokens,
    tensor_names,
    tensors,
    tokenizer_files,
)
from sparse_dataflow.interchange.architectures import AUTO, Architecture
from sparse_dataflow.interchange.equivalent_forms import (
    dense_form,
    split_config,
    split_qkv,
    with_unit_gate,
    with_zero_biases,
)
from sparse_dataflow.interchange.llama_cpp import gguf_form, metadata
from sparse_dataflow.interchange.serving import program_form
from sparse_dataflow.interchange.serving.text_rule import text_rule
from sparse_dataflow.interchange.sparse_form import CONFIG, MODEL_TYPE, SOURCE
from sparse_dataflow.interchange.tensors import DTYPES

CARD = "README.md"
_LOG = logging.getLogger(__name__)
_ENDS = ("bos_token_id", "eos_token_id")
FORMS = ("dense", "sparse", "program")
READABLE = FORMS[:2]
"""Those of which a model can be loaded again; the other is there to be run."""

GGUF = "gguf"
"""Form of an export that is a file of llama.cpp in a folder."""

DENSE_FORMS = ("dense", GGUF)
"""Those whose weights are dense, of a family that others know."""
SMALL = (".json", ".txt", ".jinja", ".model")
"""How the names of the files of a directory end that are not weights."""


class Imported(NamedTuple):
    """An imported model.

    Attributes:
      params: parameter tree in numpy float32, with layouts; see `gpt`.
      tokenizer: tokenizer with this project's order of ids, as the embedding of `params`.
      digest: sha256 (hex) of the weight files.
      architecture: name in `architectures.ARCHITECTURES`; "" for the sparse form.
    """

    model: ModelConfig
    params: dict
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


def has_own_form(folder: str | Path) -> bool:
    """Returns whether a Hugging Face directory has the format of `sparse_form`."""
    return _read_config(Path(folder).expanduser())["model_type"] == MODEL_TYPE


def is_sparse_form(folder: str | Path) -> bool:
    """Returns whether a Hugging Face directory is a sparse form of weights that are not dense."""
    folder = Path(folder).expanduser()
    return has_own_form(folder) and bool(sparse_form.read_config(folder).weight_words)


class Described(NamedTuple):
    """What the small files of a Hugging Face directory say.

    Attributes:
      fields: those of config.json.
      model: the model; its output layer may still turn out to be its own.
      tokenizer: see `Imported`.
      order: the id in the directory of each id of `tokenizer`, int [vocab_size].
    """

    fields: json_files.JsonObject
    model: ModelConfig
    tokenizer: Tokenizer
    order: np.ndarray


def describe(folder: Path, stored: int = 0) -> Described:
    """Reads everything but the weights of a Hugging Face directory.

    All that can be refused without weights is refused here, so that none are fetched in vain.

    Args:
      stored: bytes of the weights; 0 for those that are there.

    Raises:
      UserError: see `read`.
    """
    files = (path for path in sorted(folder.glob("*")) if path.suffix in SMALL and path.is_file())
    facts = ((path.name, path.stat()) for path in files)
    state = tuple((name, status.st_size, status.st_mtime_ns) for name, status in facts)
    return _described(folder, state, stored or tensors.stored_bytes(folder))


@functools.lru_cache(maxsize=1)
def _described(folder, state, stored):
    """Returns `describe` of a folder whose files are in a state. A model on the hub is described
    before its weights are fetched, and again when they are read."""
    fields = _read_config(folder)
    if fields["model_type"] == MODEL_TYPE:
        model = sparse_form.read_config(folder)
        tokenizer_fields = fields.get(SOURCE) or {"eos_token_id": fields.get("end_of_text")}
        tokenizer_fields = {**tokenizer_fields, "vocab_size": model.vocab_size}
    else:
        model, tokenizer_fields = _read_model(folder, fields), fields
    tensors.refuse_larger(folder, model, stored)
    return Described(fields, model, *tokenizer_files.read(folder, tokenizer_fields))


@dataclasses.dataclass(frozen=True)
class Opened:
    """A Hugging Face directory of one of `architectures`, whose weights are read in parts.

    Attributes:
      folder: the directory.
      fields: those of config.json.
      model: the model.
      tokenizer: see `Imported`.
      order: see `Described`.
      files: the tensors.
    """

    folder: Path
    fields: json_files.JsonObject
    model: ModelConfig
    tokenizer: Tokenizer
    order: np.ndarray
    files: tensors.Tensors

    @property
    def row(self) -> Architecture:
        """How its tensors are named."""
        return _stored_row(self.fields, self.files)

    def ends(self) -> dict:
        """Reads the parameters that are of no layer: "embed" and "head"."""
        params = tensor_names.read_ends(self.row, self.model, self.files)
        return reordered(params, self.order)

    def layer(self, number: int) -> dict:
        """Reads the parameters of a layer, in numpy float32."""
        return tensor_names.read_layer(self.row, self.model, self.files, number)

    def digest(self) -> str:
        """Returns the sha256 (hex) of the weights."""
        return tensors.digest(self.folder)


def open_dense(folder: str | Path) -> Opened:
    """Opens a Hugging Face directory that is no sparse form; reads no weights but a tied output's.

    Raises:
      UserError: see `read`; not for what is wrong with weights.
    """
    folder = Path(folder).expanduser()
    fields, model, tokenizer, order = describe(folder)
    _described.cache_clear()
    files = tensors.Tensors(folder)
    model = _with_own_output(folder, fields, model, files)
    tensor_names.refuse_others(_stored_row(fields, files), model, files)
    plain = _fields_without_source(fields["model_type"], model, fields.get("torch_dtype"))
    _say_unread(folder, fields, model)
    if fields != plain:
        tokenizer = _with_source(tokenizer, fields)
    return Opened(folder, fields, model, tokenizer, order, files)


def read(folder: str | Path) -> Imported:
    """Reads a Hugging Face directory of one of `architectures`, or the sparse form.

    Raises:
      UserError: the folder has no model, the architecture is not supported, or a tensor or the
        tokenizer is missing, damaged or of another shape.
    """
    folder = Path(folder).expanduser()
    if not has_own_form(folder):
        opened = open_dense(folder)
        params = tensor_names.read(opened.row, opened.model, opened.files)
        model, tokenizer, order = opened.model, opened.tokenizer, opened.order
        architecture = opened.fields["model_type"]
    else:
        fields, _, tokenizer, order = describe(folder)
        _described.cache_clear()
        architecture = ""
        model, params = sparse_form.read(folder)
        if source := fields.get(SOURCE):
            tokenizer = _with_source(tokenizer, source)
    params = reordered(params, order)
    return Imported(model, params, tokenizer, tensors.digest(folder), architecture)


def _stored_row(fields, files):
    """Returns the row that names the tensors of a directory."""
    row = architectures.row(fields)
    return metadata.stored_row(row, files.names) if files.gguf else row


def _with_own_output(folder, fields, model, files):
    """Returns the model with an output layer of its own, if a tied config has another one."""
    row, shape = _stored_row(fields, files), (model.vocab_size, model.d_model)
    name = tensor_names.output_name(row, files)
    if not model.tied_embeddings or name not in files.names:
        return model
    embedding = tensor_names.embedding_name(row, files)
    output = files.read(name, shape)
    if np.array_equal(output, files.read(embedding, shape)):
        return model
    _LOG.warning(
        "%s: tie_word_embeddings is true, but %s is another matrix than %s; it is kept, as in "
        "transformers 5, and the model is untied", folder, name, embedding,
    )  # fmt: skip
    return dataclasses.replace(model, tied_embeddings=False)


def _say_unread(folder, fields, model):
    """Says which fields of config.json, which positions and which files are not used."""
    if model.longest < model.max_len:
        _LOG.warning(
            "%s: contexts have up to %d tokens; longer ones need longrope's long_factor, which is "
            "not supported", folder, model.longest,
        )  # fmt: skip
    names = source_config.unread(fields)
    if names:
        values = ", ".join(f"{name}={fields[name]!r}"[:60] for name in names)
        _LOG.warning("%s: %s has fields that change nothing here: %s", folder, CONFIG, values)
    read = {CONFIG, CARD, tokenizer_files.FILE, *special_tokens.FILES, *tensors.file_names(folder)}
    read |= {tensors.POINTER}
    others = sorted(path.name for path in folder.iterdir() if path.name not in read)
    others = [name for name in others if not name.startswith(".")]
    if others:
        _LOG.warning("%s: not read, and not in an export: %s", folder, ", ".join(others))


def _fields_without_source(name, model, dtype):
    """Returns the config.json of an export of a model that was not imported, whose end of text is
    its last token; None if the architecture represents it with other fields."""
    try:
        representation = architectures.represent(name, _plain(model))
    except UserError:
        return None
    return _fields(representation, dict.fromkeys(_ENDS, model.vocab_size - 1), dtype)


def _fields(representation, special, dtype):
    return {**representation.fields, **special, "torch_dtype": dtype}


def _with_source(tokenizer, source):
    """Adds the config.json of a model to the files of its tokenizer."""
    content = special_tokens.as_json(source).decode("latin-1")
    files = tuple(sorted({**dict(tokenizer.identity.files), CONFIG: content}.items()))
    identity = dataclasses.replace(tokenizer.identity, files=files)
    return dataclasses.replace(tokenizer, identity=identity)


def _source(tokenizer):
    """Returns the config.json that the model of a tokenizer was imported with, or None."""
    content = tokenizer.identity.content(CONFIG)
    return None if content is None else json_files.parse(content)


def _exported_fields(name, representation, tokenizer, dtype):
    """Returns the config.json of the dense form.

    Of an imported model it is the file that it came with, where training changed nothing.
    """
    ids, source = tokenizer.original_ids or range(tokenizer.vocab_size), _source(tokenizer)
    if source is None:
        return _fields(representation, dict.fromkeys(_ENDS, ids[tokenizer.eot_id]), dtype)
    fields = source_config.changed(name, source, representation)
    if fields is None:
        kept = {n: value for n, value in source.items() if n.endswith("_token_id")}
        fields = {**representation.fields, **kept}
        lost = sorted(set(source) - set(fields) - {"dtype", "torch_dtype"})
        if lost:
            _LOG.warning("the export has another shape; its config.json lacks %s", ", ".join(lost))
    generation = tokenizer.identity.content(special_tokens.GENERATION) or b"{}"
    if fields.get("eos_token_id") is None and not json_files.parse(generation).get("eos_token_id"):
        rest = sorted(ids[number] for number in tokenizer.ends - {tokenizer.eot_id})
        fields["eos_token_id"] = special_tokens.listed([ids[tokenizer.eot_id], *rest])
        _LOG.warning("the export's config.json gets eos_token_id=%s", fields["eos_token_id"])
    dtypes = dict.fromkeys({"torch_dtype", *({"dtype"} & set(fields))}, dtype)
    return fields | {"architectures": representation.fields["architectures"]} | dtypes


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


def reordered(params: dict, order: np.ndarray) -> dict:
    """Returns the parameters, or those of no layer, with the vocabulary in another order."""
    embed, head = params["embed"], params["head"]
    tokens = np.asarray(embed["tokens"], np.float32)
    # With mode="raise", take fills a second array first and copies it to `out`.
    tokens = np.take(tokens, order, axis=0, out=large_pages.empty(tokens.shape), mode="clip")
    embed = {**embed, "tokens": tokens}
    rows = {name: np.asarray(head[name])[order] for name in VOCABULARY if name in head}
    return {**params, "embed": embed, "head": {**head, **rows}}


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
    tokenizer: Tokenizer,
    *,
    context: int,
    card: str,
    architecture: str = AUTO,
    dtype: str = DTYPES[0],
) -> Path:
    """Exports a model to a Hugging Face directory. If it fails, no folder is left.

    Args:
      folder: folder to create; it must not exist.
      form: "dense": `transformers` loads it; "sparse": only stored blocks; "gguf": the dense
        weights as a file that llama.cpp runs; "program": programs of jax, with the stored blocks.
      params: parameters with layouts, in numpy; see `gpt`.
      tokenizer: tokenizer of the model. If it was imported, the export has its original ids.
      context: sequence length of the training, in tokens.
      card: text of README.md.
      architecture: of the dense and the GGUF form: a name in `architectures.ARCHITECTURES`, or
        "auto" for the first that represents the model.
      dtype: of the floats, one of DTYPES; of the GGUF form one of `gguf_form.DTYPES`.

    Returns:
      The path of the new folder.

    Raises:
      UserError: the architecture cannot represent the model, or the folder exists or cannot be
        written.
    """
    if form not in (*FORMS, GGUF):
        raise UserError(f"The export form {form!r} is unknown; legal: {', '.join((*FORMS, GGUF))}.")
    legal = tuple(gguf_form.DTYPES) if form == GGUF else DTYPES
    if dtype not in legal:
        raise UserError(f"dtype={dtype!r} with form={form}; legal: {', '.join(legal)}.")
    if form not in DENSE_FORMS:
        model.refuse_experts(f"The {form} form", "form=dense, or the run folder")
        model.refuse_blocks(f"The {form} form")
    if form == "sparse":
        model.require("sparse_form", "form=sparse", "form=dense, or the run folder")
    if architecture not in (AUTO, *architectures.ARCHITECTURES):
        raise UserError(
            f"The architecture {architecture!r} is unknown; legal: {AUTO}, "
            f"{', '.join(architectures.ARCHITECTURES)}."
        )
    # An imported tokenizer may have another order of ids here; the export has the original one.
    params = reordered(params, tokenizer.ids_from_original)
    began = str((_source(tokenizer) or {}).get("model_type"))
    if form == GGUF:
        chosen = gguf_form.choose(_plain(model), architecture, began)
    if form == "dense":
        plain = _plain(model)
        name = _represents(began, plain) or architecture if architecture == AUTO else architecture
        name = architectures.choose(plain) if name == AUTO else name
        representation = architectures.represent(name, plain)
    # All that can be refused was: from here on files are written, into a folder that gets its name
    # when it is whole.
    folder = local_path("folder", folder)
    with new_folder(folder) as partial:
        if form == "dense":
            config = _exported_fields(name, representation, tokenizer, dtype)
            (partial / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
            row = architectures.ARCHITECTURES[name]
            arrays = _tensors(row, representation, *dense_form(model, params))
            files = tensors.write(partial, tensors.as_dtype(arrays, dtype), {})
        elif form == GGUF:
            row = metadata.stored_row(architectures.ARCHITECTURES[chosen.name])
            arrays = _tensors(row, chosen.representation, *dense_form(model, params))
            title = folder.absolute().name
            gguf_form.write(partial, chosen, arrays, tokenizer, title, dtype)
            (partial / CARD).write_text(card, encoding="utf-8")
        if form in ("sparse", "program"):
            more = sparse_fields(tokenizer)
            write_form = sparse_form.write if form == "sparse" else program_form.write
            files = write_form(partial, model, params, context, more, dtype)
        if form != GGUF:
            write_rest(partial, files, tokenizer, context, card)
    return folder


def sparse_fields(tokenizer: Tokenizer) -> json_files.JsonObject:
    """Returns the fields of a sparse form's config.json that follow from the tokenizer."""
    ids = tokenizer.original_ids
    end_of_text = ids[tokenizer.eot_id] if ids else tokenizer.eot_id
    return {"end_of_text": end_of_text, "text": text_rule(tokenizer), SOURCE: _source(tokenizer)}


def write_rest(
    folder: Path, files: Sequence[Path], tokenizer: Tokenizer, context: int, card: str
) -> None:
    """Writes the tokenizer and README.md into a folder that has config.json and the weights.

    Args:
      files: those of the weights.
    """
    for path in files:  # safetensors creates files that only their owner can read.
        shutil.copymode(folder / CONFIG, path)
    tokenizer_files.write(folder, tokenizer, context)
    (folder / CARD).write_text(card, encoding="utf-8")


def preferred(architecture: str, record: RunRecord, model: ModelConfig) -> str:
    """Returns the architecture of an export: that of the weights that the run began with if
    `architecture` is "auto" and it represents the model."""
    began = (record.init_from or {}).get("architecture") or AUTO
    return (_represents(began, _plain(model)) or AUTO) if architecture == AUTO else architecture


def _represents(name, plain):
    """Returns the architecture if it is one and represents the model, else ""."""
    try:
        return name if architectures.represent(name, plain) else ""
    except (KeyError, UserError):
        return ""


def _plain(model):
    return dataclasses.replace(model, linears={}, parametrization="standard")


def _tensors(row, representation, dense, params):
    """Returns the named tensors of a dense model as a row of an architecture names them."""
    params = split_qkv(dense, params)
    if representation.model.gated_mlp and not dense.gated_mlp:
        params = with_unit_gate(params)
    target = split_config(representation.model)
    params = with_zero_biases(target, params)
    return tensor_names.write(row, target, params)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder that is renamed to `folder` on success and removed on failure.

    Its name is random, so it never replaces a folder of a killed export or of another program.

    Raises:
      UserError: the folder exists or cannot be written.
    """
    if os.path.lexists(folder):
        raise UserError(f"{folder} exists already; name a new folder.")
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
    created = [path for path in partial.parents if not path.exists()]
    remove = False
    try:
        with storage.writing(folder, " No partial export is left."):
            partial.mkdir(parents=True)
            remove = True
            yield partial
            # POSIX replaces an existing folder only if it is empty.
            partial.rename(folder)
        remove = False
    finally:
        if remove:
            shutil.rmtree(partial, ignore_errors=True)
            with contextlib.suppress(OSError):
                for path in created:
                    path.rmdir()
