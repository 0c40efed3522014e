"""The folder of a run's checkpoints: its names, what is set aside, left over and deleted."""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from absl import logging

from sparse_dataflow.checkpoint import named_arrays
from sparse_dataflow.files import manifest, storage
from sparse_dataflow.files.errors import UserError

STEP = re.compile(r"0|[1-9][0-9]{0,17}")
DAMAGED = re.compile(r"[0-9]+\.damaged(-[0-9]+)?")
_LEFTOVER = re.compile(r"[0-9]+\.(saving|pruning)")


def named(folder: Path, pattern: re.Pattern[str]) -> Iterator[Path]:
    """The folders in it of such a name, sorted, no links; none where it is not there itself."""
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if pattern.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            yield path


def facts(folder: Path) -> dict[int, dict[str, Any]]:
    """{step: facts in its manifest} of the finished checkpoints, whose bytes are not looked at."""
    found = {}
    for path in named(folder, STEP):
        try:
            fact = manifest.read(path)
        except (manifest.Damaged, OSError):
            continue
        if fact.get("step") == int(path.name):
            found[int(path.name)] = fact
    return found


def best(found: dict[int, dict[str, Any]]) -> int | None:
    """The step with the lowest metric, the newest of several; None where none has one."""
    rated = [step for step, fact in found.items() if isinstance(fact.get("metric"), float)]
    return min(rated, key=lambda step: (found[step]["metric"], -step), default=None)


def prepare(folder: Path) -> None:
    """Makes the folder, proves that it can be written, removes what a kill left unfinished.

    Raises:
      UserError: it cannot be written.
    """

    def make():
        folder.mkdir(parents=True, exist_ok=True)
        for path in named(folder, _LEFTOVER):
            remove(path)
        probe = folder / "0.saving"
        probe.mkdir()
        probe.rmdir()

    try:
        storage.retry(f"Preparing {folder}", make)
    except OSError as error:
        raise UserError(
            f"Checkpoints cannot be written to {folder}: {named_arrays.reason(error)}. "
            "Choose a run folder that can be written."
        ) from error


def set_aside(path: Path, reason: str) -> None:
    """Renames a checkpoint that cannot be used, and says so.

    Raises:
      UserError: it could not be renamed.
    """
    aside, count = path.with_name(f"{path.name}.damaged"), 1
    while aside.exists() or aside.is_symlink():
        count += 1
        aside = path.with_name(f"{path.name}.damaged-{count}")
    try:
        path.rename(aside)
    except OSError as error:
        raise UserError(
            f"Checkpoint {path} cannot be used ({reason}) and could not be moved aside: "
            f"{named_arrays.reason(error)}."
        ) from error
    logging.warning("Checkpoint %s cannot be used: %s. It is now %s.", path, reason, aside.name)


def prune(folder: Path, keep: int, just_saved: int, gone: Callable[[int], None]) -> None:
    """Deletes all but the one just saved, the best and the `keep` newest; `gone` hears of each."""
    found = facts(folder)
    kept = {just_saved, best(found), *sorted(found)[-keep:]}
    for step in sorted(found.keys() - kept):
        doomed = folder / f"{step}.pruning"
        remove(doomed)
        # A reader sees a whole checkpoint or none, never one half deleted.
        (folder / str(step)).rename(doomed)
        gone(step)
        remove(doomed)


def remove(path: Path) -> None:
    """Deletes a folder with all that is in it, if it is one; a link is left alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
