"""Text that needs no network: the Python sources that are installed where the study runs."""

import dataclasses
import hashlib
import sysconfig
from importlib import metadata
from pathlib import Path

import numpy as np

from sparse_dataflow.data.documents import PythonStdlibSource
from sparse_dataflow.files.errors import UserError

LARGEST_FILE, MOST_OF_PACKAGE = 2**17, 4 * 2**20
"""Larger files are tables of data, and no package may be most of the text."""

HELD_OUT = 50
"""One file in so many is held out, by its hash."""


@dataclasses.dataclass(frozen=True)
class Text:
    """Packed text, a byte a token.

    Attributes:
      train: uint8 [bytes].
      held_out: uint8 [bytes], of other files.
      origin: where it is from, for a result file.
    """

    train: np.ndarray
    held_out: np.ndarray
    origin: dict

    def batch(self, rng: np.random.Generator, batch: int, sequence: int) -> np.ndarray:
        """Draws int32 [batch, sequence + 1] of the training text."""
        starts = rng.integers(len(self.train) - sequence, size=batch)
        return np.stack([self.train[s : s + sequence + 1] for s in starts]).astype(np.int32)

    def held_out_rows(self, batch: int, sequence: int) -> np.ndarray:
        """Returns int32 [batch, sequence + 1], evenly spread over the held-out text."""
        starts = np.linspace(0, len(self.held_out) - sequence - 1, batch).astype(int)
        return np.stack([self.held_out[s : s + sequence + 1] for s in starts]).astype(np.int32)


def load_text(path: str, most: int) -> Text:
    """Returns the text of a file, or that of the Python sources installed here.

    Args:
      path: a file of text that was carried along; "" takes the standard library and then the
        installed packages in alphabetical order, up to `most` bytes.

    Raises:
      UserError: the file cannot be read, or is too short.
    """
    if path:
        try:
            content = Path(path).read_bytes()[:most]
        except OSError as error:
            raise UserError(f"--text={path} cannot be read: {error.strerror}.") from None
        cut = len(content) - len(content) // HELD_OUT
        return _text([content[:cut]], [content[cut:]], {"file": Path(path).name})
    train: list[bytes] = []
    held_out: list[bytes] = []
    seen: set[bytes] = set()
    packages: dict[str, int] = {}
    left = most
    for package, content in _sources():
        digest = hashlib.sha256(content).digest()
        if len(content) > min(LARGEST_FILE, left) or digest in seen:
            continue
        seen.add(digest)
        left -= len(content)
        packages[package] = packages.get(package, 0) + len(content)
        split = held_out if int.from_bytes(digest[:4], "big") % HELD_OUT == 0 else train
        split.append(content)
        if left < 2**12:
            break
    return _text(train, held_out, {"python_sources": packages})


def _text(train, held_out, origin):
    splits = [np.frombuffer(b"".join(files), np.uint8) for files in (train, held_out)]
    digest = hashlib.sha256(b"".join([*train, *held_out])).hexdigest()
    if min(map(len, splits)) < 2**14:
        raise UserError(f"The text is too short; legal: at least {HELD_OUT * 2**14} bytes.")
    lengths = {"train_bytes": len(splits[0]), "held_out_bytes": len(splits[1])}
    return Text(splits[0], splits[1], {**origin, **lengths, "sha256": digest})


def _sources():
    """Yields (package and version, content) of all Python files, in a fixed order."""
    python = f"python {sysconfig.get_python_version()}"
    for document in PythonStdlibSource.from_interpreter().documents():
        yield python, document.text.encode() + b"\0"
    installed = sorted(metadata.distributions(), key=lambda each: (each.name or "").lower())
    for each in installed:
        left = MOST_OF_PACKAGE
        for file in sorted(file for file in each.files or () if file.suffix == ".py"):
            try:
                content = Path(str(file.locate())).read_bytes() + b"\0"
            except OSError:  # Listed, and removed since.
                continue
            left -= len(content)
            if left < 0:
                break
            yield f"{each.name} {each.version}", content
