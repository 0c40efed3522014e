"""BERT-Large's shape through the relay and in one program (L2L, arXiv 2002.05645, tables 1 and 2).

24 layers of width 1024 with 16 heads, 512 tokens: for each batch, memory and throughput of the
relay (stash on the device, and on the host) against the whole executor with full remat on the same
device. The paper reports batches up to 256, 45% less memory and 40% more throughput on a 16 GB
V100. With --scale=pico (what auto is on a CPU) the same runs at a toy's shape.

    python -m experiments.relay_bert_large --scale=350m          a GPU
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.11 python -m experiments.relay_bert_large --scale=350m
    python -m experiments.relay_bert_large --clipping=eager      updates beside the device's work
"""

from experiments import flags
from experiments.command_line import AT_LEAST_ONE, Flag, Group
from experiments.relay_flags import COMMON

BATCHES = Group(
    "Batches",
    "what is compared",
    (
        Flag("batches", "text", "2,4,8,16,32,64,128,256", "Sequences in a step, a comma list."),
        Flag("device_batch", "integer", 4, "Sequences in a micro-batch.",
             legal=AT_LEAST_ONE),
    ),
)  # fmt: skip
GROUPS = (*COMMON, BATCHES)
VOCABULARY, SEQUENCE = 30522, 512
COLUMNS = (
    "executor", "stash", "batch", "device_bytes", "planned_device_bytes", "step_seconds",
    "tokens_per_second", "hidden_transfer",
)  # fmt: skip


def main(values):
    """Runs every batch; see the module docstring."""
    import dataclasses

    from experiments import measurement, relay_flags, relay_measure
    from sparse_dataflow.files.errors import UserError
    from sparse_dataflow.parallel.relay.relay import RelayConfig

    try:
        batches = sorted({int(part) for part in values.batches.split(",")})
    except ValueError:
        batches = [0]
    if batches[0] < 1:
        raise UserError(f"--batches={values.batches} is not a comma list of numbers from 1 on.")
    values["density"].value = 1.0 if not values["density"].present else values.density
    model, training, chip = relay_flags.described(values)
    if model.num_layers >= 24:
        model = dataclasses.replace(
            model, num_layers=24, d_model=1024, num_heads=16, d_ff=4096, max_len=SEQUENCE,
            vocab_size=VOCABULARY,
        )  # fmt: skip
    model = dataclasses.replace(model, remat="full")
    rows = []
    for batch in batches:
        parts = max(1, batch // values.device_batch)
        how = dataclasses.replace(
            training,
            batch=batch // parts * parts,
            micro_batches=parts,
            sequence=min(model.max_len, SEQUENCE),
        )
        for stash in ("device", "host"):
            row = relay_measure.relayed(
                model, how, RelayConfig(stash, values.clipping), chip, values.steps
            )
            rows.append(row | {"stash": stash})
        rows.append(relay_measure.whole(model, how, chip, values.steps) | {"batch": batch})
        print(relay_measure.table(rows[-3:], COLUMNS), flush=True)
    measurement.keep(values.keep, f"relay_bert_large_{chip.name}", chip.name, {"rows": rows})


if __name__ == "__main__":
    flags.run(main, __doc__, GROUPS)
