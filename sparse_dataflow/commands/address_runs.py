"""Runs at an address of an object store: a folder of this machine, mirrored at the address.

A run writes in a folder below the cache, the same one for an address on every start. Each
checkpoint is copied to the address as to any mirror; so a resumed run takes the newest of both
places, and what a store could not take is on this machine.
"""

import hashlib
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from sparse_dataflow.core import collectives
from sparse_dataflow.core.checkpoint import named_arrays
from sparse_dataflow.core.messages import say
from sparse_dataflow.data import cache
from sparse_dataflow.evaluation.run_files import (
    CONFIG,
    RECORD,
    TOKENIZER,
    RunRecord,
    read_config,
    read_record,
)
from sparse_dataflow.files import addresses, folders, json_files, manifest
from sparse_dataflow.files.address_lock import AddressLock
from sparse_dataflow.files.addresses import Address
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.mirror import AddressCopies
from sparse_dataflow.runs.run_config import RunConfig

_WHOLE = (TOKENIZER, RECORD, CONFIG)
"""What a run is; config.json last, so that where it is there, all are."""

_LOCAL_ONLY = {folders.NAME, folders.MARK, *_WHOLE}
_MARKED = (*_WHOLE, folders.MARK, folders.NAME)
"""What a run that was killed before its config.json was there may leave at an address."""


def work_folder(address: str) -> Path:
    """Returns the folder of this machine in which a run at an address is written."""
    digest = hashlib.sha256(addresses.normal(address).encode()).hexdigest()[:12]
    name = re.sub(r"[^a-zA-Z0-9]+", "-", address.partition("://")[2]).strip("-")[-60:]
    return cache.resolved(cache.FOLDER) / "runs" / f"{name}-{digest}"


def saved_run(place: str | Path) -> tuple[RunConfig, RunRecord]:
    """Reads config and record of a run in a folder or at an address; see `run_files`.

    Raises:
      UserError: there is no run, or it is damaged or cannot be read.
    """
    if not addresses.is_address(str(place)):
        config = read_config(place)
        return config, read_record(place, config)
    address = Address(str(place))
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in (RECORD, CONFIG):
                Path(folder, name).write_bytes((address / name).read())
        except FileNotFoundError as error:
            work = work_folder(str(address))
            if (work / CONFIG).exists():  # The store has lost it, or never had it.
                return saved_run(work)
            raise UserError(
                f"{address} is not a run: {error.strerror} ({error.filename})."
            ) from error
        except OSError as error:
            raise unreadable(address, error) from error
        try:
            return saved_run(folder)
        except UserError as error:
            raise UserError(str(error).replace(folder, str(address))) from None


def unreadable(address: Address, error: OSError) -> UserError:
    """Returns the refusal of an address that cannot be read."""
    return UserError(
        f"{address} cannot be read: {error.strerror or error}. Check its name, the credentials in "
        "the environment and the network."
    )


def claim(address: Address, experiment: str, flag: str, has_run: bool) -> AddressLock:
    """Locks an address, and marks it for a new run; the caller releases the lock.

    Args:
      address: of the run, or of a mirror.
      experiment: whose run it is.
      flag: that named the address.
      has_run: whether it holds this very run already, or is to hold it again.

    Raises:
      UserError: it holds anything else, another process owns it, or it cannot be written.
    """
    lock = AddressLock(address, flag)
    try:
        mark = f"written by sparse_dataflow, {experiment}\n".encode()
        names = {name.partition("/")[0] for name in address.entries()} - {folders.NAME}
        marked = folders.MARK in names and (address / folders.MARK).read() == mark
        if not has_run and {CONFIG, RECORD} <= names:
            raise UserError(
                f"{address} holds a run already; pass --resume={address} to resume it, or "
                f"another {flag}."
            )
        # Of a run that is resumed, a store may have lost some objects.
        allowed = set(_MARKED) if marked else set()
        if has_run and (marked or {CONFIG, RECORD} <= names):
            allowed = names
        if others := sorted(names - allowed):
            raise UserError(
                f"{address} holds objects that {experiment} may not replace "
                f"({', '.join(others[:3])}); legal: {flag} with an empty address."
            )
        if folders.MARK not in names:
            (address / folders.MARK).write(mark)
        return lock
    except OSError as error:
        lock.release()
        raise unreadable(address, error) from error
    except BaseException:
        lock.release()
        raise


