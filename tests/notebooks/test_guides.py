"""The notebooks of the guides run at small size, and are stored with their outputs."""

import nbformat
import pytest
from executed import ROOT, executed

SMALL = {
    "sparse_layers": 'SOURCE = ""\nWIDTH, STEPS = 64, 60',
    "prune_and_serve": 'SOURCE = ""\nSTEPS, TOKENS = 10, 1024',
    "finetune_and_export": 'SOURCE = ""\nBASE, STEPS, ADAPTER_STEPS = "", 10, 4',
    "read_a_plan": 'SOURCE = ""\nSCALE, CHIPS, MACHINES = "1.3b", "h100:1", "h100:1@2,v5e:8@1"\n'
    'PLAN = "--scale=22b --chips=h100:64 --batch=512"',
}
WORDS = {
    "sparse_layers": ("sparse: loss", "largest difference:"),
    "prune_and_serve": ("block=1x16", "block=narrow", "answer: {"),
    "finetune_and_export": ("loss of the answers", "exported adapter", "largest difference"),
    "read_a_plan": ("seconds a step", "cheapest", "days"),
}
"""Notebook -> what its outputs have, those that are stored and those at small size."""


def text_of(notebook):
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return "".join(output.get("text", "") for cell in cells for output in cell.outputs)


@pytest.mark.parametrize("name", SMALL)
def test_its_outputs_are_stored_without_errors(name):
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert all(words in text_of(notebook) for words in WORDS[name])
    assert '"output_type": "error"' not in nbformat.writes(notebook)


DAILY = "sparse_layers", "read_a_plan"
RUNS = [pytest.param(n, marks=() if n in DAILY else pytest.mark.nightly) for n in SMALL]


@pytest.mark.parametrize("name", RUNS)
def test_it_runs_at_small_size(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    notebook = executed(ROOT / "notebooks" / f"{name}.ipynb", SMALL[name], tmp_path)
    assert all(words in text_of(notebook) for words in WORDS[name])
