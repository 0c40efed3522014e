"""Reader and writer of named tensors in one safetensors file, or in several with an index."""

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.files import json_files, storage
from sparse_dataflow.files.errors import UserError, first_line
from sparse_dataflow.interchange.llama_cpp.gguf_file import SUFFIX, GgufFile

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
"""Largest file of an export, in bytes; the default of `transformers`."""

POINTER = "gguf.json"
"""File of a folder that stands for a GGUF file; names that file."""

DTYPES = ("float32", "bfloat16")
"""Legal dtypes of the floats of an export."""

MOST_HEADER_BYTES = 2**24
_SHOWN = 5


class Tensors:
    """Reader of the tensors of a folder, one tensor at a time.

    Attributes:
      folder: the folder of the files.
      names: names of all tensors.
      gguf: the file of llama.cpp that has them; None for safetensors.
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
        self.gguf: GgufFile | None = None
        for path in paths or _files(self.folder):
            if path.suffix == SUFFIX:
                self.gguf = opened_gguf(path)
                self._file_of |= dict.fromkeys(self.gguf.places, path)
                continue
            try:
                with opened(path) as file:
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
        tensor = tensor.astype(np.float32, copy=False)
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

    def refuse_missing(self, name: str) -> NoReturn:
        """Raises the UserError of a tensor that the files do not have."""
        raise UserError(f"{self.folder} has no tensor {name}; the weights are incomplete.")

    def _read(self, name, shape):
        if name not in self.names:
            self.refuse_missing(name)
        try:
            if self.gguf:
                self._refuse_shape(name, self.gguf.shape(name), shape)
                return self.gguf.array(name)
            with opened(self._file_of[name]) as file:
                header = file.get_slice(name)
                self._refuse_shape(name, list(header.get_shape()), shape)
                if header.get_dtype() == "BF16":
                    return _read_bfloat16(self._file_of[name], name)
                return file.get_tensor(name)
        except UserError:
            raise
        except Exception as error:  # The library raises errors of any type.
            raise UserError(
                f"{name} in {self._file_of[name]} cannot be read ({first_line(error)})."
            ) from None

    def _refuse_shape(self, name, stored, shape):
        if stored != list(shape):
            raise UserError(
                f"{self.folder}: {name} has shape {stored}; its config.json requires {list(shape)}."
            )


def opened_gguf(path: Path) -> GgufFile:
    """Opens a file of llama.cpp.

    Raises:
      UserError: it is damaged, or the package `gguf` is not installed.
    """
    try:
        status = path.stat()
        return _opened_gguf(path, status.st_size, status.st_mtime_ns)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a complete GGUF file ({first_line(error)}).") from None


@functools.lru_cache(maxsize=1)
def _opened_gguf(path, size, changed):
    """Returns an opened file, whose header takes a second to read."""
    return GgufFile(path)


def stored_bytes(folder: Path) -> int:
    """Returns the bytes of the weights in a folder, 0 without any."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def refuse_larger(folder: Path, model: ModelConfig, stored: int) -> None:
    """Refuses a model with more numbers than its files have bytes, before anything is laid out.

    Args:
      folder: for the message.
      stored: bytes of the weights; 0 if they are not known.

    Raises:
      UserError: naming both.
    """
    widths = model.d_model + model.d_ff * max(1, model.experts) + model.num_heads * model.head_width
    # A lower bound for every storage: a layer has more numbers than features.
    least = model.num_layers * widths + model.vocab_size * model.d_model
    if stored and least > stored:
        raise UserError(
            f"{folder} has {stored:,} bytes of weights, and its config.json a model of "
            f"{model.num_layers:,} layers, width {model.d_model:,} and {model.vocab_size:,} tokens "
            f"({least:,} numbers or more); the weights are incomplete or another model's."
        )


