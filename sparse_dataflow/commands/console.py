"""The commands of this project: each is an experiment, some have a short name.

In a clone they are the modules of the folder `experiments`, in an installed wheel those of
`sparse_dataflow.experiments`: a package `experiments` on the path of others could be anybody's.
"""

import ast
import importlib.util
import sys
from pathlib import Path

EVERYDAY = {
    "train": "gpt13b_sparse",
    "generate": "generate",
    "evaluate": "evaluate",
    "export": "export",
    "watch": "watch",
    "plan": "layout_search",
    "chip-report": "chip_report",
}
"""Short name -> experiment, in the order in which they are listed."""

PACKAGE = "sparse_dataflow.experiments"
SCRIPT = "sparse-dataflow"


def folder() -> Path:
    """Returns the folder of the experiments' modules, which can then be run as those of PACKAGE."""
    package = Path(__file__).parents[1]
    inside, beside = package / "experiments", package.parent / "experiments"
    if inside.is_dir():
        return inside
    if PACKAGE not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            PACKAGE, beside / "__init__.py", submodule_search_locations=[str(beside)]
        )
        assert spec is not None
        sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    return beside


def _in_wheel() -> bool:
    """Returns whether the experiments are installed inside the package."""
    return (Path(__file__).parents[1] / "experiments").is_dir()


def experiments() -> dict[str, str]:
    """Returns the first sentence of the docstring of each experiment, by name."""
    modules = {p.stem: ast.parse(p.read_text()) for p in sorted(folder().glob("[a-z]*.py"))}
    first = {name: (ast.get_docstring(m) or "").split("\n\n")[0] for name, m in modules.items()}
    return {name: " ".join(sentence.split()) for name, sentence in first.items()}


def command_of(experiment: str) -> str:
    """Returns how an experiment is started, in the way that this process was; in a notebook or a
    script, from the folder of the clone, or by the console script of an installed wheel."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    name = spec.name if spec else ""
    in_clone = name.startswith("experiments.") or not _in_wheel()
    if in_clone and not name.startswith(f"{PACKAGE}."):
        return f"python -m experiments.{experiment}"
    short = {module: name for name, module in EVERYDAY.items()}
    return f"{SCRIPT} {short.get(experiment, experiment)}"


def started_by(experiment: str) -> str:
    """Returns what starts this process's experiment again: a script of the user's, or
    `command_of`."""
    script = Path(sys.argv[0])
    script_runs = (
        getattr(sys.modules.get("__main__"), "__spec__", None) is None and script.suffix == ".py"
    )
    if script_runs and script.is_file() and script.resolve().parent != folder().resolve():
        return f"python {sys.argv[0]}"
    return command_of(experiment)


def with_commands(text: str) -> str:
    """Returns a text with every `python -m experiments.NAME` as this process would be started."""
    head = "python -m experiments."
    first, *rest = text.split(head)
    for part in rest:
        name = part[: len(part) - len(part.lstrip("abcdefghijklmnopqrstuvwxyz0123456789_"))]
        first += command_of(name) + part[len(name) :]
    return first
