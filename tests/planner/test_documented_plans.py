"""Tables of plans and of fits in the documentation are what the code computes."""

import json
import re
from pathlib import Path

import pytest

from sparse_dataflow.commands.preflight.settling import settle
from sparse_dataflow.hardware import machines
from sparse_dataflow.hardware.chips import GIB
from sparse_dataflow.planner import memory
from sparse_dataflow.runs.run_config import preset

ROOT = Path(__file__).parents[2]


def table(page, head):
    """Return first cell -> other cells of the table that begins with `head`."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    rows = text[text.index(f"| {head} |") :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("| ").split("|")] for row in rows]
    return {first: others for first, *others in cells}


@pytest.mark.parametrize("scale", ["llama3-1b", "llama3-8b"])
@pytest.mark.parametrize("kind", ["", ", block-sparse"])
def test_memory_of_adapters(scale, kind):
    config = preset(scale, compute_dtype="bfloat16")
    config = config.change(training__sequence=2048, training__batch=1, model__remat="full")
    config = config if kind else config.dense()
    machine = machines.parse("h200:1")
    whole = settle(config, machine).chip_bytes / GIB
    adapted = config.change(training__adapter_rank=16, run__init_from="folder", run__twin="no")
    result = settle(adapted, machine)
    [(model, _)] = result.request.models[0]
    sizes = whole, result.chip_bytes / GIB, memory.frozen_bytes(model) / GIB
    rows = table("finetuning.md", "model | training all weights")
    assert rows[f"`{scale}`{kind}"] == [f"{size:.1f}" for size in sizes]


def test_losses_above_the_law():
    path = ROOT / "experiments" / "results" / "serving_cost" / "serving_cost.json"
    [fit] = json.loads(path.read_text())["laws"]
    percents = fit["mean_weights"]["percent"]
    arms = {
        "single weights": ["pruned_2_narrow_heads_block_1", "pruned_4_narrow_heads_block_1"],
        "blocks of 4, the same": ["pruned_2_narrow_heads_early"],
        "blocks of 4, width 48": ["pruned_4_narrow_heads_early"],
        "blocks of 4, cut": ["pruned_2_narrow_heads"],
        "MLP alone": ["pruned_2_mlp"],
    }
    rows = table("serving_cost.md", "recipe | loss above the law")
    assert len(rows) == len(arms)
    for begin, names in arms.items():
        [(cell_text,)] = (cells for first, cells in rows.items() if first.startswith(begin))
        cells = {cell: -v for cell, v in percents.items() if cell.split()[0] in names}
        assert sorted(re.findall(r"([\d.]+)%", cell_text)) == sorted(
            {f"{abs(value):.1f}" for value in cells.values()} if begin != "single weights" else
            [f"{abs(value):.1f}" for value in cells.values()]
        )  # fmt: skip
        assert set(re.findall(r"\b(40|160|640|2,560)\b(?!%)", cell_text)) == {
            f"{int(cell.split()[1]):,}" for cell in cells
        }
    assert f"all {['eight', 'nine', 'ten'][fit['mean_weights']['dense_cells'] - 8]} dense" in (
        ROOT / "docs" / "serving_cost.md"
    ).read_text(encoding="utf-8")
