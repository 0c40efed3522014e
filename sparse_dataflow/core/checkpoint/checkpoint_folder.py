"""The folder of a run's checkpoints: listing, cleaning, setting aside and pruning."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import logging

from sparse_dataflow.core.checkpoint import named_arrays
from sparse_dataflow.files import manifest, storage
from sparse_dataflow.files.errors import UserError

STEP = re.compile(r"0|[1-9][0-9]{0,17}")
DAMAGED = re.compile(r"[0-9]+\.damaged(-[0-9]+)?")
_LEFTOVER = re.compile(r"[0-9]+\.(saving|pruning)")


def subfolders(folder: Path, pattern: re.Pattern[str]) -> Iterator[Path]:
    """Yields the subfolders whose name matches, sorted, without links; none without `folder`."""
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if pattern.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            yield path


def steps(folder: Path) -> list[int]:
    """Returns the steps of all folders named by a step, oldest first, without reading them."""
    return sorted(int(path.name) for path in subfolders(folder, STEP))


def read_facts(folder: Path) -> dict[int, dict[str, Any]]:
    """Returns {step: facts of its manifest} of the finished checkpoints, without verifying them."""
    facts = {}
    for path in subfolders(folder, STEP):
        try:
            fact = manifest.read(path)
        except (manifest.Damaged, OSError):
            continue
        if fact.get("step") == int(path.name):
            facts[int(path.name)] = fact
    return facts


def best_step(facts: dict[int, dict[str, Any]]) -> int | None:
    """Returns the newest step with the lowest metric, or None if no step has a metric."""
    rated = [step for step, fact in facts.items() if isinstance(fact.get("metric"), float)]
    return min(rated, key=lambda step: (facts[step]["metric"], -step), default=None)


def prepare(folder: Path) -> None:
    """Creates the folder, checks that it is writable and removes unfinished saves.

    Raises:
      UserError: the folder cannot be written.
    """

    def make():
        folder.mkdir(parents=True, exist_ok=True)
        for path in subfolders(folder, _LEFTOVER):
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
    """Renames an unusable checkpoint to a free `<step>.damaged` name and logs the reason.

    Raises:
      UserError: it cannot be renamed.
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
    say_set_aside(path, reason, aside.name)


def say_set_aside(place: object, reason: str, name: str) -> None:
    """Says that a checkpoint is damaged, and under which name it is kept."""
    logging.warning("Checkpoint %s cannot be used: %s. It is now %s.", place, reason, name)


def prune(folder: Path, keep: int, just_saved: int) -> Iterator[int]:
    """Deletes all but the checkpoint just saved, the best and the `keep` newest; yields each step.

    A checkpoint is renamed before it is deleted, so a reader sees all of it or nothing.
    """
    facts = read_facts(folder)
    for step in sorted(facts.keys() - {just_saved, best_step(facts), *sorted(facts)[-keep:]}):
        pruning = folder / f"{step}.pruning"
        remove(pruning)
        (folder / str(step)).rename(pruning)
        yield step
        remove(pruning)


def remove(path: Path) -> None:
    """Deletes a folder with its content; a link or a missing folder is left alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