def release(lock: AddressLock, address: Address) -> None:
    """Releases the lock; an address where no run came to be is left as it was."""
    try:
        names = set(address.entries())
        if CONFIG not in names and names <= set(_MARKED):
            for name in names - {folders.NAME}:
                (address / name).delete()
    except OSError:
        pass  # The mark is left; a later run accepts it.
    lock.release()


def holds(address: Address, folder: Path) -> bool:
    """Returns whether an address holds the run of a folder.

    Raises:
      UserError: it cannot be read.
    """
    try:
        (address / CONFIG).read()
        return json_files.parse((address / RECORD).read()) == json_files.load(folder / RECORD)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise unreadable(address, error) from error
    except ValueError:
        return False


def prepare_work_folder(address: Address, folder: Path, experiment: str, resume: bool) -> None:
    """Makes the folder that of the run at an address; another run in it is renamed, never deleted.

    Called while the address is locked.

    Raises:
      UserError: the address cannot be read, or the folder cannot be written.
    """
    with cache.exclusive(cache.resolved(cache.FOLDER), f"run-{folder.name}"):
        try:
            _prepare(address, folder, experiment, resume)
        except OSError as error:
            raise unreadable(address, error) from error


def _prepare(address, folder, experiment, resume):
    entries = address.entries() if resume else {}
    remote = {name: entries[name] for name in _WHOLE if name in entries}
    has_run = (folder / CONFIG).exists()
    same = has_run and resume and (CONFIG not in remote or holds(address, folder))
    unfinished = not has_run and (resume or folders.is_marked(folder, experiment))
    if folder.exists() and not (same or unfinished):
        aside = _free_name(folder)
        folder.rename(aside)
        say(f"{folder} held another run; it is now {aside}")
    if CONFIG in remote and not same:
        for name in remote:
            (folder / name).unlink(missing_ok=True)
        addresses.fetch(address, remote, folder)


def refuse_unshared(folder: Path, address: str) -> None:
    """Refuses a run whose processes do not all see the folder of process 0; called on all.

    Raises:
      UserError: on all processes.
    """
    error = None
    if not (folder / folders.NAME).exists():
        error = UserError(
            f"--out={address} with hosts that share no folder: each process writes its part of a "
            "checkpoint into one folder. Mount the bucket on all hosts and name the mount, or let "
            "XDG_CACHE_HOME be a folder that they share."
        )
    collectives.raise_on_all(error)


def copy_run_files(folder: Path, address: Address) -> None:
    """Copies what a run is, as far as it is not at the address yet.

    Without a config.json, what lies there is of a start that was killed, and is replaced.

    Raises:
      OSError: it cannot be written.
    """
    names = address.entries()
    for name in _WHOLE:
        if name not in names or CONFIG not in names:
            (address / name).upload(folder / name)


def finished(folder: Path, mirror: Path | Address | None, names: Iterable[str]) -> str:
    """Copies to an address what the mirror could not: newest checkpoints, reports and logs.

    Called on all processes.

    Args:
      mirror: of the run; only an address is written.

    Returns:
      Why that failed and what to do, in two sentences; "" where all is there.
    """
    if not isinstance(mirror, Address):
        return ""

    def copy():
        try:
            _copy_rest(folder, mirror, names)
        except (OSError, manifest.Damaged) as error:
            reason = str(getattr(error, "strerror", None) or error).rstrip(".")
            return (
                f"The run is whole in {folder} on this machine, but could not be copied to "
                f"{mirror}: {reason}. Once that can be written, --resume={folder} copies it."
            )
        say(f"copied to {mirror}")
        return ""

    return collectives.on_first(copy)


def _copy_rest(folder, address, names):
    copy_run_files(folder, address)
    for name in names:
        checkpoints = folder / name / "checkpoints"
        copies = AddressCopies(address / name / "checkpoints")
        step = max(named_arrays.read_facts(checkpoints), default=None)
        if step is not None and step not in copies.facts():
            copies.put(step, checkpoints)
    _copy_other_files(folder, address)


def _copy_other_files(folder: Path, address: Address) -> None:
    """Copies reports, metrics and logs: every file but checkpoints, unfinished and hidden ones."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        parts = name.split("/")
        hidden = any(part.startswith(".") for part in parts)
        if path.is_file() and not (hidden or "checkpoints" in parts or name in _LOCAL_ONLY):
            if not name.endswith((".new", ".partial")):
                (address / name).upload(path)


def _free_name(folder: Path) -> Path:
    count = 1
    while (aside := folder.with_name(f"{folder.name}.{count}")).exists():
        count += 1
    return aside