def digest(folder: Path) -> str:
    """Returns the sha256 (hex) of the files' sha256 digests, in the order of file names."""
    combined = hashlib.sha256()
    for path in _files(folder):
        with storage.open_regular(path) as file:
            combined.update(hashlib.file_digest(file, "sha256").digest())
    return combined.hexdigest()


def other_format(names: Iterable[str]) -> str:
    """Returns the way out for a model whose files have weights of another format; "" for none."""
    names = list(names)
    if gguf := next((name for name in names if name.endswith(SUFFIX)), ""):
        return f"{gguf} is a file of llama.cpp, which is read by its own path on this machine."
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


def as_dtype(tensors: Mapping[str, object], dtype: str) -> dict[str, np.ndarray]:
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
    tensors: Mapping[str, object],
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


def write_file(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes one safetensors file.

    Raises:
      UserError: a float is not finite: no reader here takes such a file.
    """
    arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    for name, array in arrays.items():
        if jnp.issubdtype(array.dtype, jnp.floating) and not np.isfinite(array).all():
            raise UserError(f"{name} has values that are not finite; legal: finite weights.")
    # `transformers` refuses a file without this format.
    save_file(arrays, path, metadata={"format": "pt", **metadata})
    _sort_metadata(path)


def _sort_metadata(path):
    """Sorts the metadata of a file: safetensors writes them in a random order, and what is saved
    twice shall have the same bytes."""
    header, begin = _header(path)
    ordered = {"__metadata__": dict(sorted(header.pop("__metadata__").items())), **header}
    text = json.dumps(ordered, separators=(",", ":"), ensure_ascii=False).encode()
    with open(path, "r+b") as file:
        # The first 8 bytes are the header's length, which spaces keep.
        file.seek(8)
        file.write(text.ljust(begin - 8))


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
    if (folder / POINTER).exists():
        return [Path(json_files.load(folder / POINTER)["weights"])]
    index = folder / INDEX
    if index.exists():
        try:
            names = sorted(set(json_files.load(index)["weight_map"].values()))
            # An index from elsewhere must not name files outside its folder.
            if not names or any(Path(name).name != name for name in names):
                raise ValueError("weight_map must name files of this folder")
        except json_files.MALFORMED as error:
            raise UserError(f"{index} is damaged ({type(error).__name__}: {error}).") from None
        present = set(os.listdir(folder))  # A name may be longer than the system's.
        missing = [name for name in names if name not in present]
        if missing:
            shown, more = ", ".join(missing[:_SHOWN]), len(missing) - _SHOWN
            shown += f" and {more} more" if more > 0 else ""
            raise UserError(f"{folder} lacks {shown}, which its index names.")
        return [folder / name for name in names]
    if not (folder / FILE).exists():
        legal = f"legal: {FILE}, or {INDEX} with its files."
        names = sorted(path.name for path in folder.iterdir())
        raise UserError(f"{folder} has no weights; {other_format(names) or legal}")
    return [folder / FILE]


def opened(path: Path) -> safe_open:
    """Opens a safetensors file.

    Raises:
      OSError, SafetensorError, ValueError: it is none, or its header would take long to read.
    """
    with storage.open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
    if length > MOST_HEADER_BYTES:  # A tensor has about 100 bytes.
        raise ValueError(f"its header has {length:,} bytes; legal: {MOST_HEADER_BYTES:,}")
    return safe_open(storage.regular(path), framework="numpy")


def _read_bfloat16(path, name):
    """Reads a bfloat16 tensor as float32. numpy has no bfloat16, which is the upper half of a
    float32."""
    header, begin = _header(path)
    entry = header[name]
    start, end = entry["data_offsets"]
    with storage.open_regular(path) as file:
        file.seek(begin + start)
        upper = np.frombuffer(file.read(end - start), "<u2").astype(np.uint32)
    return (upper << 16).view(np.float32).reshape(entry["shape"])


def _header(path):
    """Returns (header, position of the first byte of data) of a file."""
    with storage.open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        return json_files.parse(file.read(length)), 8 + length
