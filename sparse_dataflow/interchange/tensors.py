"""Reader and writer of named tensors in one safetensors file, or in several with an index."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError, first_line

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
"""Largest file of an export, in bytes; the default of `transformers`."""

DTYPES = ("float32", "bfloat16")
"""Legal dtypes of the floats of an export."""

MOST_HEADER_BYTES = 2**24


class Tensors:
    """Reader of the tensors of a folder, one tensor at a time.

    Attributes:
      folder: the folder of the files.
      names: names of all tensors.
    """

    def __init__(self, folder: Path, paths: Sequence[Path] = ()):
        """Reads the header of each file.

        Args:
          folder: see above.
          paths: the files; () for those of the folder's index.

        Raises:
          UserError: a file is missing or cannot be read.
        """
        self.folder = Path(folder)
        self._file_of: dict[str, Path] = {}
        for path in paths or _files(self.folder):
            if not path.is_file():  # Reading a named pipe would never end.
                raise UserError(f"{path} is not a regular file.")
            try:
                _check_header(path)
                with safe_open(path, framework="numpy") as file:
                    self._file_of |= dict.fromkeys(file.keys(), path)
            except (OSError, SafetensorError, ValueError) as error:
                raise UserError(f"{path} is not a complete safetensors file ({error}).") from None
        self.names = set(self._file_of)

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Reads a tensor of floats and converts it to float32.

        Raises:
          UserError: the tensor is missing, has another shape or dtype, or is not finite.
        """
        tensor = self._read(name, shape)
        if tensor.dtype.kind != "f":
            raise UserError(f"{self.folder}: {name} is {tensor.dtype}; legal: floats.")
        tensor = tensor.astype(np.float32)
        if not np.isfinite(tensor).all():
            raise UserError(f"{self.folder}: {name} has values that are not finite.")
        return tensor

    def read_integers(self, name: str, shape: tuple[int, ...], dtype: str = "int32") -> np.ndarray:
        """Reads a tensor of integers.

        Raises:
          UserError: the tensor is missing, or has another shape or dtype.
        """
        tensor = self._read(name, shape)
        if tensor.dtype != dtype:
            raise UserError(f"{self.folder}: {name} is {tensor.dtype}; legal: {dtype}.")
        return tensor

    def _read(self, name, shape):
        if name not in self.names:
            raise UserError(f"{self.folder} has no tensor {name}; the weights are incomplete.")
        try:
            with safe_open(self._file_of[name], framework="numpy") as file:
                header = file.get_slice(name)
                stored_shape = list(header.get_shape())
                if stored_shape != list(shape):
                    raise UserError(
                        f"{self.folder}: {name} has shape {stored_shape}; its config.json "
                        f"requires {list(shape)}."
                    )
                if header.get_dtype() == "BF16":
                    return _read_bfloat16(self._file_of[name], name)
                return file.get_tensor(name)
        except UserError:
            raise
        except Exception as error:  # The library raises errors of any type.
            raise UserError(
                f"{name} in {self._file_of[name]} cannot be read ({first_line(error)})."
            ) from None


def digest(folder: Path) -> str:
    """Returns the sha256 (hex) of the files' sha256 digests, in the order of file names."""
    combined = hashlib.sha256()
    for path in _files(folder):
        with path.open("rb") as file:
            combined.update(hashlib.file_digest(file, "sha256").digest())
    return combined.hexdigest()


def other_format(names: Iterable[str]) -> str:
    """Returns the way out for a model whose files have weights of another format; "" for none."""
    names = list(names)
    if gguf := next((name for name in names if name.endswith(".gguf")), ""):
        return (
            f"{gguf} is a file for llama.cpp, mostly of rounded weights; legal: the model of "
            f"transformers that it was made from, with {FILE}."
        )
    pickled = (".bin", ".pth", ".pt", ".ckpt", ".h5", ".msgpack")
    if other := next((name for name in names if name.endswith(pickled)), ""):
        return (
            f"{other} is not read, because such files can run code; convert it with transformers "
            "and torch: `AutoModelForCausalLM.from_pretrained(MODEL).save_pretrained(NEW)`, the "
            "same with AutoTokenizer, and give NEW."
        )
    return ""


