"""Reader of the bytes of a GGUF file: its metadata, and its tensors one at a time.

A file begins with counts: of its metadata, of its tensors, of the items of a list. Each is compared
with the bytes that are left before anything of its size is made, so that a damaged or hostile file
is refused at once. The package `gguf` converts the blocks of quantised types.
"""

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparse_dataflow.data.local_files import needed_module
from sparse_dataflow.files import storage
from sparse_dataflow.files.json_files import JsonObject

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"
MOST_HEADER_BYTES, MOST_ITEMS, MOST_PAIRS, MOST_TENSORS = 2**26, 2**21, 2**12, 2**17
"""Bytes in front of the tensors, items of a list, pairs of metadata, and tensors. Gemma's 262,144
tokens take 8 million bytes; the largest mixtures of experts have some thousand tensors."""

_FIRST_BYTES = 2**24
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", _BOOL: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
"""Number of a type of metadata -> its format in `struct`."""

_MOST_DIMENSIONS = 4
_LEAST_PAIR_BYTES = 8 + 4 + 1
_LEAST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


class _Beyond(ValueError):
    """The bytes at hand end before what is read."""


class Place(NamedTuple):
    """Where a tensor lies in a file.

    Attributes:
      kind: type of its numbers, a `gguf.GGMLQuantizationType`.
      shape: its shape, outermost axis first.
      start: position of its first byte.
      size: its bytes.
    """

    kind: Any
    shape: tuple[int, ...]
    start: int
    size: int


class _Cursor:
    """Reads values from bytes, and refuses counts that the bytes left cannot hold."""

    def __init__(self, data: bytes, size: int):
        self.data, self.size, self.position = data, size, 0

    def take(self, form: str) -> Any:
        end = self.position + struct.calcsize(form)
        self._refuse_beyond(end)
        (value,) = struct.unpack_from(form, self.data, self.position)
        self.position = end
        return value

    def count(self, least: int, most: int = MOST_HEADER_BYTES) -> int:
        """Returns a count of at most so many things, of at least so many bytes each."""
        count = self.take("<Q")
        if count > most:
            raise ValueError(f"it announces {count:,} items; legal: up to {most:,}")
        if count * least > self.size - self.position:
            raise ValueError(
                f"it announces {count:,} items of {least} bytes or more at byte {self.position:,}, "
                f"and has {self.size:,} bytes"
            )
        return count

    def string(self) -> str:
        length = self.count(1)
        end = self.position + length
        self._refuse_beyond(end)
        text = self.data[self.position : end].decode("utf-8")
        self.position = end
        return text

    def value(self, kind: int) -> object:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            value = self.take(_SCALARS[kind])
            # The shortest number that rounds to the stored one, such as 1e-05.
            return float(str(np.float32(value))) if kind == 6 else value
        if kind != _ARRAY:
            raise ValueError(f"its metadata have a value of type {kind}; legal: 0 to 12")
        inner = self.take("<I")
        if inner == _STRING:
            return self._strings(self.count(8, MOST_ITEMS))
        if inner not in _SCALARS:
            raise ValueError(f"it has a list of type {inner}; legal: numbers and strings")
        form = _SCALARS[inner]
        size = struct.calcsize(form)
        count = self.count(size, MOST_ITEMS)
        end = self.position + count * size
        self._refuse_beyond(end)
        array = np.frombuffer(self.data, np.dtype(form), count, self.position)
        self.position = end
        return array.tolist()

    def _strings(self, count):
        """Returns strings as `string` does, in a loop of its own: vocabularies have 500,000."""
        data, position, size = self.data, self.position, len(self.data)
        texts, length_of = [], struct.Struct("<Q").unpack_from
        for _ in range(count):
            start = position + 8
            end = start + length_of(data, position)[0] if start <= size else size + 1
            if end > size:
                raise _Beyond(f"it ends inside its header, after {size:,} bytes")
            texts.append(data[start:end].decode("utf-8"))
            position = end
        self.position = position
        return texts

    def _refuse_beyond(self, end):
        if end > len(self.data):
            raise _Beyond(f"it ends inside its header, after {len(self.data):,} bytes")


