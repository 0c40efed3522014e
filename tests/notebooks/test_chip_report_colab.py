"""The notebook of the chip report runs top to bottom in little time, and shows the page."""

import nbformat
import pytest
from executed import ROOT, executed

NOTEBOOK = ROOT / "notebooks" / "chip_report_colab.ipynb"


def test_it_is_stored_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)


@pytest.mark.nightly  # tests/commands/test_chip_report.py runs its command every day.
def test_it_shows_the_page(tmp_path):
    # Rows that do not fit into the time are shown as not measured.
    parameters = f'SOURCE, FLAGS, OUT = "", "--minutes=0.4 --scale=pico", "{tmp_path}/out"'
    notebook = executed(NOTEBOOK, parameters, tmp_path)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    [page] = [o["data"]["text/html"] for o in outputs if "text/html" in o.get("data", {})]
    assert "On this chip a pico block at 1/8 " in page and page.startswith("<iframe srcdoc=")
    assert (tmp_path / "out" / "report.json").exists()
