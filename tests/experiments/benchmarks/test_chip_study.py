"""A study of a chip: rows kept at once, skipped when there, tried again after a kill."""

import dataclasses
import json
import math
import os
import random
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from places import ROOT

from experiments.benchmarks.chip_study import kernel_times, models, rows, study, text
from experiments.benchmarks.chip_study.program_pool import ProgramPool
from experiments.benchmarks.chip_study.rows import Row, Study
from sparse_dataflow.core.training import cost
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import CHIPS


def kept(path):
    """Returns the rows of the only chip of a file."""
    [chip_rows] = json.loads(path.read_text())["chips"].values()
    return chip_rows


@pytest.fixture
def collect(tmp_path, monkeypatch):
    """collect({name: function of the study}) runs such rows; returns names in order of starting."""

    monkeypatch.setattr(study.gc, "collect", lambda: 0)  # Seconds beside all tests.

    def collect(measures, seconds=100.0, least=0.0, chip="abacus"):
        order = []

        def measure(name, function):
            return lambda running: order.append(name) or function(running)

        table = [
            Row(name, f"row {name}", least, lambda *_: {}, measure(name, function))
            for name, function in measures.items()
        ]
        deadline = time.monotonic() + seconds
        here = Study(CHIPS["h100"], models.REHEARSAL, ProgramPool(1), deadline)
        study.collect(here, table, study.Records(tmp_path / "study.json", chip))
        return order

    return collect


def succeeds(_):
    return {"figure": 1.5}


def fails(_):
    raise ValueError("the first line\nthe second")


def lacks(_):
    raise rows.Skipped("There is no such setting.")


def stops(_):
    raise KeyboardInterrupt


def test_failed_rows_have_a_sentence_and_cost_themselves_alone(collect, tmp_path):
    assert collect({"a": fails, "b": lacks, "c": succeeds}) == ["a", "b", "c"]
    result = kept(tmp_path / "study.json")
    assert {name: row["status"] for name, row in result.items()} == {
        "a": "failed", "b": "skipped", "c": "done",
    }  # fmt: skip
    assert result["a"]["problem"] == "ValueError: the first line"
    assert result["c"]["result"] == {"figure": 1.5}
    assert {"date", "command", "versions"} <= result["c"].keys()


def test_the_figures_of_a_row_are_printed(collect, capsys):
    nested = {"times": {"dense_ms": 2.0, "steps": 3}, "rows": [1, 2]}
    collect({"a": lambda _: nested})
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert printed[-3:] == ["done", "times.dense_ms: 2", "times.steps: 3"]


@pytest.mark.parametrize("seed", range(3))
def test_the_next_call_skips_what_is_there_and_begins_with_the_untried(collect, tmp_path, seed):
    rng = random.Random(seed)
    names = [f"row{i}" for i in range(6)]
    kinds = {name: rng.choice([succeeds, fails, lacks]) for name in names}
    stopped = rng.choice(names)
    with pytest.raises(KeyboardInterrupt):
        collect(kinds | {stopped: stops})
    before = kept(tmp_path / "study.json")
    assert before[stopped]["status"] == "started"
    after = names[names.index(stopped) + 1 :]
    again = [n for n in names if n in before and (n == stopped or kinds[n] is fails)]
    assert collect(kinds | {stopped: succeeds}) == after + again
    result = kept(tmp_path / "study.json")
    assert result.keys() == set(names)
    assert all(result[n] == before[n] for n in before if n not in again)


def test_a_row_without_enough_time_waits_for_the_next_call(collect, tmp_path):
    assert collect({"long": succeeds}, seconds=5, least=6) == []
    assert collect({"long": succeeds}, seconds=60, least=6) == ["long"]


def test_rows_of_another_chip_stay_and_do_not_count(collect, tmp_path):
    assert collect({"a": succeeds}) == collect({"a": succeeds}, chip="slide rule") == ["a"]
    assert json.loads((tmp_path / "study.json").read_text())["chips"].keys() == {
        "abacus", "slide rule",
    }  # fmt: skip


@pytest.mark.parametrize("content", ["", "[]", '{"chips": 3}', '{"rows": {}}'])
def test_a_file_that_is_no_study_is_refused(tmp_path, content):
    (tmp_path / "study.json").write_text(content)
    with pytest.raises(UserError, match="is no study"):
        study.Records(tmp_path / "study.json", "abacus")


def test_programs_that_did_not_begin_before_the_deadline_are_compiled_when_needed():
    pool = ProgramPool(1)
    shape = jax.ShapeDtypeStruct((8,), jnp.float32)

    def slow():
        time.sleep(0.5)
        return jax.jit(jnp.sin).lower(shape)

    pool.add({"first": slow, "second": lambda: jax.jit(jnp.cos).lower(shape)})
    assert pool.settle(time.monotonic() + 0.1) == ["second"]
    assert pool.seconds.keys() == {"first"}
    assert pool.get("second")(jnp.zeros(8)).tolist() == [1.0] * 8


