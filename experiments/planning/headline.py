"""The speed of the sparse 13B step beside three dense rivals, from kept results.

The table of docs/evidence/performance.md.  A time is measured (`step_bench`), or estimated from a
compiled program (`compile_plan --account`).
"""

from pathlib import Path

from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError

RESULTS = Path(__file__).parents[1] / "results"

PUBLISHED_MFU = (0.49, 0.58)
"""Published MFU of dense models of 7 to 16 billion parameters on H100: Megatron-core 16B 49%,
MaxText Llama 2 7B 50%, NeMo 15B about 58% by its tokens and FLOPs."""


def rows() -> list[tuple[str, str, str, str]]:
    """Returns (rival, dense step, sparse step, ratio) of each rival, with a head.

    Raises:
      UserError: there are no results here.
    """
    if not RESULTS.is_dir():
        raise UserError("--headline reads experiments/results, which only a clone has.")
    measured = json_files.load(RESULTS / "step_bench_h200_13b.json")
    dense, sparse = measured["rows"]["dense"], measured["rows"]["sparse"]
    best = {
        kind: json_files.load(RESULTS / f"account/13b_{kind}_h200-1_account.json")
        for kind in ("dense", "density-0-125")
    }
    dense_ms, sparse_ms = (1e3 * each["estimated_seconds"] for each in best.values())
    # A step of a published MFU takes as many FLOPs as ours.
    slow, fast = (dense["step_ms"] * dense["mfu"] / mfu for mfu in PUBLISHED_MFU)
    return [
        ("dense rival", "dense step", "sparse step", "ratio"),
        (
            "the same settings, full remat; measured",
            f"{dense['step_ms']:.0f} ms",
            f"{sparse['step_ms']:.0f} ms",
            f"**{measured['ratio']:.2f}**",
        ),
        (
            "each at its best on one chip: dense full remat, sparse none; estimated",
            f"{dense_ms:.0f} ms",
            f"{sparse_ms:.0f} ms",
            f"{dense_ms / sparse_ms:.1f}",
        ),
        (
            f"published dense steps, {PUBLISHED_MFU[0]:.0%} to {PUBLISHED_MFU[1]:.0%} MFU "
            f"(ours {dense['mfu']:.0%}), against the measured sparse step",
            f"{fast:.0f} to {slow:.0f} ms",
            f"{sparse['step_ms']:.0f} ms",
            f"{fast / sparse['step_ms']:.1f} to {slow / sparse['step_ms']:.1f}",
        ),
        (
            "the same, against the estimated sparse step",
            f"{fast:.0f} to {slow:.0f} ms",
            f"{sparse_ms:.0f} ms",
            f"{fast / sparse_ms:.1f} to {slow / sparse_ms:.1f}",
        ),
    ]


def table() -> str:
    """Returns `rows` as a table of Markdown."""
    head, *body = (f"| {' | '.join(row)} |" for row in rows())
    return "\n".join([head, "|---|---|---|---|", *body])
