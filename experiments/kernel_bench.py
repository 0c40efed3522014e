"""The block-sparse product beside the dense one, each of its three products, paired in one run.

For each shape: y = xW, dx = dy Wᵀ and dW, dense through XLA (on a GPU: cuBLAS) and block-sparse
through each implementation that runs here; inputs are normal with unit variance. Prints medians,
the ratio dense / sparse of each round (median and quartiles), TFLOP/s at the stored blocks, and
which part of the ideal (1 / density) the ratio is: the same number is the rate at the stored blocks
over the dense rate. Results are kept as JSON after every shape.

On an accelerator "auto" means GPT-13B's four projections in bfloat16 at blocks of 64 and 128,
densities from 1/2 to 1/16 and 2048 to 16384 tokens; on a CPU, four laptop shapes.

    python -m experiments.kernel_bench
    python -m experiments.kernel_bench --shapes=13b --tokens=2048 --densities=0.125 --blocks=128
    python -m experiments.kernel_bench --dtype=bfloat16 --patterns=pixelfly,random

With --tune nothing is compared: the tile sizes of each product are moved, one at a time, to the
fastest that this device holds, and kept in the package, where the kernels look first.

    python -m experiments.kernel_bench --tune
"""

import functools
from collections.abc import Callable

from experiments import flags
from experiments.command_line import AT_LEAST_ONE, Flag, Group

CPU = {
    "shapes": "512x2048,1024x4096,4096x1024,2048x8192",
    "tokens": "2048",
    "densities": "0.125",
    "blocks": "64",
    "patterns": ("monarch", "pixelfly", "random"),
    "dtype": "float32",
}
ACCELERATOR = {
    "shapes": "13b",
    "tokens": "2048,4096,8192,16384",
    "densities": "0.5,0.25,0.125,0.0625",
    "blocks": "64,128",
    "patterns": ("monarch",),
    "dtype": "bfloat16",
}
IMPLEMENTATIONS = {
    "cpu": ("xla", "xla_static"),
    "gpu": ("xla", "xla_static", "pallas_hopper"),
    "tpu": ("xla", "xla_static", "pallas_tpu"),
}
ENOUGH_SECONDS = 0.01
"""What is timed at once: many calls of a short program, so that starting it costs nothing."""


def _patterns():
    from sparse_dataflow.sparsity.patterns import PATTERNS

    return ("auto", *(name for name in PATTERNS if name != "dense"))


def _products():
    from experiments.kernel_programs import PRODUCTS

    return PRODUCTS


def _implementations():
    return tuple(dict.fromkeys(name for names in IMPLEMENTATIONS.values() for name in names))


GROUPS = (
    Group(
        "Benchmark",
        "what is timed",
        (
            Flag("shapes", "text", "auto", "INxOUT, ... or a scale's four projections: 13b."),
            Flag("tokens", "text", "auto", "Rows of x: 2048,4096."),
            Flag("densities", "text", "auto", "Stored fractions: 0.5,0.125."),
            Flag("blocks", "text", "auto", "Sides of a block: 64,128."),
            Flag("products", "list", "all", "Products, and all in one program.", _products),
            Flag("patterns", "list", "auto", "Layouts.", _patterns),
            Flag("implementations", "list", "all", "Sparse ones.", _implementations),
            Flag("peers", "switch", "no", "Installed peers, forward."),
            Flag("dtype", "choice", "auto", "Of x, W.", ("auto", "float32", "bfloat16")),
            Flag("rounds", "integer", 9, "Timed rounds.", legal=AT_LEAST_ONE),
            Flag("tune", "switch", "no", "Find tile sizes instead."),
            Flag("tuned", "text", "", "Folder for tile sizes; empty: the package's, to be used."),
            Flag("keep", "text", "experiments/results", "Folder for the JSON; empty keeps none."),
        ),
    ),
)


def main(values):
    """Runs the benchmark; see the module docstring."""
    from sparse_dataflow.hardware.host_memory import keep_freed_memory

    keep_freed_memory()
    import jax

    from experiments import measurement
    from sparse_dataflow.hardware import detect as hardware

    platform = jax.default_backend()
    settings = _settings(values, CPU if platform == "cpu" else ACCELERATOR)
    runnable = IMPLEMENTATIONS.get(platform, ("xla",))
    settings["implementations"] = [n for n in values.implementations if n in runnable]
    # One may be refused: all are made before anything is timed.
    layouts = _layouts(settings)
    if values.tune == "yes":
        from experiments import kernel_tuning

        folder = kernel_tuning.run(settings, layouts, values.rounds, values.tuned)
        print(f"\nkept in {folder}")
        return
    chip = hardware.detect([settings["dtype"]])
    print(
        f"{chip.name}; {settings['dtype']}, normal inputs, medians of {values.rounds} rounds\n\n"
        f"{'shape':>11} {'tokens':>6} {'density':>7} {'block':>5} {'pattern':>9} "
        f"{'product':>16} {'implementation':>14} {'dense ms':>9} {'sparse ms':>9} {'ratio':>6} "
        f"{'quartiles':>11} {'of ideal':>8} {'TFLOP/s':>8} {'compile s':>9}"
    )
    result = {
        "inputs": "normal, unit variance",
        "dtype": settings["dtype"],
        "rows": [],
    }
    for shape in settings["shapes"]:
        for tokens in settings["tokens"]:
            for row in _measure(shape, tokens, layouts[shape], settings, values.rounds):
                result["rows"].append(row)
                print(_line(row), flush=True)
            if values.keep:  # After every shape, for a benchmark that is stopped.
                name = f"kernel_bench_{chip.name}_{settings['dtype']}"
                path = measurement.write(values.keep, name, chip.name, result)
    if values.keep:
        print(f"\nkept in {path}")


