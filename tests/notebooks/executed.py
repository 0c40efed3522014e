"""Runs a notebook on the CPU, with other parameters."""

import os
from pathlib import Path

import nbclient
import nbformat
from places import ROOT


def executed(path: Path, parameters: str, folder: Path):
    """Return the notebook after a run whose cell tagged "parameters" has another source."""
    notebook = nbformat.read(path, as_version=4)
    [cell] = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", ())]
    cell.source = parameters
    variables = {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "IPYTHONDIR": str(folder / "ipython"),
    }
    client = nbclient.NotebookClient(notebook, timeout=600)
    client.execute(env=os.environ | variables)
    return notebook
