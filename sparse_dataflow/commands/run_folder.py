"""Run folders: claimed by a new run with what made it, and checked by a resumed one."""

import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import itertools
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sparse_dataflow.cluster import signals
from sparse_dataflow.commands import address_runs, new_folder
from sparse_dataflow.commands.experiment_modules import command_of
from sparse_dataflow.core import collectives
from sparse_dataflow.core.config import settings
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.training.saved_state import micro_batches_matter
from sparse_dataflow.data.corpus.splits import Corpus
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.evaluation.run_files import (
    CONFIG,
    RECORD,
    TOKENIZER,
    RunRecord,
    new_id,
    read_config,
    read_record,
    to_bytes,
)
from sparse_dataflow.files import folders, json_files, storage
from sparse_dataflow.files.address_lock import AddressLock
from sparse_dataflow.files.addresses import Address, is_address
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.folders import FolderLock
from sparse_dataflow.files.json_files import differences
from sparse_dataflow.runs import run_config as run
from sparse_dataflow.runs.run_config import RunConfig

MICRO_BATCHES = "training.micro_batches"
_DIFFERENCES_SHOWN = 3


@contextlib.contextmanager
def opened(
    experiment: str, out: str, resume: bool, mirror: str = ""
) -> Iterator[tuple[Path, Callable[[], None]]]:
    """The run folder, or a new one where `out` is empty; locked by the first process.

    A new run takes a folder and a mirror that are missing or empty; the mirror of a resumed run is
    missing, empty or its own. If the block ends before a config.json is there, whatever this
    process created is removed. A run at an address is written in its `work_folder`, and `mirror` is
    the address.

    Yields:
      (folder, check): `check` raises UserError if the folder was deleted or moved; it does nothing
      on other processes than the first.

    Raises:
      UserError: on all processes, where the folder holds anything else, is in use by another
        process or cannot be written.
    """
    at_address = is_address(out)
    local = str(address_runs.work_folder(out)) if at_address else out
    locks: list[FolderLock | AddressLock] = []
    with contextlib.ExitStack() as stack:
        folder = Path(local or collectives.on_first(lambda: _new_name(experiment, stack)))

        def claim(path, flag, has_run):
            if not has_run:
                new_folder.refuse_run(path, flag)
                undo = folders.claim(path, experiment, flag, names=new_folder.UNFINISHED)
                stack.enter_context(signals.cleaned_up(undo))
            locks.append(FolderLock(path))
            stack.enter_context(signals.cleaned_up(locks[-1].release))
            if not has_run:
                new_folder.refuse_run(path, flag)  # Another process may have begun one meanwhile.

        def claim_address(address, flag, has_run):
            lock = address_runs.claim(address, experiment, flag, has_run)
            locks.append(lock)
            release = functools.partial(address_runs.release, lock, address)
            stack.enter_context(signals.cleaned_up(release))

        second = mirror_path(folder, mirror)

        def prepare():
            if mirror and not resume and second is None:
                raise UserError(f"run.mirror={mirror} is the run folder; name another folder.")
            if at_address and isinstance(second, Address):
                claim_address(second, "--resume" if resume else "--out", resume)
                address_runs.prepare_work_folder(second, folder, experiment, resume)
            claim(folder, "--out", resume)
            if isinstance(second, Address):
                if not at_address:
                    holds = resume and address_runs.holds(second, folder)
                    claim_address(second, "run.mirror", holds)
            elif second is not None:
                claim(second, "run.mirror", resume and _is_mirror_of(second, folder))
            elif mirror:
                say(f"{folder} was the mirror of a run; name another with --set run.mirror=FOLDER")

        def check():
            for lock in locks if at_address else locks[:1]:
                lock.check()

        collectives.on_first(prepare)
        if at_address:
            address_runs.refuse_unshared(folder, out)
        try:
            yield folder, check
        except Exception:
            if locks and second is not None and _was_copied(folder, second):
                say(f"if {folder} is lost, continue its copy: --resume={second}")
            check()  # The cause of whatever failed.
            raise


