"""What `--chips` and `--describe` print: the plan, its bands, the fastest and the cheapest."""

import math
import re

import pytest
from exit_status import exit_status

from experiments import gpt13b_dense, gpt13b_sparse
from sparse_dataflow.commands.planning import machine_report
from sparse_dataflow.core.training import cost
from sparse_dataflow.hardware import machines
from sparse_dataflow.hardware.chips import GIB
from sparse_dataflow.planner import bands, search
from sparse_dataflow.runs.run_config import preset

CONFIG = preset("13b", compute_dtype="bfloat16")


def plan(name, **changes):
    return machine_report.plan(CONFIG.change(**changes), machines.parse(name))


def run(*arguments, experiment=gpt13b_sparse):
    return exit_status(experiment, *arguments)


def test_figures_follow_from_the_seconds_of_a_step():
    result = plan("h100:8@2.5", training__steps=1000)
    tokens_a_step = 1024 * 2048
    assert result.tokens == 1000 * tokens_a_step
    assert result.speed == pytest.approx(tokens_a_step / result.seconds)
    assert result.days == pytest.approx(1000 * result.seconds / 86400)
    hours = 1e9 / result.speed / 3600
    assert result.dollars == pytest.approx(hours * 8 * 2.5)
    assert plan("h100:8").tokens == 300e9 and plan("h100:8").dollars is None


def test_the_twin_is_the_fastest_dense_plan():
    """A search of its own over the same choices has none that is faster."""
    result = plan("h100:8")
    dense = result.dense.request
    levels = dict(search.space(dense)) | {"zero": (3,), "stage": (1,), "schedule": ("gpipe",)}
    [(_, speed)] = search.price(dense, levels | {"chunks": (1,)}).ranked(1, search.ROOMY)
    seconds = 1024 * 2048 / 8 / speed
    assert result.over_dense == pytest.approx(seconds / result.seconds)
    assert plan("h100:8", sparsity__projections=()).over_dense is None


def test_bands_are_wider_where_less_is_known():
    known, sparse, unknown = (
        plan("h100:8", sparsity__projections=()),
        plan("h100:8"),
        plan("mi300x:8"),
    )
    assert known.error == bands.OTHER_SOFTWARE
    assert known.error < sparse.error < unknown.error


def test_the_text_has_time_memory_and_gain_with_their_ranges():
    result = plan("h100:8")
    text = machine_report.text(result)
    assert f"chosen: training.micro_batches={result.settled.config.training.micro_batches}" in text
    [row] = re.findall(r"seconds a step +([\d.]+) +([\d.]+) +([\d.]+)", text)
    middle, low, high = map(float, row)
    assert middle == pytest.approx(result.seconds, rel=0.01)
    assert high / middle == pytest.approx(math.exp(result.error), rel=0.02) == middle / low
    assert "times the dense twin" in text and "no fitted run" in text
    sizes = re.findall(r"^  (parameters|all) +([\d.]+)$", text, re.M)
    assert dict(sizes)["all"] == f"{result.settled.chip_bytes / GIB:.2f}"
    weights = 4 * cost.parameter_count(result.settled.request.config) / GIB
    assert weights / 8 < float(dict(sizes)["parameters"]) < weights


@pytest.mark.slow
def test_machines_are_compared_and_those_without_a_plan_are_said(capsys):
    chips = "--chips=a100:8@1.5,h100:8@2.5,v5e-64@1.2,rtx-4090"
    assert run("--scale=13b", chips) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line for line in out.splitlines() if re.match(r"[\w-]+:\d+ ", line)}
    assert set(rows) == {"a100-80gb:8", "h100:8", "tpu-v5e:64"}
    results = {name: plan(f"{name}@{price}") for name, price in
               (("a100:8", 1.5), ("h100:8", 2.5), ("v5e:64", 1.2))}  # fmt: skip
    names = {"a100:8": "a100-80gb:8", "h100:8": "h100:8", "v5e:64": "tpu-v5e:64"}
    fastest = names[max(results, key=lambda name: results[name].speed)]
    cheapest = names[min(results, key=lambda name: results[name].dollars)]
    assert [name for name, row in rows.items() if "fastest" in row] == [fastest]
    assert [name for name, row in rows.items() if "cheapest" in row] == [cheapest]
    assert "rtx-4090:1: Training --scale=13b needs" in out


def test_a_plan_is_printed_on_a_laptop_with_its_arrays(capsys):
    assert run("--scale=13b", "--chips=v5p-8", "--describe") == 0
    out = capsys.readouterr().out
    assert "sparse: 4 chips" in out and "bytes a chip" in out
    assert "13b sparse on 4 tpu-v5p" in out and "by the compiler" in out


def test_the_dense_experiment_has_machines_too(capsys):
    assert run("--scale=13b", "--chips=h100:8", experiment=gpt13b_dense) == 0
    assert "13b dense on 8 h100" in capsys.readouterr().out


def test_a_run_that_fits_nowhere_is_refused(capsys):
    assert run("--scale=13b", "--chips=rtx-4090") == 2
    assert "it fits on rtx-4090:2" in capsys.readouterr().err
    assert run("--chips=h100:8,a100:8", "--describe") == 2
    assert "legal: one machine, or --chips alone" in capsys.readouterr().err


@pytest.mark.parametrize("scale", ["pico", "3m", "125m"])
def test_small_scales_work_with_their_own_defaults(scale, capsys):
    assert run(f"--scale={scale}", "--chips=h100:1") == 0
    assert f"{scale} sparse on 1 h100" in capsys.readouterr().out


def test_describe_says_why_there_is_no_plan_here(capsys):
    assert run("--scale=175b", "--describe") == 0
    assert "no plan for this machine: Training --scale=175b needs" in capsys.readouterr().out
