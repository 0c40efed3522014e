"""The notebook runs top to bottom, at its smallest, and shows what it promises."""

import random

import nbformat
import pytest
from executed import ROOT, executed

NOTEBOOK = ROOT / "notebooks" / "sparse_gpt_colab.ipynb"


def cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_it_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in cells(notebook))


@pytest.mark.slow
def test_it_runs_top_to_bottom(tmp_path):
    draw = random.Random(0)
    for number in range(8):
        lines = [f"def f{draw.randrange(99)}(x): return {draw.randrange(9)}\n" for _ in range(300)]
        (tmp_path / f"{number}.txt").write_text("".join(lines))
    parameters = f'SOURCE, CORPUS = "", "{tmp_path}"\nLAYERS, WIDTH, BLOCK, STEPS = 1, 64, 8, 4'
    notebook = executed(NOTEBOOK, parameters, tmp_path)
    outputs = [output for cell in cells(notebook) for output in cell.outputs]
    text = "".join(output.get("text", "") for output in outputs)
    for words in ("balanced: True", "forward and backward: dense", "bits per byte: sparse"):
        assert words in text
    # The layouts, and the curve.
    drawn = [o for o in outputs if "image/png" in o.get("data", {})]
    assert len(drawn) == 2
    assert text.rstrip().splitlines()[-1]
