"""Tables of plans and of fits in the documentation are what the code computes."""

import dataclasses
import json
import re

import pytest
from places import ROOT

from sparse_dataflow.commands.planning.options import named_model
from sparse_dataflow.commands.preflight.settling import settle
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.hardware import machines
from sparse_dataflow.hardware.chips import CHIPS, GIB
from sparse_dataflow.planner import efficiency, memory, relay_step
from sparse_dataflow.planner.parallel_plan import ParallelPlan
from sparse_dataflow.planner.step_time import step_time
from sparse_dataflow.runs.run_config import SIZES, preset


def table(page, head):
    """Return first cell -> other cells of the table that begins with `head`."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    rows = text[text.index(f"| {head} |") :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("| ").split("|")] for row in rows]
    return {first: others for first, *others in cells}


def kept_rows(name):
    """Return the rows of a kept result."""
    text = (ROOT / "experiments" / "results" / f"{name}.json").read_text()
    return json.loads(text)["rows"]


def test_memory_and_speed_of_the_relay_stand_side_by_side():
    device, whole, host, _ = kept_rows("relay_bert_large_amd-epyc-2-cores")
    assert [row.get("stash") for row in (device, whole, host)] == ["device", None, "host"]

    def ratio(row):
        low, high = row["over_whole_low"], row["over_whole_high"]
        return f"{row['over_whole']:.2f} ({low:.2f} to {high:.2f})"

    columns = [
        [
            f"{row['device_bytes'] / 1e6:,.0f}",
            f"{row['planned_device_bytes'] / 1e6:,.0f}",
            f"{row['device_bytes'] / whole['device_bytes']:.0%}",
            f"{row['tokens_per_second']:.1f}",
            "1" if row is whole else ratio(row),
        ]
        for row in (device, host, whole)
    ]
    page = table("evidence/devices.md", "executor | device memory, MB | planned | of `whole`")
    assert list(page.values()) == columns


def test_the_relay_on_an_h200():
    [row] = kept_rows("relay_depth_h200")
    model = dataclasses.replace(SIZES["1.3b"], num_layers=4, compute_dtype="bfloat16")
    model = model.with_linears(LinearSpec("block_sparse", "monarch", density=0.125, block=128))
    training = TrainingConfig(batch=8, sequence=2048, micro_batches=4)
    how = {"stash": "host", "clipping": "eager", "fused_attention": True}
    step = relay_step.estimate(model, training, chip=CHIPS["h200"], **how)
    [cells] = table(
        "evidence/devices.md", "executor | device memory, MB | planned | ms a step"
    ).values()
    milliseconds = f"{1e3 * row['step_seconds']:.0f}"
    assert cells == [
        f"{row['device_bytes'] / 1e6:,.0f}",
        f"{step.device_total / 1e6:,.0f}",
        milliseconds,
        f"{1e3 * step.step_seconds:.0f}",
        f"{row['tokens_per_second']:,.0f}",
        f"{row['hidden_transfer']:.0%}",
        f"{row['hidden_updates']:.0%}",
    ]
    # The goal: memory within 10%.
    assert step.device_total == pytest.approx(row["device_bytes"], rel=0.1)
    text = (ROOT / "docs/evidence/performance.md").read_text(encoding="utf-8")
    [line] = [line for line in text.splitlines() if line.startswith("| step of the [relay]")]
    assert f"| {milliseconds} ms, {row['device_bytes'] / GIB:.1f} GiB |" in line


@pytest.mark.parametrize("row", range(5))
def test_hidden_transfers_on_an_h200_are_those_of_the_plan(row):
    models = [("13b", 1 / 8, {}), ("1.3b", 1.0, {}), *[("1.3b", 1 / 8, {})] * 2]
    scale, density, changes = [*models, ("1.3b", 1 / 8, {"num_layers": 4})][row]
    model = named_model(scale, density, block=128, dtype="bfloat16")
    model = dataclasses.replace(model, **changes)
    page = (ROOT / "docs/evidence/devices.md").read_text(encoding="utf-8")
    lines = page[page.index("| model | `parallel.stash` |") :].split("\n\n")[0].splitlines()[2:]
    _, stash, *cells, enough = [cell.strip() for cell in lines[row].strip("| ").split("|")]

    def hidden(sequences):
        training = TrainingConfig(batch=sequences, sequence=2048, micro_batches=sequences // 2)
        how = {"stash": stash, "clipping": "eager", "fused_attention": True}
        step = relay_step.estimate(model, training, chip=CHIPS["h200"], **how)
        return step.hidden_transfer

    assert cells == [f"{hidden(sequences):.0%}" for sequences in (8, 16, 32)]
    if enough == "never":
        assert hidden(2**12) < 0.8
    else:
        sequences = int(enough.replace(",", "")) // 2048
        assert hidden(sequences) >= 0.8 > hidden(sequences - 2)


def test_measured_steps_beside_predicted_ones():
    page = table("evidence/planner.md", "step, full remat | measured | predicted")
    for file, scale, rows, chip in (
        ("step_bench_h200_13b", "13b", 2, "h200"),
        ("step_bench_h100_6-7b", "6.7b", 4, "h100"),
    ):
        measured = kept_rows(file)
        plan = ParallelPlan(micro_batch=rows, remat="full", state_dtype="bfloat16")
        for kind, density, name in (("dense", 1.0, "dense"), ("sparse", 1 / 8, "at 1/8")):
            model = named_model(scale, density)
            constants = efficiency.for_family("hopper")
            seconds = float(step_time(model, 2048, plan, CHIPS[chip], constants).total)
            took = measured[kind]["step_ms"] / 1e3
            first = f"{scale.upper()} {name}, {rows} x 2,048 tokens, {chip.upper()}"
            assert page[first] == [
                f"{1e3 * took:.0f} ms", f"{1e3 * seconds:.0f} ms", f"{seconds / took - 1:+.0%}"
            ]  # fmt: skip


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
    rows = table("guide/finetuning_memory.md", "model | training all weights")
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
    rows = table("evidence/serving_cost.md", "recipe | loss above the law")
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
        ROOT / "docs/evidence/serving_cost.md"
    ).read_text(encoding="utf-8")
