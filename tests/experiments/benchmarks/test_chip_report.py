"""A chip report: rows in processes of their own, JSON after each, resumed, one page."""

import dataclasses
import importlib
import json
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from places import ROOT

from experiments.benchmarks.chip_report import chip_data, chip_page, chip_rows
from experiments.benchmarks.chip_report import collect as chip_report
from experiments.benchmarks.chip_report.chip_data import ChipFacts, ChipReport, Measure, RowResult
from experiments.benchmarks.chip_report.chip_rows import Row
from sparse_dataflow.commands import command_line
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.planner import plan_memory
from sparse_dataflow.runs.run_config import SIZES, preset

EMPTY = ChipReport(ChipFacts("abacus", "gpu", 2**30), "13b", 0.125, "command", "date", {"jax": "1"})
HEAD = """
import json, pathlib, subprocess, sys, time
folder = pathlib.Path(sys.argv[-1].removeprefix("--keep="))
out = folder.parents[1]
def result(ratio, text=""):
    (folder / "result.json").write_text(json.dumps({"ratio": ratio, "text": text}))
def count(name):
    with (out.parent / name).open("a") as file:
        file.write("x")
"""
SUCCEEDS = 'count("block"); result(4.52)'
FAILS = 'print("first"); sys.exit("the last words")'
HANGS = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(out.parent / "child").write_text(str(child.pid))
result(2.0)
time.sleep(600)
"""
SEES = """
rows = json.loads((out / "report.json").read_text())["rows"]
result(1.5, ", ".join(row["status"] for row in rows))
"""


def row(name, code, seconds=60.0):
    command = (sys.executable, "-c", HEAD + code)
    return Row(name, f"row {name}", command, seconds, lambda result: [
        Measure(name, result["ratio"], text=result["text"])
    ])  # fmt: skip


@pytest.fixture
def collect(tmp_path, monkeypatch):
    """collect(row, ...) -> the report of a folder."""
    monkeypatch.setattr(chip_report, "GRACE", 0.3)
    monkeypatch.setattr(chip_report, "SHARE", 0.0)
    monkeypatch.setattr(chip_report, "SHORTEST", 0.1)
    (tmp_path / "out").mkdir()

    def collect(*rows, minutes=10.0, report=EMPTY):
        deadline = time.monotonic() + 60 * minutes
        return chip_report.collect(tmp_path / "out", report, rows, deadline)

    return collect


def alive(pid):
    """Whether a process runs; one that has ended but was not waited for does not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_failure_and_a_hang_cost_their_rows_alone(collect, tmp_path):
    report = collect(
        row("block", SUCCEEDS), row("fails", FAILS), row("hangs", HANGS, 5.0), row("sees", SEES)
    )
    assert [r.status for r in report.rows] == ["done", "failed", "timed out", "done"]
    block, fails, hangs, _ = report.rows
    assert block.measures == (Measure("block", 4.52),) and block.exit_status == 0
    assert fails.exit_status == 1 and fails.output.splitlines() == ["first", "the last words"]
    # What a stopped row wrote before stays, marked as not done.
    assert hangs.measures == (Measure("hangs (incomplete)", 2.0),) and hangs.exit_status is None
    assert 5 <= hangs.seconds < 60
    child = (tmp_path / "child").read_text()
    assert not pathlib.Path("/proc").exists() or not alive(child)


