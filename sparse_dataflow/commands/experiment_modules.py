"""The modules of the experiments, and how each of them is started.

In a clone the experiments are the modules of the folder `experiments`, in an installed wheel those
of `sparse_dataflow.experiments`: a package `experiments` on the path of others could be anybody's.
"""

import ast
import importlib
import importlib.util
import sys
from pathlib import Path

from sparse_dataflow.files import console

PACKAGE = "sparse_dataflow.experiments"


def experiments_folder() -> Path:
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


def experiment(name: str) -> object:
    """Returns the module of an experiment, in a clone or an installed wheel."""
    experiments_folder()
    return importlib.import_module(f"{PACKAGE}.{name}")


def experiments() -> dict[str, str]:
    """Returns the first sentence of the docstring of each experiment, by name."""
    files = sorted(experiments_folder().glob("[a-z]*.py"))
    modules = {path.stem: ast.parse(path.read_text()) for path in files}
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
    return console.command(experiment)


def started_by(experiment: str) -> str:
    """Returns what starts this process's experiment again: a script of the user's, or
    `command_of`."""
    script = Path(sys.argv[0])
    as_module = getattr(sys.modules.get("__main__"), "__spec__", None) is not None
    ours = script.resolve().parent == experiments_folder().resolve()
    if not as_module and script.suffix == ".py" and script.is_file() and not ours:
        return f"python {sys.argv[0]}"
    return command_of(experiment)


def with_commands(text: str) -> str:
    """Returns a text with every `python -m experiments.NAME` as this process would be started."""
    return console.with_commands(text, command_of)


def program() -> str:
    """How this process was started: "python -m experiments.NAME", "sparse-dataflow NAME", or the
    script's path."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is None:
        return f"python {sys.argv[0]}"
    package, _, name = spec.name.rpartition(".")
    return command_of(name) if package == PACKAGE else f"python -m {spec.name}"
