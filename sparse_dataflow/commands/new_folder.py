"""The folder of a new run: what it may hold before the run begins.  Loads no jax."""

from pathlib import Path

from sparse_dataflow.evaluation.run_files import CONFIG, RECORD, TOKENIZER
from sparse_dataflow.files import folders
from sparse_dataflow.files.addresses import is_address
from sparse_dataflow.files.errors import UserError

UNFINISHED = (
    TOKENIZER, f"{TOKENIZER}.new", RECORD, f"{RECORD}.new", f"{CONFIG}.new", folders.NAME,
)  # fmt: skip
"""What a run that is killed before its config.json is whole may leave."""


def refuse_run(folder: Path, flag: str) -> None:
    """Refuses a folder that holds a run.

    Raises:
      UserError: naming the flag that resumes it.
    """
    if (folder / CONFIG).exists() and (folder / RECORD).exists():
        raise UserError(
            f"{folder} holds a run already; pass --resume={folder} to resume it, or another {flag}."
        )


def refuse_occupied(place: str, experiment: str, flag: str) -> None:
    """Refuses a place that a new run may not take; an address is not asked.

    Raises:
      UserError: it holds a run or other files, or cannot be written.
    """
    if not place or is_address(place):
        return
    folder = Path(place)
    refuse_run(folder, flag)
    folders.refuse_foreign(folder, experiment, flag, names=UNFINISHED)
    folders.refuse_unwritable(folder, flag)
