"""Every metric of a row is shown: in the line of progress, by trackers and on both pages."""

import dataclasses
import json

import pytest
from report_sample import bare, variant

from sparse_dataflow.monitoring import presentation, trackers
from sparse_dataflow.monitoring.metrics import MetricsWriter, read_metrics
from sparse_dataflow.reporting import page, watch_page
from sparse_dataflow.reporting.report import write_report
from sparse_dataflow.reporting.watch_page import WatchedRun


def train_row(step, **metrics):
    counters = {"kind": "train", "step": step, "tokens": 8 * step, "seconds": 0.5 * step}
    numbers = {"loss": 3.0, "learning_rate": 1e-3, "gradient_norm": 1.0, "tokens_per_second": 16.0}
    return {**counters, **numbers, "mfu": None, **metrics}


NAMES = {"largest_activation": (lambda i: 3.5 * i), "entropy/head": (lambda i: -1e-4 * i)}


def rows(count=5, **more):
    added = {**NAMES, **more}
    return [
        train_row(i, **{name: value(i) for name, value in added.items()})
        for i in range(1, count + 1)
    ]


def test_a_metric_that_nobody_knows_is_in_file_trackers_and_line(tmp_path):
    writer = MetricsWriter(tmp_path)
    for row in rows():
        writer.write(row)
    writer.close()
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert last["largest_activation"] == 17.5 and last["entropy/head"] == -5e-4
    assert trackers.scalars(last)["train/largest_activation"] == 17.5
    line = presentation.line(last)
    assert "loss 3.000" in line and "16 tokens/s" in line
    assert "largest_activation 17.5" in line and "entropy/head -0.0005" in line
    assert "gradient_norm" not in line and "mfu" not in line and "seconds" not in line


def test_both_pages_draw_a_metric_that_nobody_knows(tmp_path):
    sparse = dataclasses.replace(variant("sparse"), history=rows())
    data = bare(variants=[sparse])
    write_report(data, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    watched = watch_page.content([WatchedRun("run", {"sparse": 9}, {"sparse": rows()})], [], 0)
    for shown in (text, watched):
        for title in ("largest activation", "entropy/head", "gradient norm", "tokens per second"):
            assert title in shown.lower(), title
        assert "last 17.5" in shown and "last −0.000500" in shown
    assert 'href="#metrics"' in text and 'id="metrics"' in text


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_a_run_of_an_older_version_is_shown_as_well(kind):
    old = [{"kind": kind, "step": i, "tokens": 8 * i, "loss": 3.0} for i in (1, 2)]
    assert presentation.figure_names([old]) == []
    contents = page.contents(bare(variants=[dataclasses.replace(variant("dense"), history=old)]))
    assert contents["metrics"] == []
    watched = watch_page.content([WatchedRun("run", {"dense": 9}, {"dense": old})], [], 0)
    assert "3.000" in watched or kind == "eval"


@pytest.mark.parametrize("name", ["<b>", "a b", "$x^$", "", "x" * 61, "naïve", "1st"])
def test_names_that_no_run_writes_are_left_out(name):
    row = json.loads(json.dumps({**train_row(1), name: 5.0, "fine": 5.0}))
    assert presentation.figure_names([[row]]) == ["tokens_per_second", "gradient_norm", "fine"]


def test_figures_are_few_and_begin_with_known_ones():
    many = {f"n{i}": 1.0 for i in range(1000)}
    names = presentation.figure_names([[{**many, **train_row(1, dropped=0.5), "text": "x"}]])
    assert names[:3] == ["tokens_per_second", "gradient_norm", "dropped"]
    assert len(names) == presentation.MOST_FIGURES
    assert presentation.figure_names([[{"kind": "eval", "n": 1.0}], []]) == []


@pytest.mark.parametrize("value", [1e300, -1e300, float("nan"), float("inf"), None, 10**350])
def test_any_value_leaves_the_pages_whole(value):
    history = rows(odd=lambda i: value if i == 3 else 1.0)
    contents = page.contents(
        bare(variants=[dataclasses.replace(variant("dense"), history=history)])
    )
    assert len(contents["metrics"]) == 5
    assert not any("cannot be drawn" in figure for figure in contents["metrics"])
