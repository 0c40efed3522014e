"""The run folders that a user may mean: the newest, or those inside or beside a folder."""

from pathlib import Path

from sparse_dataflow.files.errors import UserError

RUNS = "runs"
"""Folder of runs that no --out names, in the folder where a command is started."""

NEWEST = "newest"
_SHOWN = 5


def runs_in(folder: str | Path) -> list[Path]:
    """Returns the run folders directly inside a folder, the newest last."""
    from sparse_dataflow.evaluation.run_files import CONFIG, RECORD  # Imports jax.

    try:
        configs = [path for path in Path(folder).glob(f"*/{CONFIG}") if path.is_file()]
        runs = [path.parent for path in configs if (path.parent / RECORD).is_file()]
        return sorted(runs, key=lambda run: ((run / CONFIG).stat().st_mtime, run.name))
    except OSError:
        return []


def newest(flag: str) -> str:
    """Returns the newest run of `RUNS`.

    Args:
      flag: "--resume" or "--run", for the error.

    Raises:
      UserError: there is none.
    """
    runs = runs_in(RUNS)
    if not runs:
        begun = _without_a_checkpoint(RUNS)
        words = f"none but {begun}, which has no checkpoint yet" if begun else "none"
        raise UserError(
            f"{flag} without a value takes the newest run of {Path(RUNS).absolute()}, which has "
            f"{words}; write {flag}=FOLDER."
        )
    return str(runs[-1])


def _without_a_checkpoint(folder):
    """Returns the name of a run that began, the newest one; "" if there is none."""
    from sparse_dataflow.evaluation.run_files import CONFIG  # Imports jax.

    begun = [path.parent for path in Path(folder).glob(f"*/{CONFIG}")]
    return max(begun, key=lambda run: (run / CONFIG).stat().st_mtime).name if begun else ""


def runs_in_words(folder: str | Path = "") -> str:
    """Returns a sentence with the runs that a user may mean.

    Args:
      folder: what was named in place of a run; "" for nothing, then runs of `RUNS` are listed.
    """
    place = Path(folder).expanduser() if str(folder) else Path(RUNS)
    for where in [place, place.parent, Path(RUNS)]:
        if runs := runs_in(where):
            shown = ", ".join(str(run) for run in runs[-1 : -_SHOWN - 1 : -1])
            more = f" and {len(runs) - _SHOWN} more" if len(runs) > _SHOWN else ""
            return f"runs in {where}, the newest first: {shown}{more}"
    return f"no run is in {place if place.is_dir() else place.parent}"


def refuse_other_folder(flag: str, folder: str | Path) -> None:
    """Refuses a folder that is no run.

    Raises:
      UserError: naming the runs inside or beside it.
    """
    from sparse_dataflow.evaluation.run_files import CONFIG  # Imports jax.

    place = Path(folder).expanduser()
    if not (place / CONFIG).exists():
        kind = "is not a run folder" if place.is_dir() else "does not exist"
        raise UserError(f"{flag}={folder} {kind}; {runs_in_words(folder)}.")
