"""How a command is written for whoever reads it: `sparse-dataflow NAME`, of a wheel or a clone."""

import configparser
import importlib.metadata
import re
from collections.abc import Callable
from pathlib import Path

SCRIPT = "sparse-dataflow"
"""The console script, which both an installed wheel and the environment of a clone have."""

EVERYDAY = {
    "train": "gpt13b_sparse",
    "generate": "generate",
    "evaluate": "evaluate",
    "export": "export",
    "prune": "prune",
    "watch": "watch",
    "plan": "layout_search",
    "chip-report": "chip_report",
}
"""Short name -> experiment, in the order in which they are listed."""

_AS_MODULE = re.compile(r"python -m (?:sparse_dataflow\.)?experiments\.([a-z0-9_]*)")


def command(experiment: str) -> str:
    """Returns the command that runs an experiment from a wheel and from a clone."""
    short = {module: name for name, module in EVERYDAY.items()}
    return f"{SCRIPT} {short.get(experiment, experiment)}"


def with_commands(text: str, command: Callable[[str], str] = command) -> str:
    """Returns a text with every `python -m experiments.NAME` as `command` writes it."""
    return _AS_MODULE.sub(lambda match: command(match[1]), text)


def version() -> str:
    """Returns the version of the installed package; of a clone that is not installed, that in its
    setup.cfg."""
    package = Path(__file__).parents[1]
    try:
        return importlib.metadata.version(package.name)
    except importlib.metadata.PackageNotFoundError:
        settings = configparser.ConfigParser()
        settings.read(package.parent / "setup.cfg")
        return settings["metadata"]["version"]
