"""Estimated time of GPT-13B's products on described TPUs, from their compiled schedules.

For `schedule_bench`.  Every weight is compiled in a process of its own (`case`).  GPUs are
in `gpu_estimates`.
"""

import concurrent.futures
import functools
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import sparse_dataflow
from sparse_dataflow.commands import measurement
from sparse_dataflow.compile import topologies
from sparse_dataflow.compile.account import CLOCKS
from sparse_dataflow.compile.gpu_targets import TARGETS
from sparse_dataflow.core.layouts.patterns import legal_densities
from sparse_dataflow.files import derived
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.runs.run_config import SIZES

from . import case as schedule_case
from . import gpu_case as gpu_schedule_case
from . import mlp_case as mlp_schedule_case
from .case import DENSE, Case
from .mlp_case import FUSED

LIMITS = (
    "Estimates from compiled programs; nothing ran on a chip. Stalls are not counted: times are "
    "optimistic by 5% to 20%, ratios are good. HBM traffic is a separate bound."
)

IMPLEMENTATIONS = {"pallas_tpu": "pixelfly", "pallas_tpu_grouped": "monarch"}
"""Module in `ops.block_sparse_matmul` -> the pattern that it is compiled for."""

MLP, MLP_BLOCK = ("mlp_in", "mlp_out"), 128
"""Projections that FUSED computes, and the side of its blocks in the table."""

CUDA = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc")
"""Packages of the GPU compilers."""

TIMEOUT = 900
"""Seconds after which the compilation of one weight is given up."""


def estimate_tpus(options) -> None:
    """Compiles, prints and writes.

    Args:
      options: of `experiments.schedule_bench`.

    Raises:
      UserError: libtpu is not installed, or a weight does not compile.
    """
    if reason := topologies.missing_compiler(topologies.parse("v5e:2x2")):
        raise UserError(reason)
    versions = f"jax {version_of('jax')}, libtpu {version_of('libtpu')}"
    print(f"{LIMITS}\n{options.tokens} tokens, bfloat16; {versions}\n\n{_HEAD}", flush=True)
    rows = table(cases_of(options), options, row_of, _line)
    summary = list(summaries(rows))
    print("\nAll products together, over XLA dense (estimates; ideal: 1 / density)")
    for entry in summary:
        print(
            f"{entry['chip']:>4} {entry['implementation']:>18} block {entry['block']:>3} density "
            f"{entry['density']:<6g}: {entry['ratio']:5.2f}x"
        )
    facts = {"limits": LIMITS, "libtpu": version_of("libtpu"), "tokens": options.tokens}
    result = {**facts, "summary": summary, "rows": rows}
    measurement.keep(options.keep, "schedule_bench", "described TPUs", [result])


def table(
    cases: Iterable[tuple[str, Case]],
    options: Any,
    row: Callable[..., dict],
    line: Callable[[dict], str],
) -> list[dict]:
    """Compiles the cases, as many at a time as `options.jobs`; prints and returns their rows.

    Args:
      cases: (projection, case) of each weight.
      options: of `experiments.schedule_bench`.
      row: makes a row, as `row_of` does.
      line: a row as text.
    """
    cases = list(cases)
    rows: list[dict] = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        counted = pool.map(
            functools.partial(cached_counts, cache=options.cache), [case for _, case in cases]
        )
        for (projection, case), counts in zip(cases, counted, strict=True):
            for product, count in counts.items():
                rows.append(row(projection, case, product, count, rows))
                print(line(rows[-1]), flush=True)
    return rows


