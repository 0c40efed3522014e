"""The TPU kernels do not take more estimated cycles than the kept table says.

Cycles are those of compiled programs: deterministic, but only for one version of the compiler.
"""

import importlib.metadata
import json

import pytest
from places import ROOT

from experiments.benchmarks.schedules import estimates
from experiments.benchmarks.schedules.case import DENSE
from experiments.benchmarks.schedules.mlp_case import FUSED

pytest.importorskip("libtpu", reason="compiling for a TPU needs make aot-tpu")
pytestmark = pytest.mark.usefixtures("optimized")

KEPT = json.loads((ROOT / "experiments/results/schedule_bench.json").read_text())
CASES = [
    (chip, name, 128, "attn_out")
    for chip in ("v5e", "v6e")
    for name in estimates.IMPLEMENTATIONS
    if any(row["implementation"] == name for row in KEPT["rows"])
]
CASES += [("v6e", FUSED, 128, "mlp")]


@pytest.fixture(autouse=True)
def pinned():
    for package, version in (("jax", KEPT["versions"]["jax"]), ("libtpu", KEPT["libtpu"])):
        installed = importlib.metadata.version(package)
        if installed != version:
            pytest.skip(f"recorded with {package} {version}; this is {installed}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_cycles_do_not_grow(case):
    chip, name, block, projection = case
    rows = [
        row
        for row in KEPT["rows"]
        if (row["chip"], row["implementation"], row["block"], row["projection"]) == case
    ]
    ((density, pattern),) = {(row["density"], row["pattern"]) for row in rows}
    assert pattern == estimates.IMPLEMENTATIONS.get(name, "monarch") and name != DENSE
    weight = "mlp_in" if name == FUSED else projection
    counts = estimates.cached_counts(
        estimates.case_of(chip, name, pattern, weight, block, density, KEPT["tokens"]), cache=""
    )
    assert counts.keys() == {row["product"] for row in rows}
    for row in rows:
        assert counts[row["product"]]["cycles"] <= row["cycles"], row["product"]
