"""The page of performance has the headline that the kept results give."""

import json

import pytest
from places import ROOT

from experiments.planning import headline

PAGE = ROOT / "docs/evidence/performance.md"


def test_the_page_has_the_table_of_the_kept_results():
    assert headline.table() in PAGE.read_text()


@pytest.mark.parametrize(("dense_s", "sparse_s"), [(1.0, 0.5), (0.8, 0.2), (0.743, 0.1)])
def test_rows_follow_from_the_results(tmp_path, monkeypatch, dense_s, sparse_s):
    row = {"step_ms": 600.0, "mfu": 0.29}
    measured = {"ratio": 3.0, "rows": {"dense": row, "sparse": {**row, "step_ms": 200.0}}}
    (tmp_path / "account").mkdir()
    (tmp_path / "step_bench_h200_13b.json").write_text(json.dumps(measured))
    for kind, seconds in (("dense", dense_s), ("density-0-125", sparse_s)):
        path = tmp_path / f"account/13b_{kind}_h200-1_account.json"
        path.write_text(json.dumps({"estimated_seconds": seconds}))
    monkeypatch.setattr(headline, "RESULTS", tmp_path)
    _, same, best, published, estimated = headline.rows()
    assert same[1:] == ("600 ms", "200 ms", "**3.00**")
    assert best[3] == f"{dense_s / sparse_s:.1f}"
    # At twice our MFU the dense step takes half the time.
    assert published[1] == "300 to 355 ms" and published[3] == "1.5 to 1.8"
    assert estimated[3].startswith(f"{0.3 / sparse_s:.1f} to ")