def cases_of(options) -> Iterator[tuple[str, Case]]:
    """Yields (projection, case) of a table, dense first on each chip."""
    names = [name for name in options.implementations if name in IMPLEMENTATIONS]
    size = options.density, options.tokens
    for chip in options.chips:
        weights = [(DENSE, 0)] + [(name, block) for name in names for block in options.blocks]
        for name, block in weights:
            pattern = IMPLEMENTATIONS.get(name, "")
            for projection in options.projections:
                yield projection, case_of(chip, name, pattern, projection, block, *size)
        fused = FUSED in options.implementations and MLP_BLOCK in options.blocks
        if fused and set(MLP) <= set(options.projections):
            yield "mlp", case_of(chip, FUSED, "monarch", MLP[0], MLP_BLOCK, *size)


def case_of(
    chip: str, name: str, pattern: str, projection: str, block: int, density: float, tokens: int
) -> Case:
    """Returns the case of a GPT-13B projection, at the largest legal density up to `density`.

    Args:
      chip: a TPU, or a GPU of `gpu_estimates`.
      name: DENSE, FUSED or another implementation.
      pattern: of the layout; ignored for DENSE.
      projection: one of the 13B; mlp_in for FUSED.
      block: side of a block; ignored for DENSE.
      density: stored fraction, at most; ignored for DENSE.
      tokens: rows of x.
    """
    shape = SIZES["13b"].projection_shape(projection)
    if name == DENSE:
        return Case(chip, DENSE, "", *shape, 0, 1.0, tokens)
    legal = legal_densities(*shape, block)
    density = max((value for value in legal if value <= density * (1 + 1e-6)), default=min(legal))
    return Case(chip, name, pattern, *shape, block, density, tokens)


def cached_counts(case: Case, cache: str) -> Mapping[str, dict[str, int]]:
    """Returns the counts of a case, from the cache or from a new process of its module.

    Args:
      case: the weight and the chip.
      cache: folder of the cached counts, derived files; "" caches nothing.

    Raises:
      UserError: the process fails.
    """
    compute = functools.partial(_counts, case)
    return derived.value(Path(cache), "counts", origin(case), compute) if cache else compute()


def _counts(case):
    module = gpu_schedule_case if case.chip in TARGETS else schedule_case
    module = mlp_schedule_case if case.implementation == FUSED else module
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", module.__name__, json.dumps(vars(case))]
        done = subprocess.run(
            [*command, f"{folder}/schedules"], capture_output=True, text=True, timeout=TIMEOUT
        )
    if done.returncode:
        raise UserError(f"{case} does not compile: {done.stderr.strip()[-400:]}")
    return json.loads(done.stdout.splitlines()[-1])


def origin(case: Case) -> dict[str, Any]:
    """Returns everything that the counts of a case depend on."""
    gpu = case.chip in TARGETS
    packages = ("jax", "jaxlib", *(CUDA if gpu else ("libtpu",)))
    sources = () if case.implementation == DENSE else _gpu_sources() if gpu else _sources()
    return {
        "case": case,
        "versions": [version_of(package) for package in packages],
        "sources": [derived.digest(source) for source in sources],
    }


@functools.cache
def _sources():
    tpu = ("chips/tpu/**/*.py", "core/ops/*/tuned/*tpu*")
    shared = ("core/ops/*.py", "core/ops/*/*grouped*.py", "core/ops/*/fused.py")
    return _files("schedule", "core/layouts/*.py", *tpu, *shared)


@functools.cache
def _gpu_sources():
    reader = ("compile/hlo.py", "compile/gpu_targets.py")
    products = ("core/ops/*.py", "core/ops/block_sparse_matmul/**/*", "core/layouts/*.py")
    chips = ("chips/hopper/*.py", "chips/triton/*.py")
    return _files("ptx", *reader, *products, *chips)


def _files(reader, *patterns):
    """Files of the package of these patterns, and the reader and the cases beside this file."""
    package = Path(sparse_dataflow.__file__).parent
    paths = {path for pattern in patterns for path in package.glob(pattern)}
    folder = Path(__file__).parent
    paths |= {folder / f"{reader}.py", *folder.glob("*case.py")}
    return sorted(path for path in paths if path.suffix in (".py", ".json"))


