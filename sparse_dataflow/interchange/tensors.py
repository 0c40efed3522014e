"""Named tensors in safetensors files: one file, or several with an index."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Tensors:
    """The tensors of a folder, read one at a time; float ones come as float32.

    Attributes:
      folder: where they lie.
      names: of all tensors.
    """

    def __init__(self, folder: Path):
        """Opens the files; nothing is read yet.

        Raises:
          UserError: there is no such file, or one cannot be read.
        """
        self.folder = Path(folder)
        self._file_of: dict[str, Path] = {}
        for path in _files(self.folder):
            try:
                with safe_open(path, framework="numpy") as file:
                    self._file_of |= dict.fromkeys(file.keys(), path)
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path} is no whole safetensors file ({error}).") from None
        self.names = set(self._file_of)

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Float32 array of a tensor whose shape is known.

        Raises:
          UserError: it is missing, of another shape, not of floats, or not finite.
        """
        found = self._open(name, shape)
        if found.dtype.kind != "f":
            raise UserError(f"{self.folder}: {name} is {found.dtype}; legal: floats.")
        found = found.astype(np.float32)
        if not np.isfinite(found).all():
            raise UserError(f"{self.folder}: {name} has values that are not finite.")
        return found

    def read_integers(self, name: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """Int32 array of a tensor, of this shape if one is given; raises as `read`."""
        found = self._open(name, shape)
        if found.dtype != np.int32:
            raise UserError(f"{self.folder}: {name} is {found.dtype}; legal: int32.")
        return found

    def _open(self, name, shape):
        if name not in self.names:
            raise UserError(f"{self.folder} has no tensor {name}; the weights are incomplete.")
        try:
            with safe_open(self._file_of[name], framework="numpy") as file:
                part = file.get_slice(name)
                there = tuple(part.get_shape())
                if shape is not None and there != tuple(shape):
                    raise UserError(
                        f"{self.folder}: {name} has shape {list(there)}; its config.json asks for "
                        f"{list(shape)}."
                    )
                if part.get_dtype() == "BF16":
                    return _widened(self._file_of[name], name)
                return file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self._file_of[name]} cannot be read ({error}).") from None

    def digest(self) -> str:
        """Sha256 (hex) over the files, in the order of their names."""
        whole = hashlib.sha256()
        for path in _files(self.folder):
            with path.open("rb") as file:
                whole.update(hashlib.file_digest(file, "sha256").digest())
        return whole.hexdigest()


def write(path: Path, tensors: Mapping[str, Any], about: Mapping[str, str]) -> None:
    """Writes one safetensors file; `about` goes into its header."""
    plain = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
    save_file(plain, path, metadata={"format": "pt", **about})


def _files(folder):
    index = folder / INDEX
    if index.exists():
        try:
            names = sorted(set(json_files.load(index)["weight_map"].values()))
            if not names or any(Path(name).name != name for name in names):
                raise ValueError("its weight_map names no files of this folder")
        except json_files.MALFORMED as error:
            raise UserError(f"{index} is damaged ({type(error).__name__}: {error}).") from None
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise UserError(f"{folder} lacks {', '.join(missing)}, which its index names.")
        return [folder / name for name in names]
    if not (folder / FILE).exists():
        raise UserError(f"{folder} has no {FILE} and no {INDEX}; other formats are not read.")
    return [folder / FILE]


def _widened(path, name):
    """A bfloat16 tensor, which numpy does not know, as float32: its bytes are the upper half."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(length))[name]
        start, stop = entry["data_offsets"]
        file.seek(8 + length + start)
        upper = np.frombuffer(file.read(stop - start), "<u2").astype(np.uint32)
    return (upper << 16).view(np.float32).reshape(entry["shape"])
