"""Memory and time of the relay against depth (L2L, arXiv 2002.05645, figure of constant memory).

Trains a model of each depth for a few steps with the stash on the host, prints compile time, device
memory and step time beside the plan, and keeps them as JSON. Neither compile time nor device memory
depends on the depth; the time of a step is proportional to it.

    python -m experiments.relay_depth
    python -m experiments.relay_depth --scale=6.7b --depths=8,32,128 --density=0.125
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.11 python -m experiments.relay_depth --scale=6.7b \\
        --density=1 --depths=32 --batch=32 --accumulation=8 --clipping=eager    # 16 GB of an H200
"""

from experiments import flags
from experiments.command_line import Flag, Group
from experiments.relay_flags import COMMON

DEPTH = Group(
    "Depth",
    "what is compared",
    (Flag("depths", "text", "2,8,32", "Numbers of blocks, in a comma list."),),
)
GROUPS = (*COMMON, DEPTH)
COLUMNS = (
    "layers", "compile_seconds", "device_bytes", "planned_device_bytes", "step_seconds",
    "tokens_per_second", "model_tflops", "hidden_transfer", "hidden_updates",
)  # fmt: skip


def main(values):
    """Runs every depth; see the module docstring."""
    import dataclasses

    from experiments import measurement, relay_flags, relay_measure
    from sparse_dataflow.files.errors import UserError
    from sparse_dataflow.parallel.relay.relay import RelayConfig

    try:
        depths = sorted({int(part) for part in values.depths.split(",")})
    except ValueError:
        depths = [0]
    if depths[0] < 1:
        raise UserError(f"--depths={values.depths} is not a comma list of numbers from 1 on.")
    model, training, chip = relay_flags.described(values)
    rows = []
    for layers in depths:
        deep = dataclasses.replace(model, num_layers=layers)
        config = RelayConfig("host", values.clipping)
        row = relay_measure.relayed(deep, training, config, chip, values.steps)
        rows.append(row)
        print(relay_measure.table([row], COLUMNS).splitlines()[-1], flush=True)
    print(relay_measure.table(rows, COLUMNS))
    measurement.keep(values.keep, f"relay_depth_{chip.name}", chip.name, {"rows": rows})


if __name__ == "__main__":
    flags.run(main, __doc__, GROUPS)
