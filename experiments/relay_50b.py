"""50 billion parameters on one small device: the plan, and a run at 1/8 of the blocks.

Plans 62 layers of width 8192 (50 B parameters dense), dense and at --density, for one device of
--device_gb and a host of --host_gb; then, with --run, trains the sparse one for a few steps where
both fit, and prints prediction beside measurement. L2L (arXiv 2002.05645) trained 50 B on a 16 GB
V100 with 512 GB of host memory. At --shape=pico the same runs on a CPU.

    python -m experiments.relay_50b
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.11 python -m experiments.relay_50b --run
    python -m experiments.relay_50b --run --shape=pico --density=0.25
"""

from experiments import flags
from experiments.command_line import ABOVE_ZERO, Flag, Group

FIFTY = Group(
    "50B",
    "what is planned and run",
    (
        Flag("shape", "choice", "50b", "Shape of the model.", ("50b", "pico")),
        Flag("density", "number", 0.125, "Fraction of blocks stored by the sparse model.",
             legal=("in (0, 1)", lambda d: 0 < d < 1)),
        Flag("batch", "integer", 8, "Sequences in a step.", legal=ABOVE_ZERO),
        Flag("accumulation", "integer", 8, "Micro-batches in a step.", legal=ABOVE_ZERO),
        Flag("device_gb", "number", 16.0, "Memory of the device, in GB.", legal=ABOVE_ZERO),
        Flag("host_gb", "number", 128.0, "Memory of the host, in GB.", legal=ABOVE_ZERO),
        Flag("chip", "text", "h200", "Chip whose rates the plan takes."),
        Flag("run", "switch", "no", "Train the sparse model."),
        Flag("steps", "integer", 2, "Timed steps of the run.", legal=ABOVE_ZERO),
        Flag("keep", "text", "experiments/results", "Folder for the JSON; empty keeps none."),
    ),
)  # fmt: skip
GROUPS = (FIFTY,)


def main(values):
    """Plans, and runs where asked; see the module docstring."""
    import dataclasses

    from experiments import measurement, relay_measure
    from sparse_dataflow.config.model import LinearSpec, ModelConfig
    from sparse_dataflow.config.presets import SIZES
    from sparse_dataflow.config.training import TrainingConfig
    from sparse_dataflow.files.errors import UserError
    from sparse_dataflow.hardware import chips
    from sparse_dataflow.hardware import detect as hardware
    from sparse_dataflow.parallel.relay.relay import RelayConfig
    from sparse_dataflow.planning import memory, relay

    if values.chip not in hardware.CHIPS:
        raise UserError(f"--chip={values.chip} is unknown; legal: {', '.join(hardware.CHIPS)}.")
    if values.shape == "50b":
        dense = ModelConfig(62, 8192, 64, 4 * 8192, 50257, 2048, compute_dtype="bfloat16")
        spec = LinearSpec("block_sparse", "monarch", values.density, block=128)
    else:
        dense = SIZES["pico"]
        spec = LinearSpec("block_sparse", "monarch", values.density, block=16)
    sparse = dense.with_linears(spec)
    training = TrainingConfig(
        1, values.batch, min(2048, dense.max_len), values.accumulation, learning_rate=1e-4
    )
    chip = dataclasses.replace(
        hardware.CHIPS[values.chip], memory_bytes=int(values.device_gb * chips.GIGA)
    )
    config, result = RelayConfig("host", "eager"), {}
    for name, model in (("dense", dense), ("sparse", sparse)):
        plan = relay.estimate(
            model,
            training.batch,
            training.sequence,
            training.micro_batches,
            stash=config.stash,
            clipping=config.clipping,
            chip=chip,
            host_bandwidth=chip.host_bandwidth,
            fused_attention=True,
        )
        fits = plan.device_total <= chip.capacity
        enough = plan.host_total <= values.host_gb * chips.GIGA
        print(
            f"{name}: {memory.parameter_count(model):,} stored parameters\n  {plan.text()}\n  "
            f"{'fits' if fits else 'does not fit'} a device of {values.device_gb:g} GB, "
            f"{'fits' if enough else 'does not fit'} a host of {values.host_gb:g} GB"
        )
        result[name] = {**dataclasses.asdict(plan), "fits_device": fits, "fits_host": enough}
    if values.run == "yes":
        own = hardware.detect(["float32"])
        row = relay_measure.relayed(sparse, training, config, own, values.steps)
        columns = ("device_bytes", "planned_device_bytes", "step_seconds", "tokens_per_second",
                   "hidden_transfer", "hidden_updates")  # fmt: skip
        print(relay_measure.table([row], columns))
        result["run"] = row
        chip = own
    measurement.keep(values.keep, f"relay_50b_{chip.name}", chip.name, result)


if __name__ == "__main__":
    flags.run(main, __doc__, GROUPS)
