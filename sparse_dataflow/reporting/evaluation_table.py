"""Table of an evaluation, for the report and for a terminal."""

from typing import Any

from sparse_dataflow.reporting.quantities import MISSING
from sparse_dataflow.reporting.report_data import EvaluationData


def evaluation_table(evaluation: EvaluationData) -> list[dict[str, Any]]:
    """Returns the rows of the evaluation table.

    A difference is better or worse for the first model only where its 95% interval excludes zero.
    """
    rows = []
    for row in evaluation.rows:
        metric = row["metric"].partition(",")[0]  # A filter of the outputs may follow.
        unit = ".1%" if metric in ("acc", "acc_norm", "exact_match") else ".3f"
        text = lambda value, unit=unit: MISSING if value is None else f"{value:{unit}}"  # noqa: E731
        compared = row["paired"] or dict.fromkeys(("difference", "low", "high", "p"))
        low, high, p = (compared[name] for name in ("low", "high", "p"))
        better, interval = None, ""
        if low is not None:
            interval = f"{text(low)} to {text(high)}"
            if low * high > 0:
                better = (low < 0) == row["lower_is_better"]
        models = [row["models"].get(name, {}) for name in evaluation.models]
        difference = compared["difference"]
        rows.append({
            "task": row["task"],
            "shots": "" if row["shots"] is None else f"{row['shots']}-shot",
            "metric": row["metric"],
            "items": f"{row['items']:,}",
            "documents": f"{row['documents']:,}",
            "cells": [
                (text(model.get("value")),
                 f"± {text(model['error'])}" if model.get("error") is not None else "")
                for model in models
            ],
            "baselines": [
                text(v) for v in (row["chance"], *map(row["baselines"].get, ("unigram", "bigram")))
            ],
            "difference": "" if difference is None else text(difference, f"+{unit}"),
            "interval": interval,
            "p": "" if p is None else f"p = {p:.2g}" if p >= 1e-4 else "p < 0.0001",
            "better": better,
        })  # fmt: skip
    return rows