def row_of(
    projection: str, case: Case, product: str, count: dict[str, int], earlier: list[dict]
) -> dict[str, Any]:
    """Returns a row of the table.

    Args:
      projection: name of the weight.
      case: the weight and the chip.
      product: one of `schedules.case.PRODUCTS`.
      count: its counts.
      earlier: earlier rows, with the dense one.

    Returns:
      The case, its counts, and estimates: "ms", "mxu" and "hbm" (fractions of this time that the
      matrix units need for the stored FLOPs, and HBM for the bytes, each at its peak), and "ratio"
      of dense to this time.  FUSED is compared with the six dense products, without their GELU.
    """
    chip = _chip(case.chip)
    flops, bandwidth = chip.rates("bfloat16")
    cycles = count["cycles"] + count["xla_cycles"]
    hbm = count["hbm_bytes"] / bandwidth
    seconds = max(cycles / CLOCKS[case.chip], hbm)
    products = 3 * len(MLP) if case.implementation == FUSED else 1
    stored = 2 * case.tokens * case.in_features * case.out_features * case.density * products
    row = {**case_columns(projection, case, product), **count, "ms": 1e3 * seconds}
    dense = [r["ms"] for r in earlier if _same_product(r, row) and r["density"] == 1]
    return {
        **row,
        "mxu": stored / flops / seconds,
        "hbm": hbm / seconds,
        "ratio": sum(dense or [row["ms"]]) / row["ms"],
    }


def case_columns(projection: str, case: Case, product: str) -> dict[str, Any]:
    """Returns the part of a row that says what was compiled."""
    return {
        "chip": case.chip,
        "implementation": case.implementation,
        "projection": projection,
        "product": product,
        "block": case.block,
        "pattern": case.pattern,
        "density": case.density,
    }


def grouped(rows: list[dict], *keys: str) -> Iterator[tuple[dict, list[dict]]]:
    """Yields (values of the keys, the rows that have them), in order."""
    values_of = lambda row: tuple(row[key] for key in keys)  # noqa: E731
    for values in dict.fromkeys(map(values_of, rows)):
        yield dict(zip(keys, values)), [row for row in rows if values_of(row) == values]


def summaries(rows: list[dict]) -> Iterator[dict]:
    """Yields the ratio over dense of all products together, per chip, implementation and block."""
    compiled = [row for row in rows if row["implementation"] != DENSE]
    for group, own in grouped(compiled, "chip", "implementation", "block", "density"):
        time = sum(row["ms"] for row in own)
        yield {
            **group,
            "ratio": sum(row["ms"] * row["ratio"] for row in own) / time,
            **{
                product: [row["mxu"] for row in own if row["product"] == product]
                for product in schedule_case.PRODUCTS
            },
        }


def _same_product(row, other):
    if other["implementation"] == FUSED:
        return row["chip"] == other["chip"] and row["projection"] in MLP
    return all(row[key] == other[key] for key in ("chip", "projection", "product"))


def _chip(kind: str) -> Chip:
    return topologies.parse(f"{kind}:{schedule_case.SLICES[kind]}").chip


def version_of(package: str) -> str:
    """Returns the installed version of a package; "none" without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


_HEAD = (
    f"{'chip':>4} {'implementation':>18} {'projection':>10} {'block':>5} {'product':>7} "
    f"{'density':>7} {'cycles':>10} {'MXU':>5} {'HBM':>5} {'spills':>6} {'ms':>8} {'ratio':>6}"
)


def _line(row):
    return (
        f"{row['chip']:>4} {row['implementation']:>18} {row['projection']:>10} {row['block']:>5} "
        f"{row['product']:>7} {row['density']:>7g} {row['cycles'] + row['xla_cycles']:>10,} "
        f"{row['mxu']:>5.0%} {row['hbm']:>5.0%} {row['spills']:>6} {row['ms']:>8.3f} "
        f"{row['ratio']:>5.2f}x"
    )
