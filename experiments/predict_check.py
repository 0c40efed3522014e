"""Predicted against measured: the time of a training step on this machine's CPU.

Measures the rate of each section of one block by itself, and of the head and the optimizer, puts
them into the planner's cost model, and compares what it predicts for the whole model's step with
the step itself, dense and sparse.

    python -m experiments.predict_check                              nano and 125m, about 2 minutes
    python -m experiments.predict_check --scales=micro --tokens=2048

Keeps the result as JSON.
"""

from sparse_dataflow.config.presets import SIZES

from experiments import flags
from experiments.command_line import A_FRACTION, AT_LEAST_ONE, AT_LEAST_ZERO, Flag, Group

CHECK = Group(
    "Check",
    "what is predicted and measured",
    (
        Flag("scales", "text", "nano,125m", "Named sizes, comma separated."),
        Flag(
            "tokens",
            "integer",
            1024,
            "Tokens of a step: as many sequences of the scale's length as fit, at least one.",
            legal=AT_LEAST_ONE,
        ),
        Flag("sequence", "integer", 0, "Tokens in a sequence; 0 is the scale's own, 512 at most."),
        Flag("density", "number", 0.125, "Fraction of blocks of the sparse model.",
             legal=A_FRACTION),
        Flag(
            "block",
            "integer",
            0,
            "Side of a square block; 0 is a sixteenth of the scale's width.",
            legal=AT_LEAST_ZERO,
        ),
        Flag("rounds", "integer", 5, "Timed steps.", legal=AT_LEAST_ONE),
        Flag("keep", "text", "experiments/results", "Folder for the JSON; empty keeps none."),
    ),
)  # fmt: skip
GROUPS = (CHECK,)


def main(values):
    """Measures, predicts, prints and keeps; see the module docstring."""
    from sparse_dataflow.hardware.host_memory import keep_freed_memory

    keep_freed_memory()
    from experiments import measurement, prediction
    from sparse_dataflow.files.errors import UserError
    from sparse_dataflow.hardware import detect as hardware

    scales = [name.strip() for name in values.scales.split(",")]
    for scale in scales:
        if scale not in SIZES:
            raise UserError(f"--scales names {scale!r}; legal: {', '.join(SIZES)}.")
    cases = [
        (scale, density) for scale in scales for density in dict.fromkeys((1.0, values.density))
    ]
    for scale, density in cases:
        prediction.refuse_unfit(scale, density, values.block)
    chip = hardware.detect(("float32",))
    peak, bandwidth = chip.rates("float32")
    print(f"{chip.name}: {peak / 1e9:,.0f} GFLOP/s, {bandwidth / 1e9:.1f} GB/s")
    rows = []
    for scale, density in cases:
        row = prediction.check(scale, density, values, chip)
        rows.append(row)
        print(
            f"{scale:>6} {'dense' if density == 1 else f'{density:g}':>6}: measured "
            f"{row['measured_ms']:8.1f} ms, predicted {row['predicted_ms']:8.1f} ms, "
            f"{row['error']:+.1%}",
            flush=True,
        )
    print(f"largest error {max(abs(row['error']) for row in rows):.1%}")
    measurement.keep(values.keep, f"predict_check_{chip.name}", chip.name, {"rows": rows})


if __name__ == "__main__":
    flags.run(main, __doc__, GROUPS)
