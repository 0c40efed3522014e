"""The GPU kernels take what the kept table says: matrix instructions, stages, spills, traffic.

These are of compiled programs: deterministic, but only for one version of the compilers.
"""

import importlib.metadata
import json

import pytest
from places import ROOT

from experiments.benchmarks.schedules import estimates, gpu_estimates
from experiments.schedule_bench import GPUS, Options

pytest.importorskip("jax_cuda13_plugin", reason="compiling for a GPU needs make aot-gpu")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized")]

KEPT = json.loads((ROOT / "experiments/results/schedule_bench_gpu.json").read_text())
OPTIONS = Options(chips=GPUS, blocks=(128,), projections=("attn_out",), tokens=KEPT["tokens"])
CASES = [
    case
    for _, case in gpu_estimates.cases_of(OPTIONS)
    if (case.chip, case.implementation)
    in [("t4", "grouped"), ("a100", "grouped"), ("l4", "pallas_triton"), ("h100", "pallas_hopper")]
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.chip}-{case.implementation}")
def test_kernels_take_what_is_kept(case):
    plugin = estimates.CUDA[0]
    for package, version in (("jax", KEPT["versions"]["jax"]), (plugin, KEPT[plugin])):
        if importlib.metadata.version(package) != version:
            pytest.skip(f"recorded with {package} {version}")
    for product, counts in estimates.cached_counts(case, cache="").items():
        (row,) = (
            row
            for row in KEPT["rows"]
            if (row["chip"], row["implementation"], row["projection"], row["product"])
            == (case.chip, case.implementation, "attn_out", product)
        )
        assert {key: row[key] for key in counts} == counts
