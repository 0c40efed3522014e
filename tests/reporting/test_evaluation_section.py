"""The evaluation section of the report."""

import json

import pytest
import report_sample

from sparse_dataflow.reporting.report import write_report
from sparse_dataflow.reporting.report_data import EvaluationData, ReportData, evaluation_table

PAIRED = {"difference": 0.04, "low": 0.01, "high": 0.07, "p": 0.012}


def row(**changes):
    fields = {
        "task": "cloze",
        "shots": 5,
        "metric": "acc",
        "lower_is_better": False,
        "items": 200,
        "documents": 18,
        "chance": 0.25,
        "baselines": {"unigram": 0.3},
        "models": {
            "sparse": {"value": 0.51, "error": 0.03},
            "dense": {"value": 0.47, "error": None},
        },
        "paired": PAIRED,
    }
    return {**fields, **changes}


def evaluation(*rows, models=("sparse", "dense")):
    return EvaluationData(list(models), list(rows), "By a stated test.", ["A note <&>."], "python")


@pytest.mark.parametrize(
    ("changes", "better"),
    [
        ({}, True),
        ({"difference": -0.04, "low": -0.07, "high": -0.01}, False),
        ({"low": -0.01}, None),
        ({"low": None, "high": None, "p": None}, None),
    ],
)
@pytest.mark.parametrize("lower_is_better", [False, True])
def test_better_or_worse_only_where_the_interval_excludes_zero(changes, better, lower_is_better):
    changed = row(lower_is_better=lower_is_better, paired={**PAIRED, **changes})
    better = better if better is None else better != lower_is_better
    (table_row,) = evaluation_table(evaluation(changed))
    assert table_row["differences"][0]["better"] is better


def test_the_section_has_all_numbers(tmp_path):
    data = report_sample.bare(
        evaluation=evaluation(row(), row(shots=0, paired={**PAIRED, "p": 1e-9}))
    )
    assert ReportData.from_json(json.loads(json.dumps(data.to_json()))) == data
    write_report(data, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    for text in (
        "cloze, 5-shot",
        "cloze, 0-shot",
        "51.0%",
        "44.1% to 57.8%",
        "+4.0%",
        "1.0% to 7.0%",
    ):
        assert text in page
    for text in (
        "p = 0.012",
        "p &lt; 0.0001",
        "25.0%",
        "30.0%",
        "18 documents",
        "A note &lt;&amp;&gt;",
    ):
        assert text in page
    assert "By a stated test." in page and 'href="#evaluation"' in page
    assert "sparse − dense" in page


def test_each_other_model_has_a_difference(tmp_path):
    """Of three models, one may have no paired values."""
    paired = {"dense": PAIRED, "narrow": {**PAIRED, "difference": -0.2}, "pruned": None}
    models = {name: {"value": 0.5, "error": 0.1} for name in ("sparse", *paired)}
    data = evaluation(row(models=models, paired=paired), models=models)
    (only,) = evaluation_table(data)
    assert [other["difference"] for other in only["differences"]] == ["+4.0%", "-20.0%", ""]
    write_report(report_sample.bare(evaluation=data), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert all(f"sparse − {name}" in page for name in paired) and "-20.0%" in page


def test_a_comparison_of_an_earlier_release_is_that_with_the_second_model():
    now = row(paired={"dense": PAIRED})
    assert evaluation(row()) == evaluation(now)
    assert evaluation(row(paired=None)) == evaluation(row(paired={"dense": None}))


def test_one_model_has_no_difference(tmp_path):
    single = row(models={"sparse": {"value": 0.5, "error": 0.1}}, paired=None)
    data = report_sample.bare(evaluation=evaluation(single, models=("sparse",)))
    write_report(data, tmp_path / "report.html")
    assert "sparse −" not in (tmp_path / "report.html").read_text()


def test_without_an_evaluation_there_is_no_section(tmp_path):
    write_report(report_sample.bare(), tmp_path / "report.html")
    assert 'id="evaluation"' not in (tmp_path / "report.html").read_text()