def _settings(values, default):
    """Flags as lists of numbers and names, "auto" replaced."""
    from sparse_dataflow.files.errors import UserError

    chosen = {name: values[name].value for name in default}
    if "auto" in chosen["patterns"] and len(chosen["patterns"]) > 1:
        raise UserError("--patterns mixes auto with names; give one or the other.")
    for name, value in chosen.items():
        if value in ("auto", ("auto",)):
            chosen[name] = default[name]
    chosen["products"] = values.products
    chosen["shapes"] = _shapes(chosen["shapes"])
    chosen["tokens"] = _numbers("tokens", chosen["tokens"], int, "2048,4096")
    chosen["blocks"] = _numbers("blocks", chosen["blocks"], int, "64,128")
    chosen["densities"] = _numbers("densities", chosen["densities"], float, "0.5,0.125")
    return {**chosen, "peers": values.peers == "yes"}


def _numbers(name, text, kind, example):
    from sparse_dataflow.files.errors import UserError

    try:
        numbers = [kind(part) for part in text.split(",")]
        if any(not 0 < number < float("inf") for number in numbers):
            raise ValueError
    except ValueError:
        raise UserError(f"--{name}={text} is not a list such as {example}.") from None
    return numbers


def _shapes(text):
    from sparse_dataflow.config.model import PROJECTIONS
    from sparse_dataflow.config.presets import SIZES

    from sparse_dataflow.files.errors import UserError

    if text in SIZES:
        return [SIZES[text].projection_shape(projection) for projection in PROJECTIONS]
    try:
        shapes = [tuple(map(int, shape.split("x"))) for shape in text.split(",")]
        if any(len(shape) != 2 or min(shape) < 1 for shape in shapes):
            raise ValueError
    except ValueError:
        raise UserError(
            f"--shapes={text} is not a list such as 512x2048,1024x4096, nor one of "
            f"{', '.join(SIZES)}."
        ) from None
    return shapes


def _layouts(settings):
    """{(in, out): [(pattern, density, layout)]}."""
    from sparse_dataflow.sparsity.patterns import make_layout

    return {
        shape: [
            (pattern, density, make_layout(pattern, shape[0], shape[1], block, density))
            for block in settings["blocks"]
            for density in settings["densities"]
            for pattern in settings["patterns"]
        ]
        for shape in settings["shapes"]
    }


def _measure(shape, tokens, layouts, settings, rounds):
    """Rows of one shape: the dense product is timed anew, in turn, beside every layout."""
    from experiments import kernel_peers, kernel_programs, measurement
    from sparse_dataflow.files.errors import UserError, first_line

    operands = kernel_programs.Operands.draw(shape[0], shape[1], tokens, settings["dtype"])
    for product in settings["products"]:
        dense = kernel_programs.dense(product, operands)
        for pattern, density, layout in layouts:
            case = kernel_programs.Case(layout, tokens, settings["dtype"], product)
            makers: dict[str, Callable[[], kernel_programs.Program]] = {
                name: functools.partial(kernel_programs.block_sparse, case, operands, name)
                for name in settings["implementations"]
            }
            if settings["peers"] and product == "forward":
                makers |= dict(kernel_peers.available(case, operands))
            programs = {}
            for name, make in makers.items():
                try:
                    programs[name] = make()
                except (UserError, RuntimeError, NotImplementedError) as refusal:
                    said = first_line(refusal)
                    print(f"{shape[0]}x{shape[1]} {product} {name} is left out: {said}")
            seconds = measurement.paired_seconds(
                {"dense": dense.run, **{name: p.run for name, p in programs.items()}},
                rounds,
                ENOUGH_SECONDS,
            )
            for name, program in programs.items():
                row = _row(case, pattern, density, name, seconds["dense"], seconds[name])
                yield {**row, "compile_seconds": program.compile_seconds}


def _row(case, pattern, density, implementation, dense, sparse):
    import numpy as np

    from experiments import measurement

    ratio, low, high = measurement.paired_ratio(dense, sparse)
    layout = case.layout
    return {
        "shape": f"{layout.in_features}x{layout.out_features}",
        "tokens": case.tokens,
        "density": density,
        "block": layout.block,
        "pattern": pattern,
        "product": case.product,
        "implementation": implementation,
        "dense_ms": 1e3 * float(np.median(dense)),
        "sparse_ms": 1e3 * float(np.median(sparse)),
        "ratio": ratio,
        "ratio_low": low,
        "ratio_high": high,
        "of_ideal": ratio * case.stored_flops / case.dense_flops,
        "dense_tflops": case.dense_flops / float(np.median(dense)) / 1e12,
        "stored_tflops": case.stored_flops / float(np.median(sparse)) / 1e12,
    }


def _line(row):
    return (
        f"{row['shape']:>11} {row['tokens']:>6} {row['density']:>7g} {row['block']:>5} "
        f"{row['pattern']:>9} {row['product']:>16} {row['implementation']:>14} "
        f"{row['dense_ms']:9.3f} {row['sparse_ms']:9.3f} {row['ratio']:6.2f} "
        f"{row['ratio_low']:5.2f}-{row['ratio_high']:5.2f} {row['of_ideal']:8.0%} "
        f"{row['stored_tflops']:8.3f} {row['compile_seconds']:9.2f}"
    )


if __name__ == "__main__":
    flags.run(main, __doc__, GROUPS)
