"""A manifest lists every file of a folder with its size and SHA-256, to detect damage.

It guards against failing disks, crashes and stray edits. It is no signature: whoever can write the
folder can write a matching manifest.
"""

import contextlib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sparse_dataflow.files import json_files, storage

NAME = "manifest.json"
# Far above any real manifest (about 150 bytes per file), and small enough to read into memory.
MAX_BYTES = 64 * 2**20
_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO}


class Damaged(Exception):
    """A folder does not match its manifest; the text says how."""


def write(folder: Path, facts: json_files.JsonObject) -> None:
    """Hashes every file under `folder`, writes the manifest and flushes everything to disk.

    The manifest is complete or absent whenever the process ends: it is written under another name
    and renamed.

    Args:
      folder: holds regular files and folders only; no one may be writing to it.
      facts: JSON-able metadata; returned by `read` and `verify`.

    Raises:
      OSError: a file cannot be read or written.
      ValueError: the manifest would be larger than `MAX_BYTES`.
    """
    content = text(facts, flushed(files(folder)))
    unfinished = folder / f".{NAME}"
    with unfinished.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, folder / NAME)
    # Names are flushed last: after this, a power cut loses neither a file nor its name.
    for parent, _, _ in os.walk(folder):
        storage.flush_folder(Path(parent))


def flushed(paths: Mapping[str, Path]) -> dict[str, json_files.JsonObject]:
    """Flushes files to disk; returns {name: {"size", "sha256"}}."""
    entries = {}
    for name, path in paths.items():
        with storage.open_regular(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            # It flushes the file's pages, whichever descriptor wrote them.
            os.fsync(file.fileno())
            entries[name] = {"size": file.tell(), "sha256": digest}
    return entries


def text(facts: Mapping[str, object], entries: Mapping[str, object]) -> bytes:
    """Returns the content of a manifest.

    Args:
      facts: JSON-able metadata.
      entries: of `flushed`; more keys are kept.

    Raises:
      ValueError: it would be larger than `MAX_BYTES`.
    """
    # With a digest of itself, so that damage of the manifest does not pass for damage of the files.
    body = {"facts": dict(facts), "files": dict(entries)}
    content = json.dumps(body | {"sha256": _digest(body)}, indent=1, allow_nan=False).encode()
    if len(content) > MAX_BYTES:
        raise ValueError(f"the manifest would hold {len(content)} of {MAX_BYTES} bytes")
    return content


def read(folder: Path) -> json_files.JsonObject:
    """Returns the facts in the manifest of `folder`, without checking the files.

    Raises:
      Damaged: the manifest is missing, or `write` did not make it.
      OSError: it cannot be read, which says nothing about damage.
    """
    return _parse(folder)["facts"]


def verify(folder: Path) -> json_files.JsonObject:
    """Returns the facts in the manifest of `folder`, after checking the hash of every file.

    Only files found by walking the folder are opened, so a name in a manifest cannot lead outside.
    Files that are not listed are damage too, except hidden ones, which file browsers leave behind.

    Raises:
      Damaged: a file is missing, added, truncated or changed, or is a link.
      OSError: a file cannot be read, which says nothing about damage.
    """
    body = _parse(folder)
    named = body["files"]
    with _loss_is_damage():
        paths = files(folder)
        for name in sorted(named.keys() - paths.keys()):
            raise Damaged(f"its file {name} is missing")
        for name in sorted(paths.keys() - named.keys()):
            if not Path(name).name.startswith("."):
                raise Damaged(f"its file {name} is not in its manifest")
        for name, entry in named.items():
            size = paths[name].stat().st_size
            if size != entry["size"]:
                raise Damaged(f"its file {name} has {size} bytes instead of {entry['size']}")
            with storage.open_regular(paths[name]) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                    raise Damaged(f"its file {name} has changed since it was written")
    return body["facts"]


def load_json(path: Path) -> Any:
    """Returns the JSON value in a file of at most `MAX_BYTES`.

    Raises:
      Damaged: the file is missing, too large or not JSON.
      OSError: it cannot be read.
    """
    try:
        with _loss_is_damage():
            return json_files.load(path, MAX_BYTES)
    except json.JSONDecodeError as error:
        raise Damaged(f"its {path.name} is not JSON") from error
    except ValueError as error:
        raise Damaged(f"its {path.name} is not JSON: {error}") from error


def _parse(folder: Path) -> json_files.JsonObject:
    with _loss_is_damage():
        if NAME not in os.listdir(folder):
            raise Damaged("it has no manifest, so it was never finished")
        if not stat.S_ISREG((folder / NAME).lstat().st_mode):
            raise Damaged("its manifest is not a regular file")
    return _checked(load_json(folder / NAME))


def parse(content: bytes) -> json_files.JsonObject:
    """Returns {"facts": ..., "files": {name: {"size", "sha256"}}} of a manifest's bytes.

    Raises:
      Damaged: `write` did not make them.
    """
    try:
        return _checked(json_files.parse(content))
    except ValueError as error:
        raise Damaged(f"its {NAME} is not JSON: {error}") from error


def _checked(content: Any) -> json_files.JsonObject:
    try:
        body = {key: content[key] for key in ("facts", "files")}
        whole = content["sha256"] == _digest(body) and isinstance(body["facts"], dict)
        for entry in body["files"].values():
            whole &= type(entry["size"]) is int and type(entry["sha256"]) is str
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        whole = False
    if not whole:
        raise Damaged("its manifest has changed since it was written")
    return body


def _digest(body: Mapping[str, object]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def files(folder: Path) -> dict[str, Path]:
    """Returns {relative name with "/": path} of every file under `folder` but its manifest."""

    def refuse(error: OSError):
        raise error

    paths = {}
    for parent, folders, names in os.walk(folder, onerror=refuse):
        for name in folders:
            if (Path(parent) / name).is_symlink():
                raise Damaged(f"its folder {name} is a link")
        for name in names:
            path = Path(parent) / name
            if not stat.S_ISREG(path.lstat().st_mode):
                raise Damaged(f"its {name} is not a regular file")
            paths[path.relative_to(folder).as_posix()] = path
    paths.pop(NAME, None)
    return dict(sorted(paths.items()))


@contextlib.contextmanager
def _loss_is_damage() -> Iterator[None]:
    """Turns errors of a lost or unreadable file into `Damaged`; missing permission is no damage."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DAMAGE:
            raise
        name = Path(error.filename or "a file").name
        raise Damaged(f"{name}: {os.strerror(error.errno)}") from error
