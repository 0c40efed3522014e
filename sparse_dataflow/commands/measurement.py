"""JSON results with their provenance."""

import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

from sparse_dataflow.commands.experiment_modules import command_of
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import redact
from sparse_dataflow.hardware import detect as hardware


def provenance(machine: str) -> dict:
    """Returns command, date, machine and versions of this process, for a result file."""
    module = Path(sys.argv[0]).stem
    return {
        "command": redact(f"{command_of(module)} {shlex.join(sys.argv[1:])}".strip()),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")},
            **({"torch": importlib.metadata.version("torch")} if "torch" in sys.modules else {}),
        },
    }


def keep(folder: str, name: str, machine: str, results: Iterable[dict]) -> Path | None:
    """Writes each result with its code and machine as FOLDER/NAME.json; prints the path at the end.

    Args:
      folder: created if missing; "" writes none.
      name: becomes lower-case words joined by "-" or "_".  A file of this name that another program
        wrote is not replaced: the result is then NAME_2.json, and so on.
      machine: name of the machine of the measurement.
      results: JSON-able; each replaces the one before, because a benchmark may be stopped.

    Returns:
      The path; None if nothing was written.
    """
    path = None
    for result in results:
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            path = next(filter(_may_write, _paths(Path(folder), hardware.slug(name))))
            content = {**provenance(machine), **result}
            path.write_text(json.dumps(content, indent=1) + "\n")
    if path:
        print(f"kept in {path}", flush=True)
    return path


def _paths(folder, name):
    yield folder / f"{name}.json"
    for number in itertools.count(2):
        yield folder / f"{name}_{number}.json"


def _may_write(path):
    """Returns whether the path is free, or holds a result of this experiment."""
    if not os.path.lexists(path):
        return True
    try:
        saved, current = json_files.load(path), provenance("")
        programs = [result["command"].split()[:3] for result in (saved, current)]
        return current.keys() <= saved.keys() and programs[0] == programs[1]
    except json_files.MALFORMED:
        return False
