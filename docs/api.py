"""Writes the API reference as HTML, from docstrings: python docs/api.py FOLDER [MODULE ...].

Without modules, all of the package and of the experiments.
"""

import pkgutil
import sys
from pathlib import Path

import pdoc

import experiments
import sparse_dataflow
from sparse_dataflow.files import folders
from sparse_dataflow.files.errors import UserError


def modules() -> list[str]:
    """Names of both packages and of every module in them."""
    found = []
    for package in (sparse_dataflow, experiments):
        found.append(package.__name__)
        inside = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        found += [module.name for module in inside]
    return found


def main(folder: str, *names: str) -> None:
    """Writes index.html and a page a module into `folder`, which is missing, empty or an earlier
    reference."""
    folders.claim(Path(folder), "docs/api.py", "FOLDER")
    for name in sparse_dataflow.__all__:
        getattr(sparse_dataflow, name)  # pdoc sees only what has been imported.
    pdoc.render.configure(docformat="google", footer_text=sparse_dataflow.__name__)
    pdoc.pdoc(*(names or modules()), output_directory=Path(folder))
    print(f"{folder}/index.html")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