class GgufFile:
    """An opened file.

    Attributes:
      path: the file.
      metadata: value of each key.
      places: place of each tensor, by its name.
      metadata_bytes: position of the first byte after the metadata.
      header_bytes: position of the first byte after the header.
    """

    def __init__(self, path: Path):
        """Reads the header.

        Raises:
          OSError: the file cannot be read.
          ValueError: it is damaged.
          UserError: the package `gguf` is not installed.
        """
        self.path = path
        self._gguf = needed_module("gguf", f"{path.name}, a file of llama.cpp,")
        size = path.stat().st_size
        with storage.open_regular(path) as file:
            # Most headers are short, but one with a vocabulary may have many megabytes.
            data = file.read(_FIRST_BYTES)
            try:
                self._read_header(data, size)
            except _Beyond:
                if len(data) >= size:
                    raise
                data += file.read(MOST_HEADER_BYTES - len(data))
                self._read_header(data, size)

    def _read_header(self, data: bytes, size: int) -> None:
        if data[: len(MAGIC)] != MAGIC:
            raise ValueError("it does not begin with GGUF")
        cursor = _Cursor(data, size)
        cursor.position = len(MAGIC)
        version = cursor.take("<I")
        if version not in VERSIONS:
            legal = " and ".join(map(str, VERSIONS))
            raise ValueError(f"it has version {version}; legal: {legal}, with little-endian bytes")
        # Checked against the bytes that so many entries take at least, before any of them is read.
        tensors = cursor.count(_LEAST_TENSOR_BYTES, MOST_TENSORS)
        pairs = cursor.count(_LEAST_PAIR_BYTES, MOST_PAIRS)
        self.metadata: JsonObject = {}
        for _ in range(pairs):
            key = cursor.string()
            if key in self.metadata:
                raise ValueError(f"it has the key {key!r} twice")
            self.metadata[key] = cursor.value(cursor.take("<I"))
        self.metadata_bytes = cursor.position
        rows = [self._row(cursor) for _ in range(tensors)]
        self.header_bytes = cursor.position
        alignment = self.metadata.get(ALIGNMENT, 32)
        if type(alignment) is not int or not 1 <= alignment <= 2**20:
            raise ValueError(f"{ALIGNMENT}={alignment!r}; legal: 1 to {2**20}")
        # Tensors begin at a multiple of the alignment, and their places count from there.
        data_start = math.ceil(cursor.position / alignment) * alignment
        self.places: dict[str, Place] = {}
        for name, kind, shape, start, length in rows:
            if data_start + start + length > size:
                raise ValueError(
                    f"{name} ends at byte {data_start + start + length:,} and the file at {size:,}"
                )
            if name in self.places:
                raise ValueError(f"it has the tensor {name!r} twice")
            self.places[name] = Place(kind, shape, data_start + start, length)
        # Each tensor is inside the file; overlapping ones could still be far more memory than it
        # has.
        if sum(place.size for place in self.places.values()) > max(0, size - data_start):
            raise ValueError("its tensors have more bytes than the file has for them")

    def _row(self, cursor):
        """Returns (name, type, shape, start, bytes) of the next tensor."""
        name, dimensions = cursor.string(), cursor.take("<I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"{name} has {dimensions} axes; legal: 1 to {_MOST_DIMENSIONS}")
        shape = tuple(cursor.take("<Q") for _ in range(dimensions))[::-1]
        number, start = cursor.take("<I"), cursor.take("<Q")
        try:
            kind = self._gguf.GGMLQuantizationType(number)
            block, block_bytes = self._gguf.GGML_QUANT_SIZES[kind]
        except (KeyError, ValueError):
            raise ValueError(f"{name} has numbers of type {number}, which gguf lacks") from None
        if 0 in shape or shape[-1] % block:
            raise ValueError(f"{name} has the shape {list(shape)}, in blocks of {block}")
        return name, kind, shape, start, math.prod(shape) // block * block_bytes

    def shape(self, name: str) -> list[int]:
        """Returns the shape of a tensor, outermost axis first."""
        return list(self.places[name].shape)

    def array(self, name: str) -> np.ndarray:
        """Reads a tensor; floats as they are stored, quantised numbers as float32."""
        kind, shape, start, size = self.places[name]
        with storage.open_regular(self.path) as file:
            file.seek(start)
            content = file.read(size)
        if len(content) < size:
            raise ValueError(f"{name} is cut off")
        plain = _PLAIN.get(kind.name)
        if plain is not None:
            return np.frombuffer(content, plain).reshape(shape)
        # The library converts sixteen rows at a time.  Blocks of numbers depend on nothing else, so
        # that longer rows are as good, and ten times as fast as those of a table of embeddings.
        _, block_bytes = self._gguf.GGML_QUANT_SIZES[kind]
        rows = math.gcd(size // block_bytes, _MOST_ROWS)
        convert: Callable = self._gguf.quants.dequantize
        return convert(np.frombuffer(content, np.uint8).reshape(rows, -1), kind).reshape(shape)


_MOST_ROWS = 256

_PLAIN = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I8": "<i1", "I16": "<i2", "I32": "<i4",
          "I64": "<i8"}  # fmt: skip
"""Types that numpy has."""
