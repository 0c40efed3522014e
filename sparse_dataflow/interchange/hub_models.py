"""Models by their name on the Hugging Face hub, fetched into the cache of its own library.

A name stands for one commit. The library's cache is shared with `transformers`; without a network
what lies there is used.
"""

import concurrent.futures
import functools
import hashlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple, TypeVar

from sparse_dataflow.data.packed_files import needed_module
from sparse_dataflow.files import addresses, folders, json_files, storage
from sparse_dataflow.files.errors import UserError, first_line
from sparse_dataflow.interchange import huggingface, tensors
from sparse_dataflow.interchange.llama_cpp import directory as gguf_directory
from sparse_dataflow.interchange.llama_cpp.gguf_file import SUFFIX

T = TypeVar("T")

PREFIX = "hf:"
"""Begins the name of a model on the hub: hf:OWNER/NAME or hf:NAME, with @REVISION after either."""

LEGAL = "hf:OWNER/NAME or hf:OWNER/NAME@REVISION"

SECONDS = 5.0
"""Seconds after which a hub that did not list its files counts as out of reach."""

_LOG = logging.getLogger(__name__)
_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_NAME = re.compile(rf"((?:{_WORD}/)?{_WORD})(?:@([A-Za-z0-9._][A-Za-z0-9._/-]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_WEIGHTS = ".safetensors"
_GIB = 2**30


class HubName(NamedTuple):
    """A model on the hub.

    Attributes:
      name: OWNER/NAME, or NAME alone.
      revision: branch, tag or commit; "" for the main branch.
    """

    name: str
    revision: str = ""

    def __str__(self) -> str:
        return f"{PREFIX}{self.name}" + f"@{self.revision}" * bool(self.revision)


def hub_name(place: str | Path) -> HubName | None:
    """Returns the model on the hub that a text names; None for a path or an address.

    OWNER/NAME without "hf:" names one unless there is a folder of that name, or a folder OWNER.

    Raises:
      UserError: the text begins with "hf:" and names none.
    """
    text = addresses.normal(str(place))
    if addresses.is_address(text):
        return None
    marked = text.startswith(PREFIX)
    match = _NAME.fullmatch(text.removeprefix(PREFIX))
    if not marked and (match is None or "/" not in match[1] or isinstance(place, Path)):
        return None
    if match is None or ".." in text or "--" in text:
        raise UserError(f"{text} is no name of a model on the hub; legal: {LEGAL}.")
    if not marked and os.path.lexists(text.partition("/")[0]):
        if huggingface.is_directory(text):
            _say_it_is_a_folder(text)
        return None
    return HubName(match[1], match[2] or "")


@functools.cache
def _say_it_is_a_folder(text):
    """Logs it once, although a command reads a place more than once."""
    _LOG.info("%s is the folder here; %s%s is the model on the hub", text, PREFIX, text)


def fetched(name: HubName, files: Collection[str] = ()) -> Path:
    """Returns the folder of a model's files, which are fetched unless the cache has them.

    A download that was killed goes on. The small files are fetched and checked before any weights,
    of which one copy is fetched.

    Args:
      files: names of those that are read, where the repository has them; () for the whole model.

    Raises:
      UserError: the hub does not have the model, keeps it from this user, or cannot be reached and
        the cache has not all of its files; or its small files are of no model that is read here.
    """
    hub = needed_module("huggingface_hub", str(name))
    for module in ("errors", "constants"):  # Those that the library does not import itself.
        needed_module(f"huggingface_hub.{module}", str(name))
    # A commit never changes, so the hub need not be asked.
    if _COMMIT.fullmatch(name.revision) and (folder := _cached(hub, name, files)):
        return folder
    try:
        with storage.told(f"asking the hub for {name}"):
            facts = _within(SECONDS, lambda: _facts(hub, name))
    except Exception as error:  # The library raises errors of any type.
        refused = _is_refusal(hub, error)
        folder = None if refused == _NO_REVISION else _cached(hub, name, files)
        if folder is None:
            raise UserError(_sentence(name, error, refused)) from error
        _LOG.warning("%s is read from the cache, commit %s: %s", name, folder.name,
                     refused or f"the hub cannot be reached ({_reason(error)})")  # fmt: skip
        return folder
    siblings = list(facts.siblings or ())
    sizes = {file.rfilename: getattr(file, "size", None) or 0 for file in siblings}
    digests = {file.rfilename: _digest(file) for file in siblings}
    small = [file for file in sizes if "/" not in file and file.endswith(huggingface.SMALL)]
    chosen = [file for file in sizes if file in files] if files else small
    if (not files and huggingface.CONFIG not in chosen) or not chosen:
        needed = ", ".join(files) or huggingface.CONFIG
        words = tensors.other_format(sizes) or "legal: a model of transformers."
        raise UserError(f"{name} has no {needed}; {words}")
    folder = _download(hub, name, facts.sha, {file: sizes[file] for file in chosen}, digests)
    if not files:
        weights = _weights(folder)
        _refuse_missing(name, sizes, weights)
        huggingface.describe(folder, sum(sizes[file] for file in weights))
        folder = _download(hub, name, facts.sha, {file: sizes[file] for file in weights}, digests)
    return folder


def pinned(name: HubName, folder: Path) -> str:
    """Returns the name with the commit of a folder that `fetched` returned."""
    return str(HubName(name.name, folder.name))


def local_folder(place: str | Path, files: Collection[str] = ()) -> Path:
    """Returns the folder that a path is; that of a name on the hub is `fetched`, and a GGUF file
    has one in the cache.

    Raises:
      UserError: the path is empty, the folder has links that lead out of it, or see `fetched`.
    """
    if isinstance(place, str) and not place.strip():
        raise UserError(
            "The name of a model is empty; legal: a run folder, a Hugging Face directory, or a "
            "name on the hub such as Qwen/Qwen3-0.6B."
        )
    name = hub_name(place)
    if name is not None:
        folder = fetched(name, files)
    else:
        folder = Path(place).expanduser()
        if file := gguf_file(folder):
            return gguf_directory.folder_of(file)
        if folder.is_file():
            words = tensors.other_format([folder.name]) or "legal: the folder that it is in."
            raise UserError(f"{place} is a file; {words}")
    if folder.is_dir():
        # A link in a downloaded folder could make an import read any file of this machine.
        folders.refuse_outside_links(folder)
    return folder


def gguf_file(place: Path) -> Path | None:
    """Returns the GGUF file that a path names, or that its folder has instead of a model of
    transformers; None without one.

    Raises:
      UserError: the folder has several.
    """
    if place.is_file():
        return place if place.suffix == SUFFIX else None
    if not place.is_dir() or (place / huggingface.CONFIG).exists():
        return None
    files = sorted(place.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        names = ", ".join(path.name for path in files[:5])
        raise UserError(f"{place} has several GGUF files; name one of them: {names}.")
    return files[0] if files else None


def _within(seconds: float, work: Callable[[], T]) -> T:
    """Returns the result of `work`; raises TimeoutError after so many seconds.

    A thread is left behind then: looking up a host name cannot be interrupted.
    """
    result: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run():
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return result.result(seconds)
    except concurrent.futures.TimeoutError:
        raise TimeoutError(f"no answer in {seconds:g} seconds") from None


def _facts(hub, name):
    api = hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    return api.model_info(
        name.name, revision=name.revision or None, timeout=SECONDS, files_metadata=True
    )


def _digest(file) -> str:
    """Returns the SHA-256 that the hub lists for a large file; "" for a small one."""
    lfs = getattr(file, "lfs", None)
    return str((lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", "")) or "")


def _download(hub, name, commit, sizes, digests) -> Path:
    """Fetches files of a commit, compares them with the listing, and returns their folder."""
    total = sum(sizes.values())
    root = Path(hub.constants.HF_HUB_CACHE).expanduser()
    place = next((path for path in (root, *root.parents) if path.exists()), Path("/"))
    path_of = functools.partial(hub.try_to_load_from_cache, name.name, revision=commit)
    held = {file for file in sizes if isinstance(path_of(file), str)}
    needed = total - sum(sizes[file] for file in held)
    if needed > shutil.disk_usage(place).free:
        raise UserError(
            f"{name} has {total / _GIB:,.1f} GiB, and {root} has room for "
            f"{shutil.disk_usage(place).free / _GIB:,.1f}; name another folder with HF_HUB_CACHE."
        )
    if any(file.endswith(_WEIGHTS) for file in set(sizes) - held):
        _LOG.info("fetching %.2f GiB of %s into %s", needed / _GIB, name, root)
    try:
        with storage.told(f"fetching {name}"):
            for file in sizes:
                path = hub.hf_hub_download(
                    name.name, file, revision=commit, endpoint=os.environ.get("HF_ENDPOINT")
                )
                if sizes[file] and os.path.getsize(path) != sizes[file]:
                    raise UserError(
                        f"{path} has {os.path.getsize(path):,} bytes and not {sizes[file]:,} as on "
                        "the hub; delete it, so that it is fetched anew."
                    )
                # Only what was fetched now: to hash a large model that is held takes minutes.
                if file not in held and digests[file]:
                    with storage.open_regular(path) as content:
                        digest = hashlib.file_digest(content, "sha256").hexdigest()
                    if digest != digests[file]:
                        # `path` links to the content, which the library would link to again.
                        os.remove(os.path.realpath(path))
                        raise UserError(
                            f"{file} of {name} has another SHA-256 than the hub lists, and was "
                            "removed; run again."
                        )
            _remember(root, name, commit)
    except UserError:
        raise
    except Exception as error:  # The library raises errors of any type.
        raise UserError(_sentence(name, error, _is_refusal(hub, error))) from error
    return Path(path).parent


def _repository(root, name) -> Path:
    """Returns the folder of a model in the library's cache."""
    return root / f"models--{name.name.replace('/', '--')}"


def _remember(root, name, commit):
    """Keeps the commit of a branch or tag as the library does, for a time without a network."""
    revision = name.revision or "main"
    if _COMMIT.fullmatch(revision):
        return
    path = _repository(root, name) / "refs" / revision
    if _commit(path) != commit:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(commit)
        partial.replace(path)


def _commit(path: Path) -> str:
    """Returns the commit that a file of the library's cache names; "" for none."""
    return json_files.read_bytes(path, 1000).decode().strip() if path.exists() else ""


def _cached(hub, name, files) -> Path | None:
    """Returns the folder of a model whose files are all in the cache; None without it."""
    root = _repository(Path(hub.constants.HF_HUB_CACHE).expanduser(), name)
    revision = name.revision or "main"
    try:
        commit = revision
        if not _COMMIT.fullmatch(revision):
            commit = _commit(root / "refs" / revision)
        folder = root / "snapshots" / commit
        cached = {path.name for path in folder.iterdir() if path.is_file()}
        if files:
            return folder if cached & set(files) else None
        return folder if {huggingface.CONFIG, *_weights(folder)} <= cached else None
    except json_files.MALFORMED:
        return None


def _weights(folder) -> list[str]:
    """Returns the files of the weights of a folder that has its small files."""
    index = folder / tensors.INDEX
    if not index.exists():
        return [tensors.FILE]
    try:
        return sorted(set(json_files.load(index)["weight_map"].values()))
    except json_files.MALFORMED as error:
        raise UserError(f"{index} is damaged ({type(error).__name__}: {error}).") from None


def _refuse_missing(name, sizes, weights):
    missing = [file for file in weights if file not in sizes]
    if missing:
        legal = f"legal: a model with {tensors.FILE}, or {tensors.INDEX} with its files."
        words = tensors.other_format(sizes) or legal
        raise UserError(f"{name} has no {missing[0]}; {words}")


_NO_REVISION = "it has no such revision"


def _is_refusal(hub, error) -> str:
    """Returns what the hub answered, where it refuses the model; "" where it did not answer."""
    if isinstance(error, hub.errors.GatedRepoError):
        return "its owner gives access on request; ask there, and log in with `hf auth login`"
    if isinstance(error, hub.errors.RevisionNotFoundError):
        return _NO_REVISION
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, hub.errors.RepositoryNotFoundError) or status == 404:
        return "the hub has no such model, or it is private; log in with `hf auth login`"
    if status in (401, 403):
        return "this user has no access; log in with `hf auth login`"
    if isinstance(error, hub.errors.HFValidationError):
        return "the hub has no such names"
    # The library hides an answer behind an error about its cache.
    return _is_refusal(hub, error.__cause__) if error.__cause__ else ""


def _sentence(name, error, refused) -> str:
    if refused:
        return f"{name} cannot be fetched: {refused}. Legal: {LEGAL}, or a folder."
    return (
        f"{name} cannot be fetched, as the hub cannot be reached ({_reason(error)}), and the cache "
        "has not all of it. Check the network and HF_HUB_OFFLINE, or name a folder."
    )


def _reason(error) -> str:
    return first_line(error).rstrip(".")[:160]