def _new_name(experiment: str, stack: contextlib.ExitStack) -> str:
    """Makes a folder for a new run, which is removed with the stack if nothing came into it."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        folder = Path(f"runs/{experiment}-{stamp}{f'-{number}' * (number > 1)}")
        created = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
        # Another run took the name within this second.
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(
                f"{folder} cannot be written: {error.strerror}; name another with --out."
            ) from error

        def undo(created=created):
            with contextlib.suppress(OSError):
                for path in created:
                    path.rmdir()

        stack.enter_context(signals.cleaned_up(undo))
        return str(folder)
    raise AssertionError("itertools.count has no end")


def _was_copied(folder, second):
    """Whether a run came to be, so that its mirror has it: a store is not asked again."""
    place = folder if isinstance(second, Address) else second
    return (place / CONFIG).exists()


def mirror_path(folder: Path, mirror: str) -> Path | Address | None:
    """Returns what mirrors a run folder; None for no mirror, or the run folder itself.

    Raises:
      UserError: one is inside the other.
    """
    if not mirror:
        return None
    if is_address(mirror):
        return Address(mirror)
    first, second = (Path(os.path.realpath(path)) for path in (folder, mirror))
    if first == second:
        return None
    if first.is_relative_to(second) or second.is_relative_to(first):
        raise UserError(
            f"run.mirror={mirror} and the run folder {folder} are one inside the other; name a "
            "folder on another disk."
        )
    return second


def _is_mirror_of(second: Path, folder: Path) -> bool:
    if not ((second / CONFIG).exists() and (second / RECORD).exists()):
        return False
    records = [read_record(path, read_config(path)) for path in (second, folder)]
    return records[0] == records[1] and not _is_copy(folder, records[1])


def mirrored(folder: Path, mirror: str) -> Path | Address | None:
    """Copies what a run is to its mirror, as far as it is not there; returns `mirror_path`.

    Raises:
      UserError: on all processes, where it cannot be written.
    """
    second = mirror_path(folder, mirror)
    if second is None:
        return None

    def copy():
        try:
            if isinstance(second, Address):
                address_runs.copy_run_files(folder, second)
                return
            for name in (TOKENIZER, RECORD, CONFIG):
                if not (second / name).exists():
                    storage.replace(second / name, json_files.read_bytes(folder / name))
        except OSError as error:
            raise UserError(f"run.mirror={second} cannot be written: {error.strerror}.") from error

    collectives.on_first(copy)
    return second


def start(folder: Path, config: RunConfig, record: RunRecord, tokenizer: Tokenizer) -> None:
    """Writes what a run is before its first step; config.json last, whole or not at all.

    Raises:
      UserError: files came into the folder meanwhile, it cannot be written, or a setting holds a
        secret.
    """
    if not collectives.is_first():
        return
    folders.refuse_foreign(folder, record.experiment, names=new_folder.UNFINISHED)
    files = {RECORD: to_bytes(record.to_json()), CONFIG: to_bytes(config.to_json())}
    try:
        tokenizer.save(folder / TOKENIZER)
        try:
            for name, content in files.items():
                storage.replace(folder / name, content)
        except BaseException:
            with contextlib.suppress(OSError):
                (folder / TOKENIZER).unlink()
                (folder / RECORD).unlink()
            raise
        _keep_place(folder)
    except OSError as error:
        raise UserError(f"Run folder {folder} cannot be written: {error.strerror}.") from error


PLACE = ".place"
"""File of a run folder with its path, which tells a copy of a folder from a moved one."""


def _keep_place(folder: Path) -> None:
    with contextlib.suppress(OSError):
        storage.replace(folder / PLACE, os.fsencode(os.path.realpath(folder)))


def own_record(folder: Path, record: RunRecord) -> RunRecord:
    """Returns the record of a resumed run, with a new id where its folder is a copy.  A moved run
    keeps its id.  `write_own` writes it."""
    own_id = collectives.on_first(lambda: new_id() if _is_copy(folder, record) else record.id)
    return dataclasses.replace(record, id=own_id)


def _is_copy(folder, record):
    """Returns whether the folder that a run was copied from still has it."""
    try:
        place = _place(folder)
        other = read_record(place, read_config(place))
        return not place.samefile(folder) and other.identity == record.identity
    except (OSError, ValueError, UserError):
        return False


def _place(folder: Path) -> Path:
    return Path(os.fsdecode(json_files.read_bytes(folder / PLACE, 2**16)))


def write_own(folder: Path, record: RunRecord) -> None:
    """Writes what `own_record` returned into the folder, and its path; nothing that is there.

    Raises:
      UserError: on all processes, where the folder cannot be written.
    """

    def write():
        if read_record(folder, read_config(folder)).id != record.id:
            say(f"{folder} is a copy of {_place(folder)}: trackers follow it as a run of its own")
            try:
                storage.replace(folder / RECORD, to_bytes(record.to_json()))
            except OSError as error:
                words = f"cannot be written: {error.strerror}"
                raise UserError(f"Run folder {folder} {words}.") from error
        with contextlib.suppress(OSError):
            if _place(folder).samefile(folder):
                return
        _keep_place(folder)

    collectives.on_first(write)


def refuse_other_experiment(folder: str | Path, experiment: str) -> None:
    """Refuses to resume another experiment's run.

    Raises:
      UserError: naming the command that resumes it.
    """
    other = address_runs.saved_run(folder)[1].experiment
    if other != experiment:
        raise UserError(
            f"{folder} is a run of {other}; resume it with {command_of(other)} --resume={folder}."
        )


def refuse_other_data(
    folder: Path, record: RunRecord, corpus: Corpus, tokenizer: Tokenizer
) -> None:
    """Checks that a resumed run has the text and the tokenizer that it was started with.

    Raises:
      UserError: the corpus or the tokenizer has changed, or the saved tokenizer is damaged.
    """
    advice = ". Put it back as it was, or start a new run without --resume."
    record.refuse_other_corpus(folder, corpus, advice)
    saved = Tokenizer.load(folder / TOKENIZER).content_hash
    if not saved == record.tokenizer == tokenizer.content_hash:
        raise UserError(
            f"The tokenizer of {folder} is not the one that its corpus gives here "
            f"({saved[:12]} and {tokenizer.content_hash[:12]}; its {RECORD} says "
            f"{record.tokenizer[:12]}). Put {TOKENIZER} back, or start a new run without "
            "--resume."
        )


def fixed_paths(saved: RunConfig) -> set[str]:
    """Returns the paths of the settings that a resumed run must keep."""
    fixed = {p for p, s in settings.by_path(RunConfig).items() if s.resumed == settings.FIXED}
    read = saved.model.experts, saved.model.precision, saved.evolution.method
    return fixed | {MICRO_BATCHES} if micro_batches_matter(*read) else fixed


def refuse_other_config(folder: Path, saved: RunConfig, config: RunConfig) -> None:
    """Refuses to go on where the config is not the saved one in all that a run must keep.

    Raises:
      UserError: naming what differs.
    """
    fixed = fixed_paths(saved)
    pair = [json.loads(json.dumps(each.to_json())) for each in (saved, config)]
    changes = [
        f"{path} is {before} there and {now} here"
        for path, before, now in differences(*pair)
        if path in fixed
    ]
    if changes:
        more = len(changes) - _DIFFERENCES_SHOWN
        raise UserError(
            f"{folder} was started with other settings: "
            f"{'; '.join(changes[:_DIFFERENCES_SHOWN])}{f'; and {more} more' if more > 0 else ''}. "
            "Start a new run without --resume."
        )


_SECONDS = 5.0
_WHERE_IT_RAN = ("run.out", "run.mirror", "run.scale")


def python_call(config: RunConfig, passed: Sequence[str] = ()) -> str:
    """Returns the call of `sd.train` that trains a config, with its settings as literals.

    Args:
      config: as `sd.train` got it.
      passed: names of the other arguments, such as "texts", which the call names so too.
    """
    scale, dtype = config.run.scale, config.model.compute_dtype
    base = run.preset(scale, compute_dtype=dtype)
    before, now = _values(base), _values(config)
    changed = {path: value for path, value in now.items() if value != before[path]}
    words = [f"{path.replace('.', '__', 1)}={value!r}" for path, value in changed.items()]
    dtype_argument = f', compute_dtype="{dtype}"' if dtype != "float32" else ""
    call = f'sd.preset("{scale}"{dtype_argument})'
    call += f".change({', '.join(words)})" if words else ""
    return f"sd.train({', '.join([call, *(f'{name}={name}' for name in passed)])})"


def _values(config: RunConfig) -> dict[str, object]:
    values = {}
    for path in settings.by_path(RunConfig):
        member, _, name = path.partition(".")
        if path not in _WHERE_IT_RAN:
            values[path] = getattr(getattr(config, member), name)
    return values


def code_facts() -> dict[str, object]:
    """Returns {"commit", "dirty"} of this package: a clone's git commit and whether tracked files
    differ from it, or the commit that pip installed; {} where neither is known."""
    root = Path(__file__).parents[2]
    if (root / ".git").exists():
        try:
            commit = _git(root, "rev-parse", "HEAD")
            changes = _git(root, "status", "--porcelain", "--untracked-files=no")
        except (OSError, subprocess.SubprocessError):
            return {}
        return {"commit": commit, "dirty": bool(changes)}
    try:
        url = importlib.metadata.distribution("sparse_dataflow").read_text("direct_url.json")
        commit = json_files.parse(url or "{}").get("vcs_info", {}).get("commit_id")
    except (importlib.metadata.PackageNotFoundError, ValueError, AttributeError, OSError):
        return {}
    return {"commit": str(commit), "dirty": False} if commit else {}


def _git(root, *arguments):
    done = subprocess.run(
        ["git", "--no-optional-locks", "-C", str(root), *arguments],
        capture_output=True, text=True, check=True, timeout=_SECONDS, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return done.stdout.strip()
