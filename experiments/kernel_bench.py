"""The block-sparse product beside the dense one, forward and backward, paired in one run.

For each shape: y = xW, dx = dy Wᵀ and dW, dense through XLA and block-sparse through each
implementation; inputs are normal with unit variance. Prints medians and the ratio dense / sparse of
each round (median and quartiles), and keeps them as JSON.

    python -m experiments.kernel_bench
    python -m experiments.kernel_bench --dtype=bfloat16 --patterns=pixelfly,random
"""

from experiments import flags
from experiments.command_line import Flag, Group

IMPLEMENTATIONS = ("xla", "xla_static")


def _patterns():
    from sparse_dataflow.sparsity.patterns import PATTERNS

    return tuple(name for name in PATTERNS if name != "dense")


_FRACTION = ("in (0, 1]", lambda d: 0 < d <= 1)
GROUPS = (
    Group(
        "Benchmark",
        "what is timed",
        (
            Flag("shapes", "text", "512x2048,1024x4096,4096x1024,2048x8192", "INxOUT, ..."),
            Flag("tokens", "integer", 2048, "Rows of x.", legal=("1 or more", lambda n: n > 0)),
            Flag("density", "number", 0.125, "Stored fraction.", legal=_FRACTION),
            Flag("block", "integer", 64, "Side of a block.", legal=("1 or more", lambda n: n > 0)),
            Flag("patterns", "list", "monarch,pixelfly,random", "Layouts.", _patterns),
            Flag("implementations", "list", "all", "Sparse ones.", lambda: IMPLEMENTATIONS),
            Flag("dtype", "choice", "float32", "Of x and W.", lambda: ("float32", "bfloat16")),
            Flag("rounds", "integer", 9, "Timed rounds.", legal=("1 or more", lambda n: n > 0)),
            Flag("keep", "text", "experiments/results", "Folder for the JSON; empty keeps none."),
        ),
    ),
)


def main(values):
    """Runs the benchmark; see the module docstring."""
    from sparse_dataflow.execution.host_memory import keep_freed_memory

    keep_freed_memory()
    from experiments import measurement
    from sparse_dataflow.planning import hardware

    layouts = _layouts(values)
    chip = hardware.detect([values.dtype])
    rows = []
    print(
        f"{chip.name}; {values.tokens} tokens, {values.dtype}, density {values.density:g}, "
        f"block {values.block}; forward + backward, medians of {values.rounds} rounds\n"
    )
    print(
        f"{'shape':>11} {'pattern':>10} {'implementation':>14} {'dense ms':>9} {'sparse ms':>9} "
        f"{'ratio':>6} {'quartiles':>11} {'compile s':>9}"
    )
    for pattern, layout in layouts:
        for row in _measure(pattern, layout, values):
            rows.append(row)
            print(
                f"{row['shape']:>11} {pattern:>10} {row['implementation']:>14} "
                f"{row['dense_ms']:9.1f} {row['sparse_ms']:9.1f} {row['ratio']:6.2f} "
                f"{row['ratio_low']:5.2f}-{row['ratio_high']:5.2f} "
                f"{row['compile_seconds']:9.2f}",
                flush=True,
            )
    if values.keep:
        result = {**measurement.provenance(chip.name), "inputs": "normal, unit variance"}
        settings = {name: values[name].value for name in ("tokens", "density", "block", "dtype")}
        path = measurement.keep(
            values.keep,
            f"kernel_bench_{chip.name}_{values.dtype}",
            {**result, **settings, "rows": rows},
        )
        print(f"\nkept in {path}")


def _layouts(values):
    """[(pattern, layout)] of every shape, made before anything is timed: one may be refused."""
    from sparse_dataflow.sparsity.patterns import make_layout

    return [
        (pattern, make_layout(pattern, *shape, values.block, values.density))
        for shape in _shapes(values.shapes)
        for pattern in values.patterns
    ]


def _shapes(text):
    from sparse_dataflow.errors import UserError

    try:
        shapes = [tuple(map(int, shape.split("x"))) for shape in text.split(",")]
        if any(len(shape) != 2 or min(shape) < 1 for shape in shapes):
            raise ValueError
    except ValueError:
        raise UserError(f"--shapes={text} is not a list such as 512x2048,1024x4096.") from None
    return shapes


def _measure(pattern, layout, values):
    import time

    import jax
    import jax.numpy as jnp
    import numpy as np

    from experiments import measurement
    from sparse_dataflow.kernels.block_sparse_matmul.api import block_sparse_matmul

    in_features, out_features = layout.in_features, layout.out_features
    tables = layout.tables()
    rng = np.random.default_rng(0)
    draw = lambda *s: jnp.asarray(rng.normal(size=s), values.dtype)  # noqa: E731
    x, dy = draw(values.tokens, in_features), draw(values.tokens, out_features)
    kernel = draw(in_features, out_features)
    stored = draw(layout.nnz, layout.block, layout.block)

    def program(product, weight, *data):
        @jax.jit
        def both(x, weight, dy, *data):
            y, pull = jax.vjp(lambda x, w: product(x, w, *data), x, weight)
            return y, pull(dy)

        start = time.perf_counter()
        jax.block_until_ready(both(x, weight, dy, *data))
        seconds = time.perf_counter() - start
        return (lambda: both(x, weight, dy, *data)), seconds

    runs = {"dense": program(lambda x, w: x @ w, kernel)}
    if "xla" in values.implementations:
        # As arguments, so that tables are data in this program as in one whose layout changes.
        runs["xla"] = program(
            lambda x, w, tables: block_sparse_matmul(x, w, tables, "xla"), stored, tables
        )
    if "xla_static" in values.implementations:
        runs["xla_static"] = program(
            lambda x, w: block_sparse_matmul(x, w, tables, "xla_static"), stored
        )
    seconds = measurement.paired_seconds(
        {name: run for name, (run, _) in runs.items()}, values.rounds
    )
    for name in values.implementations:
        ratio, low, high = measurement.paired_ratio(seconds["dense"], seconds[name])
        yield {
            "shape": f"{in_features}x{out_features}",
            "pattern": pattern,
            "implementation": name,
            "dense_ms": 1e3 * float(np.median(seconds["dense"])),
            "sparse_ms": 1e3 * float(np.median(seconds[name])),
            "ratio": ratio,
            "ratio_low": low,
            "ratio_high": high,
            "compile_seconds": runs[name][1],
        }


if __name__ == "__main__":
    flags.run(main, __doc__, GROUPS)
