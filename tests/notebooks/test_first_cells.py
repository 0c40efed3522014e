"""The first cells of a notebook install the clone that it is in, where nothing is installed."""

import importlib.util
import json
import shlex

import pytest
from executed import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def installed(path, monkeypatch, source=None):
    """Returns what pip is asked to install by the first two cells of code."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    first, second = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"][:2]
    words, values = [], {"pip": lambda *names: words.extend(names)}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    exec(first, values)
    if source is not None:
        values["SOURCE"] = source
    lines = []
    for line in second.splitlines():
        before, magic, arguments = line.partition("%pip install -q ")
        names = [f"f{name!r}" for name in shlex.split(arguments)]
        lines.append(f"{before}pip({', '.join(names)})" if magic else line)
    exec("\n".join(lines), values)
    return words


@each_notebook
def test_a_clone_is_installed_whole(path, monkeypatch):
    monkeypatch.chdir(ROOT / "notebooks")
    source = installed(path, monkeypatch)[0]
    assert source == f"sparse_dataflow[train] @ {ROOT.as_uri()}"
    assert (ROOT / "setup.cfg").exists()


@each_notebook
def test_another_source_is_taken_and_none_is_said(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    source = installed(path, monkeypatch, "git+https://HOST/REPOSITORY")[0]
    assert source == "sparse_dataflow[train] @ git+https://HOST/REPOSITORY"
    with pytest.raises(AssertionError, match="address of the repository"):
        installed(path, monkeypatch)