def file_names(folder: Path) -> set[str]:
    """Returns the names of the files of the tensors, with their index."""
    return {path.name for path in _files(folder)} | {INDEX}


def as_dtype(tensors: Mapping[str, Any], dtype: str) -> dict[str, np.ndarray]:
    """Returns tensors in numpy, with floats of a dtype of DTYPES.

    Raises:
      UserError: there is no such dtype.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype!r} is unknown; legal: {', '.join(DTYPES)}.")

    def converted(tensor):
        is_float = jnp.issubdtype(tensor.dtype, jnp.floating)
        return np.asarray(tensor, jnp.dtype(dtype)) if is_float else np.asarray(tensor)

    return {name: converted(tensor) for name, tensor in tensors.items()}


def write(
    folder: Path,
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str],
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Writes one safetensors file, or several with an index, into an existing folder.

    Args:
      folder: existing folder.
      tensors: arrays by name.
      metadata: goes into the header of each file.
      shard_bytes: largest file, in bytes; a larger tensor has a file of its own.

    Returns:
      The files.
    """
    shards: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        array = np.asarray(tensor, order="C")
        if shards[-1] and size + array.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = array
        size += array.nbytes
    count = len(shards)
    if count == 1:
        write_file(folder / FILE, shards[0], metadata)
        return [folder / FILE]
    for number, arrays in enumerate(shards):
        write_file(folder / shard_name(number, count), arrays, metadata)
    return write_index(
        folder,
        {
            name: (shard_name(i, count), a.nbytes)
            for i, s in enumerate(shards)
            for name, a in s.items()
        },
    )


def shard_name(number: int, count: int) -> str:
    """Returns the name of a file of several; the first one has number 0."""
    return f"model-{number + 1:05}-of-{count:05}.safetensors"


def write_file(path: Path, arrays: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Writes one safetensors file."""
    arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    save_file(arrays, path, metadata={"format": "pt", **metadata})


def sizes(path: Path) -> dict[str, int]:
    """Returns tensor -> its bytes, of a file that `write_file` wrote."""
    header, _ = _header(path)
    offsets = {name: entry["data_offsets"] for name, entry in header.items() if "dtype" in entry}
    return {name: end - start for name, (start, end) in offsets.items()}


def write_index(folder: Path, places: Mapping[str, tuple[str, int]]) -> list[Path]:
    """Writes the index of several files; returns the files with it.

    Args:
      places: tensor -> name of its file, and its bytes.
    """
    weight_map = {name: file for name, (file, _) in places.items()}
    index = {
        "metadata": {"total_size": sum(size for _, size in places.values())},
        "weight_map": weight_map,
    }
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    return [folder / name for name in (*dict.fromkeys(weight_map.values()), INDEX)]


def _files(folder):
    index = folder / INDEX
    if index.exists():
        try:
            names = sorted(set(json_files.load(index)["weight_map"].values()))
            if not names or any(Path(name).name != name for name in names):
                raise ValueError("weight_map must name files of this folder")
        except json_files.MALFORMED as error:
            raise UserError(f"{index} is damaged ({type(error).__name__}: {error}).") from None
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise UserError(f"{folder} lacks {', '.join(missing)}, which its index names.")
        return [folder / name for name in names]
    if not (folder / FILE).exists():
        legal = f"legal: {FILE}, or {INDEX} with its files."
        names = sorted(path.name for path in folder.iterdir())
        raise UserError(f"{folder} has no weights; {other_format(names) or legal}")
    return [folder / FILE]


def _check_header(path):
    """Raises ValueError for a header that takes long to read: a tensor has about 100 bytes."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > MOST_HEADER_BYTES:
        raise ValueError(f"its header has {length:,} bytes; legal: {MOST_HEADER_BYTES:,}")


def _read_bfloat16(path, name):
    """Reads a bfloat16 tensor as float32. numpy has no bfloat16, which is the upper half of a
    float32."""
    header, begin = _header(path)
    entry = header[name]
    start, end = entry["data_offsets"]
    with path.open("rb") as file:
        file.seek(begin + start)
        upper = np.frombuffer(file.read(end - start), "<u2").astype(np.uint32)
    return (upper << 16).view(np.float32).reshape(entry["shape"])


def _header(path):
    """Returns (header, position of the first byte of data) of a file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json_files.parse(file.read(length)), 8 + length
