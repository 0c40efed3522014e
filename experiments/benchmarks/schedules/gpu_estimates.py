"""What GPT-13B's products take on described GPUs, from their compiled programs.

For `schedule_bench`.  Every weight is compiled in a process of its own (`gpu_case`).
"""

from collections.abc import Iterator
from typing import Any

from sparse_dataflow.commands import measurement
from sparse_dataflow.compile.gpu_targets import TARGETS

from . import estimates, ptx
from .case import DENSE, Case
from .gpu_case import DTYPES

LIMITS = (
    "Read from programs compiled for described GPUs; nothing ran on one. Traffic counts each "
    "operand of each kernel once: caches may need more, and a kernel of a part of the blocks less. "
    "The bound is a roofline, of the stored blocks' FLOPs and of the traffic at the data sheet's "
    "rates, one kernel after another. XLA's own products are untuned, because tuning needs the "
    "GPU: registers, shape and stages will differ. cuBLAS shows none of them."
)

EVERY = tuple(kind for kind in TARGETS if kind != "h200")
"""The GPUs of the table; an H200 is an H100 with more memory."""

IMPLEMENTATIONS = {
    "grouped": ("monarch", EVERY),
    "xla": ("pixelfly", EVERY),
    "pallas_hopper": ("pixelfly", ("h100",)),
    "pallas_triton": ("pixelfly", ("a100", "l4", "b200")),
}
"""Module in `ops.block_sparse_matmul` -> its pattern, and the GPUs that it is compiled for."""


def estimate_gpus(options) -> None:
    """Compiles, prints and writes.

    Args:
      options: of `experiments.schedule_bench`, whose chips are GPUs.

    Raises:
      UserError: the CUDA wheels are not installed, or a weight does not compile.
    """
    ptx.assembler()
    plugin = estimates.version_of(estimates.CUDA[0])
    versions = f"jax {estimates.version_of('jax')}, {estimates.CUDA[0]} {plugin}"
    print(f"{LIMITS}\n{options.tokens} tokens; {versions}\n\n{_HEAD}", flush=True)
    rows = estimates.table(cases_of(options), options, row_of, _line)
    summary = list(summaries(rows))
    print("\nAll products together: traffic over what is needed, and roofline over dense's")
    for entry in summary:
        print(
            f"{entry['chip']:>5} {entry['implementation']:>14} block {entry['block']:>3}: "
            f"{entry['traffic']:5.2f} {entry['ratio']:5.2f}x"
        )
    facts = {"limits": LIMITS, estimates.CUDA[0]: plugin, "tokens": options.tokens}
    result = {**facts, "summary": summary, "rows": rows}
    measurement.keep(options.keep, "schedule_bench_gpu", "described GPUs", [result])


def cases_of(options) -> Iterator[tuple[str, Case]]:
    """Yields (projection, case) of a table, dense first on each GPU."""
    for chip in options.chips:
        names = [n for n in options.implementations if chip in IMPLEMENTATIONS.get(n, ("", ()))[1]]
        for name, block in [(DENSE, 0)] + [(n, b) for n in names for b in options.blocks]:
            pattern = IMPLEMENTATIONS[name][0] if name != DENSE else ""
            for projection in options.projections:
                case = estimates.case_of(
                    chip, name, pattern, projection, block, options.density, options.tokens
                )
                yield projection, case


def row_of(
    projection: str, case: Case, product: str, count: dict[str, Any], earlier: list[dict]
) -> dict[str, Any]:
    """Returns a row of the table.

    Args:
      projection: name of the weight.
      case: the weight and the GPU.
      product: one of `schedules.case.PRODUCTS`.
      count: its counts, of `schedules.gpu_case.measure`.
      earlier: earlier rows, with the dense one.

    Returns:
      The case, its counts, "traffic" (bytes moved over bytes needed), "bound_ms" (roofline) and
      "ratio" of the dense bound to this.
    """
    target = TARGETS[case.chip]
    bandwidth = target.bandwidth_gb * 1e9
    flops = 2 * case.tokens * case.in_features * case.out_features * case.density
    product_seconds = max(flops / (target.tflops * 1e12), count["product_bytes"] / bandwidth)
    row: dict[str, Any] = {
        **estimates.case_columns(projection, case, product),
        "dtype": DTYPES.get(case.chip, "bfloat16"),
        **count,
        "traffic": (count["product_bytes"] + count["other_bytes"]) / count["needed_bytes"],
        "bound_ms": 1e3 * (product_seconds + count["other_bytes"] / bandwidth),
    }
    keys = ("chip", "projection", "product")
    dense = next(
        (r for r in earlier if r["density"] == 1 and all(r[k] == row[k] for k in keys)), row
    )
    return {**row, "ratio": dense["bound_ms"] / row["bound_ms"]}


def summaries(rows: list[dict]) -> Iterator[dict]:
    """Yields traffic and ratio of all products together, per GPU, implementation and block."""
    for group, own in estimates.grouped(rows, "chip", "implementation", "block"):
        needed = sum(row["needed_bytes"] for row in own)
        bound = sum(row["bound_ms"] for row in own)
        yield {
            **group,
            "traffic": sum(row["traffic"] * row["needed_bytes"] for row in own) / needed,
            "ratio": sum(row["ratio"] * row["bound_ms"] for row in own) / bound,
            "temporary_bytes": max(row["temporary_bytes"] for row in own),
            "spills": sum(row["spills"] or 0 for row in own),
        }


_HEAD = (
    f"{'chip':>5} {'implementation':>14} {'projection':>10} {'block':>5} {'product':>7} "
    f"{'GEMMs':>5} {'others':>6} {'by':>12} {'shape':>16} {'stages':>6} {'registers':>9} "
    f"{'spills':>6} {'temporary':>9} {'traffic':>7} {'bound':>8} {'ratio':>6}"
)


def _line(row):
    known = {
        key: "-" if row[key] is None else row[key] for key in ("stages", "registers", "spills")
    }
    return (
        f"{row['chip']:>5} {row['implementation']:>14} {row['projection']:>10} {row['block']:>5} "
        f"{row['product']:>7} {row['gemms']:>5g} {row['others']:>6g} {row['source']:>12} "
        f"{', '.join(row['mma']) or '-':>16} {known['stages']:>6} {known['registers']:>9} "
        f"{known['spills']:>6} {row['temporary_bytes'] / 2**20:>5.0f} MiB {row['traffic']:>6.2f}x "
        f"{row['bound_ms']:>5.3f} ms {row['ratio']:>5.2f}x"
    )
