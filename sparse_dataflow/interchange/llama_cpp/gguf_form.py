"""Writer of the GGUF form: one file that llama.cpp, and what is built on it, runs."""

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.data.local_files import needed_module
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.json_files import JsonObject
from sparse_dataflow.interchange import architectures, tensor_names
from sparse_dataflow.interchange.architectures import AUTO, Representation
from sparse_dataflow.interchange.llama_cpp import metadata, vocabulary

FILE = "model.gguf"
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
"""Legal dtypes of the numbers of matrices -> the name in `gguf`."""

_FLOAT32 = ("norm.weight", ".bias", "position_embd.weight", "ffn_gate_inp.weight",
         "ffn_gate_inp_shexp.weight", *metadata.FACTORS)  # fmt: skip
"""Ends of the names of tensors whose numbers llama.cpp needs in float32."""

_LOG = logging.getLogger(__name__)


class Chosen(NamedTuple):
    """A family of llama.cpp that represents a model.

    Attributes:
      name: architecture.
      representation: how it represents the model.
    """

    name: str
    representation: Representation


def choose(model: ModelConfig, architecture: str, began: str = "") -> Chosen:
    """Returns the family that represents a dense model.

    Args:
      architecture: name of a row of `ARCHITECTURES`, or "auto".
      began: architecture that the weights began with, which comes first.

    Raises:
      UserError: llama.cpp has no such model; names why.
    """
    names = [n for n, row in architectures.ARCHITECTURES.items() if row.gguf]
    names = (
        [*([began] if began in names else []), *names] if architecture == AUTO else [architecture]
    )
    inexact, problems = [], []
    for name in names:
        try:
            metadata.family_of(architectures.ARCHITECTURES[name])
            representation = architectures.represent(name, model)
            metadata.write(name, representation.fields, _shapes(name, representation.model))
        except UserError as error:
            problems.append(str(error))
            continue
        # The other classes store a unit gate or zero biases besides.
        if representation.exact:
            return Chosen(name, representation)
        inexact.append(Chosen(name, representation))
    if not inexact:
        raise UserError(
            f"llama.cpp has no such model. {' '.join(dict.fromkeys(problems))} Legal: form=dense."
        )
    return inexact[0]


def _shapes(name, model):
    """Returns the shape of each tensor of a model in a GGUF file."""
    row = metadata.stored_row(architectures.ARCHITECTURES[name])
    return tensor_names.stored_shapes(row, model)


def write(
    folder: Path,
    chosen: Chosen,
    tensors: Mapping[str, np.ndarray],
    tokenizer: Tokenizer,
    title: str,
    dtype: str,
) -> Path:
    """Writes a GGUF file into an existing folder.

    Args:
      folder: existing folder.
      chosen: see `choose`.
      tensors: float32 tensors by their names in the file.
      tokenizer: tokenizer of the model; the file has its original ids.
      title: name of the model in the file.
      dtype: of matrices, one of DTYPES; all else is float32.

    Raises:
      UserError: the package `gguf` is not installed, or llama.cpp has no such tokenizer.
    """
    gguf = needed_module("gguf", "form=gguf")
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    written = metadata.write(chosen.name, chosen.representation.fields, shapes)
    tensors = {**tensors, **written.tensors}
    values: JsonObject = {"general.name": title, **written.metadata}
    values |= {"general.file_type": int(gguf.LlamaFileType[_FILE_TYPES[dtype]])}
    values |= {"general.quantization_version": gguf.GGML_QUANT_VERSION}
    values |= vocabulary.write(tokenizer, chosen.representation.model.vocab_size)
    writer = gguf.GGUFWriter(folder / FILE, values.pop(metadata.ARCHITECTURE))
    for key, value in values.items():
        _adder(writer, value)(key, value)
    kinds = {name: _kind(gguf, name, tensor, dtype) for name, tensor in tensors.items()}
    # The header lists all tensors before the first one's bytes.  So sizes are computed from the
    # shapes, and each tensor is quantised when it is written: one at a time in memory.
    for name, tensor in tensors.items():
        block, size = gguf.GGML_QUANT_SIZES[kinds[name]]
        count = math.prod(tensor.shape) // block * size
        writer.add_tensor_info(
            name, _stored_shape(gguf, tensor, kinds[name]), np.dtype(np.uint8), count, kinds[name]
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in tensors.items():
        writer.write_tensor_data(gguf.quants.quantize(np.ascontiguousarray(tensor), kinds[name]))
    writer.close()
    return folder / FILE


_FILE_TYPES = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "bfloat16": "MOSTLY_BF16",
               "q8_0": "MOSTLY_Q8_0"}  # fmt: skip


def _adder(writer, value) -> Callable[[str, object], None]:
    """Returns the method of a writer for a value."""
    methods = ((bool, writer.add_bool), (int, writer.add_uint32), (float, writer.add_float32),
               (str, writer.add_string), (list, writer.add_array))  # fmt: skip
    return next(method for kind, method in methods if isinstance(value, kind))


def _kind(gguf, name, tensor, dtype):
    """Returns the type of the numbers of a tensor."""
    kind = gguf.GGMLQuantizationType[DTYPES[dtype]]
    if tensor.ndim < 2 or name.endswith(_FLOAT32):
        return gguf.GGMLQuantizationType.F32
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    if tensor.shape[-1] % block:
        _LOG.warning("%s has rows of %d numbers, no multiple of %d: it is float16", name,
                     tensor.shape[-1], block)  # fmt: skip
        return gguf.GGMLQuantizationType.F16
    return kind


def _stored_shape(gguf, tensor, kind):
    """Returns the shape in bytes, from which the writer derives that in numbers."""
    return gguf.quant_shape_to_byte_shape(tensor.shape, kind)
