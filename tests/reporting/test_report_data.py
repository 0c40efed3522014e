import json
import math

import numpy as np
import pytest
import report_sample
from report_sample import bare

from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.reporting.report_data import LayoutData, ReportData


@pytest.mark.parametrize("data", [report_sample.report(), report_sample.report("dense"), bare()])
def test_report_json_round_trips(data):
    text = json.dumps(data.to_json(), allow_nan=False)
    assert ReportData.from_json(json.loads(text)) == data


def test_numpy_values_and_non_finite_numbers_convert_to_json():
    variant = report_sample.variant("dense", loss=np.float32(2.5), mfu=math.inf, history=[])
    layout = LayoutData("qkv", 0, 2, 2, 64, np.array([[0, 1]]), np.int64(1), 1, True)
    result = bare(variants=[variant], layouts=[layout]).to_json()
    json.dumps(result, allow_nan=False)
    assert result["variants"][0]["loss"] == 2.5 and result["variants"][0]["mfu"] is None
    assert result["layouts"][0]["mask"] == [[0, 1]]


def without(data: dict, key: str) -> dict:
    return {k: v for k, v in data.items() if k != key}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: without(d, "command"), "command"),
        (lambda d: {**d, "colour": 1}, "colour"),
        (lambda d: {**d, "variants": []}, "dense, narrow, sparse"),
        (lambda d: {**d, "variants": d["variants"][:1] * 2}, "different variants"),
        (lambda d: {**d, "variants": [{**d["variants"][0], "name": "third"}]}, "third"),
        (lambda d: {**d, "variants": [without(d["variants"][0], "loss")]}, "loss"),
        (lambda d: {**d, "variants": ["dense"]}, "must be a mapping"),
        (lambda d: [d], "list"),
    ],
)
def test_invalid_report_data_raises(change, message):
    with pytest.raises(json_files.MALFORMED, match=message):
        ReportData.from_json(change(bare().to_json()))


def test_a_block_outside_the_grid_raises():
    with pytest.raises(UserError, match="outside its grid of 2 × 2"):
        LayoutData("qkv", 0, 2, 2, 64, [[0, 2]], 1, 1, True)