def test_an_error_of_a_compiler_comes_where_its_program_is_needed():
    pool = ProgramPool(1)
    pool.add({"wrong": lambda: 1 / 0})
    assert pool.settle(math.inf) == []
    with pytest.raises(ZeroDivisionError):
        pool.get("wrong")


@pytest.mark.parametrize("runs", [1, 2, 5])
def test_a_trace_has_each_kernel_once_a_run(runs):
    x = jnp.ones((96, 96))
    program = jax.jit(lambda x: jnp.sort(x @ x)).lower(x).compile()
    traced = kernel_times.traced(lambda: program(x), runs)
    table = kernel_times.table(traced, runs, program.as_text())
    sorts = [row for row in table["kernels"] if row["name"].startswith("sort")]
    assert [row["calls"] for row in sorts] == [1.0]
    assert sorts[0]["bytes"] == 2 * 4 * 96 * 96
    assert table["ms_per_run"] == pytest.approx(sum(row["ms"] for row in table["kernels"]))


def test_a_folder_without_a_trace_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="left no trace"):
        kernel_times.read(tmp_path)


@pytest.mark.parametrize("most", [2**21, 3 * 2**20])
def test_text_has_an_origin_a_limit_and_other_files_held_out(most):
    here, again = text.load_text("", most), text.load_text("", most)
    assert here.origin == again.origin
    total = len(here.train) + len(here.held_out)
    assert 0.9 * most < total <= most
    assert total == sum(here.origin["python_sources"].values())
    assert 0.002 * total < len(here.held_out) < 0.1 * total
    files = [set(part.tobytes().split(b"\0")) - {b""} for part in (here.train, here.held_out)]
    assert not files[0] & files[1]


@pytest.mark.parametrize("size", [10**6, 1234567, 2**21])
def test_text_that_was_carried_along_is_read_from_its_file(tmp_path, size):
    content = np.random.default_rng(size).integers(256, size=size, dtype=np.uint8)
    (tmp_path / "some.txt").write_bytes(content.tobytes())
    corpus = text.load_text(str(tmp_path / "some.txt"), 2**21)
    assert np.array_equal(np.concatenate([corpus.train, corpus.held_out]), content)
    batch = corpus.batch(np.random.default_rng(0), 3, 100)
    assert batch.shape == (3, 101) and batch.dtype == np.int32
    assert corpus.held_out_rows(5, 100).shape == (5, 101)


@pytest.mark.parametrize("content", [None, b"short"])
def test_text_that_is_absent_or_short_is_refused(tmp_path, content):
    if content:
        (tmp_path / "some.txt").write_bytes(content)
    with pytest.raises(UserError, match=r"cannot be read|too short"):
        text.load_text(str(tmp_path / "some.txt"), 2**21)


@pytest.mark.parametrize("scale", ["350m", "1.3b", "6.7b"])
def test_the_narrow_model_has_the_flops_of_the_sparse_one_and_widths_of_tiles(scale):
    sizes = dataclasses.replace(
        models.Sizes(), trained=scale, sequence=256, block=32, width_step=32, dtype="float32"
    )
    by_name = models.trained_models(sizes)
    flops = {n: cost.flops_per_token(m, sizes.sequence).total for n, m in by_name.items()}
    assert flops["narrow"] == pytest.approx(flops["sparse"], rel=0.15)
    assert flops["dense"] > 2 * flops["sparse"]
    assert by_name["narrow"].d_model % 32 == 0


def rehearsal(folder):
    command = [sys.executable, "-m", "experiments.chip_report", "--study", "--rehearse"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [*command, f"--out={folder}"], cwd=ROOT, env=variables, stdout=subprocess.DEVNULL
    )


@pytest.mark.slow
def test_a_rehearsal_that_is_killed_goes_on_to_the_last_row(tmp_path):
    path, done = tmp_path / "study.json", {}
    killed = rehearsal(tmp_path)
    while killed.poll() is None and len(done) < 2:
        time.sleep(0.05)
        saved = kept(path) if path.exists() else {}
        done = {name: row for name, row in saved.items() if row["status"] == "done"}
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert rehearsal(tmp_path).wait() == 0
    result = kept(path)
    assert list(done) == ["rates", "policies"]
    assert all(result[name] == done[name] for name in done)
    assert result.keys() == {row.name for row in rows.ROWS}
    assert all(row["status"] in ("done", "skipped") for row in result.values())
    losses = result["training"]["result"]["rows"]
    assert losses.keys() == {"dense", "narrow", "sparse"}
    for row in losses.values():
        assert row["losses"][-1]["bits_per_byte"] < row["losses"][0]["bits_per_byte"]
    assert result["headline"]["result"]["rows"]["sparse"]["ratio"] > 0
    assert result["decoding"]["result"]["programs"]["dense"]["kernels_per_run"] > 1


def test_figures_of_a_row_are_printed_as_they_are_measured(collect, capsys):
    collect({"a": lambda _: {"seconds": {"dense": 0.123456, "runs": 3}, "code": "xla", "all": [1]}})
    printed = capsys.readouterr().out
    assert "seconds.dense: 0.1235" in printed and "seconds.runs: 3" in printed
    assert "code: xla" in printed and "all" not in printed