def test_a_terminated_report_leaves_no_process(tmp_path):
    (tmp_path / "out" / "rows").mkdir(parents=True)
    program = """
import pathlib, sys
from experiments.benchmarks.chip_report import collect as chip_report
chip_report.GRACE = 0.3
folder, command = pathlib.Path(sys.argv[1]), [sys.executable, "-c", sys.argv[2]]
chip_report._run([*command, f"--keep={folder}"], {}, folder.parent / "output", 600)
"""
    folder = tmp_path / "out" / "rows" / "row"
    folder.mkdir()
    process = subprocess.Popen([sys.executable, "-c", program, str(folder), HEAD + HANGS], cwd=ROOT)
    child = tmp_path / "child"
    while not (child.exists() and child.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert not pathlib.Path("/proc").exists() or not alive(child.read_text())


def test_the_report_is_written_after_every_row(collect, tmp_path):
    report = collect(row("block", SUCCEEDS), row("fails", FAILS), row("sees", SEES), row("z", SEES))
    assert report.row("sees").measures[0].text == "done, failed, not run, not run"
    assert report.row("z").measures[0].text == "done, failed, done, not run"
    assert chip_data.read(tmp_path / "out" / "report.json") == report
    saved = json.loads((tmp_path / "out" / "report.json").read_text())
    assert saved["answer"] == report.answer
    for result in saved["rows"]:
        assert result["command"] and result["date"] and result["versions"] == {"jax": "1"}


def test_the_same_command_skips_rows_that_are_done_and_retries_others(collect, tmp_path):
    flaky = 'count("flaky"); (out.parent / "mended").exists() or sys.exit(3); result(2.0)'
    rows = row("block", SUCCEEDS), row("flaky", flaky)
    assert [r.status for r in collect(*rows).rows] == ["done", "failed"]
    (tmp_path / "mended").touch()
    assert [r.status for r in collect(*rows).rows] == ["done", "done"]
    assert (tmp_path / "block").read_text() == "x" and (tmp_path / "flaky").read_text() == "xx"
    # The result of another command is not the row's.
    collect(row("block", SUCCEEDS + "  # changed"), rows[1])
    assert (tmp_path / "block").read_text() == "xx" and (tmp_path / "flaky").read_text() == "xx"
    # Nor is one of other versions.
    collect(rows[1], report=dataclasses.replace(EMPTY, versions={"jax": "2"}))
    assert (tmp_path / "flaky").read_text() == "xxx"


def test_rows_wait_when_no_time_is_left(collect):
    report = collect(row("block", SUCCEEDS), minutes=0)
    assert report.rows[0].status == "not run"
    assert report.answer == (
        "On this chip a 13B block at 1/8 was not measured: no time was left."
    )  # fmt: skip


def test_a_slow_row_may_take_a_share_of_the_time_that_is_left(collect, monkeypatch):
    slow = row("block", "time.sleep(2); result(2.0)", seconds=0.5)
    assert collect(slow).rows[0].status == "timed out"
    monkeypatch.setattr(chip_report, "SHARE", 0.4)
    assert collect(slow).rows[0].status == "done"


def test_a_row_without_a_readable_result_fails(collect):
    report = collect(row("block", "pass"), row("empty", '(folder / "a.json").write_text("{}")'))
    assert [r.status for r in report.rows] == ["failed", "failed"]
    assert report.rows[0].output == "It wrote no result."
    assert "KeyError('ratio')" in report.rows[1].output


def test_a_report_of_another_chip_is_refused(collect):
    collect(row("block", SUCCEEDS))
    other = dataclasses.replace(EMPTY, chip=ChipFacts("slide rule", "cpu", None))
    with pytest.raises(UserError, match="has the report of abacus, and this is slide rule"):
        collect(row("block", SUCCEEDS), report=other)


def block(status="done", ratio=4.52, **fields):
    measures = (Measure("block", ratio, 4.4, 4.6, 5.1, "<b>8 ms</b>"),) if status == "done" else ()
    return RowResult("block", "One block", "python -m x", status, measures, **fields)


@pytest.mark.parametrize(
    ("scale", "result", "sentence"),
    [
        ("13b", block(), "On this chip a 13B block at 1/8 trains 4.5 times faster than dense."),
        ("nano", block(), "On this chip a nano block at 1/8 trains 4.5 times faster than dense."),
        ("13b", block(ratio=0.8),
         "On this chip a 13B block at 1/8 trains slower than dense: 0.80 times its speed."),
        ("13b", block("failed", exit_status=1),
         "On this chip a 13B block at 1/8 was not measured: it failed with status 1."),
        ("13b", block("timed out", seconds=150.2),
         "On this chip a 13B block at 1/8 was not measured: it was stopped after 150 s."),
    ],
)  # fmt: skip
def test_the_page_begins_with_the_answer(scale, result, sentence):
    report = dataclasses.replace(EMPTY, scale=scale, rows=(result,))
    assert report.answer == sentence
    page = chip_page.render(report)
    assert page.partition('<p class="headline">')[2].startswith(f"{sentence}</p>")
    assert ("A 13B block was not measured." in page) == (scale != "13b")
    assert ("not measured\n" in page) == (result.status != "done")
    assert "default-src 'none'" in page and "://" not in page and "<b>8 ms" not in page


def test_products_are_compared_by_their_total_time():
    cases = [("forward", "grouped", 8, 1), ("weight_gradient", "grouped", 4, 2),
             ("forward", "xla", 8, 4)]  # fmt: skip
    names = ("product", "implementation", "dense_ms", "sparse_ms")
    rows = [dict(zip(names, c)) | {"pattern": "monarch", "density": 0.125} for c in cases]
    grouped, tables = chip_rows.summed_products({"rows": rows})
    assert (grouped.ratio, grouped.bound) == (4.0, 8.0)
    assert "forward 8.00x, weight gradient 2.00x" in grouped.text
    assert tables.ratio == 2.0 and "1 products missing" in tables.text


@pytest.mark.parametrize(
    "chip",
    [
        ChipFacts("a CPU", "cpu", 8 * 2**30),
        ChipFacts("Tesla T4", "gpu", 14 * 2**30, "7.5"),
        ChipFacts("a100-40gb", "gpu", 36 * 2**30, "8.0"),
        ChipFacts("h100", "gpu", 73 * 2**30, "9.0"),
        ChipFacts("mi300x", "gpu", 176 * 2**30),
        ChipFacts("unknown", "gpu", None, ""),
        ChipFacts("tpu-v5e", "tpu", 16 * 10**9),
    ],
    ids=lambda chip: chip.name,
)
@pytest.mark.parametrize("scale", ["auto", "125m", "pico"])
def test_every_row_is_a_legal_command_of_its_experiment(chip, scale):
    scale = chip_rows.target(chip, scale)
    rows = chip_rows.rows(chip, scale)
    assert rows[0].name == chip_data.ANSWER and {r.name for r in rows} <= chip_rows.SECONDS.keys()
    for each in rows:
        assert each.command[2] == "sparse_dataflow"
        module = importlib.import_module(f"experiments.{each.command[3]}")
        shared = getattr(module, "SHARED", ())
        arguments = command_line.arguments(each.command[3:], shared, module.Options)
        if shared:
            config = arguments[0].config(chip.platform, chip.memory_bytes)
            assert config.model.compute_dtype == chip_rows._dtype(chip)
            side = config.sparsity.block
            assert config.model.d_model % (side / config.sparsity.density) == 0


def test_the_step_is_of_the_largest_scale_that_fits():
    gpu = ChipFacts("gpu", "gpu", 73 * 2**30, "9.0")
    name, batch = chip_rows.step_size(gpu, "13b")

    def need(name, batch):
        config = preset(name, compute_dtype="bfloat16").change(
            model__remat="full", training__state_dtype="bfloat16", training__batch=batch
        )
        config = config.without_auto()
        return plan_memory.training_bytes(config.model, config.training, True).total

    larger = list(SIZES)[list(SIZES).index(name) + 1]
    assert need(name, batch) <= 0.9 * gpu.memory_bytes < min(need(larger, 1), need(name, 2 * batch))
