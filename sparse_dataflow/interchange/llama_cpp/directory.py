"""A GGUF file as a Hugging Face directory: small files that follow from its metadata, and a pointer
to the file itself, whose weights are read where they are."""

import hashlib
import json
import logging
from pathlib import Path

import numpy as np

from sparse_dataflow.data import cache
from sparse_dataflow.files import json_files, storage
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import special_tokens
from sparse_dataflow.interchange.llama_cpp import metadata, vocabulary
from sparse_dataflow.interchange.llama_cpp.gguf_file import GgufFile
from sparse_dataflow.interchange.tensors import POINTER, opened_gguf

_VERSION = 1
"""Of the rules that make the small files; a new one makes them again."""

_CONFIG = "config.json"
_LOG = logging.getLogger(__name__)


def source(file: GgufFile) -> metadata.Source:
    """Returns what a model is read from."""
    shapes = {name: place.shape for name, place in file.places.items()}
    return metadata.Source(file.metadata, shapes, lambda name: np.asarray(file.array(name)))


def folder_of(path: Path) -> Path:
    """Returns the folder in the cache that stands for a GGUF file.

    Raises:
      UserError: the file is damaged, or its model or tokenizer is not supported.
    """
    path = path.expanduser().resolve()
    file = opened_gguf(path)
    # The header names all tensors and the tokenizer; to hash the weights too would take minutes.
    with storage.open_regular(path) as opened:
        head = hashlib.sha256(opened.read(file.header_bytes)).hexdigest()
    origin = {"code": _VERSION, "path": path, "size": path.stat().st_size, "header": head}
    return cache.derive(cache.FOLDER, "gguf", "model", origin, lambda f: _make(f, file)).path


def _make(folder, file):
    """Writes the small files, and a pointer to the file with the weights."""
    try:
        fields, unread = metadata.read(source(file))
        files = vocabulary.read(file.metadata, fields["vocab_size"])
    except UserError as error:
        raise UserError(f"{file.path} cannot be imported: {error}") from None
    except json_files.MALFORMED as error:
        raise UserError(
            f"{file.path} cannot be imported: its tokenizer is damaged "
            f"({type(error).__name__}: {error})."
        ) from None
    if unread:
        _LOG.warning("%s: keys that change nothing here: %s", file.path, ", ".join(unread))
    generation = json_files.parse(files[special_tokens.GENERATION])
    fields |= {"torch_dtype": "float32", **generation}
    files[_CONFIG] = special_tokens.as_json(fields)
    files[POINTER] = json.dumps({"weights": str(file.path)}).encode()
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
