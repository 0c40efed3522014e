"""The pipeline's measured bubble beside the one that its table promises, on virtual CPU devices.

The executor's own loop runs every schedule over --stages devices of this machine, with blocks that
sleep: each forward, input gradient, weight gradient and recomputation takes --milliseconds, so
devices do not compete for cores, and everything else (the loop, what is sent, waiting for
neighbours) costs what it costs. The measured bubble is one minus the time that blocks were seen to
sleep over stages times the length of the step; median of --rounds.

    python -m experiments.pipeline_bubble
    python -m experiments.pipeline_bubble --stages=4 --micro_batches=8 --page=schedules.html

A minute with the defaults. What a tick costs beside its action adds to the measured bubble; on a
busy machine make actions longer.
"""

from pathlib import Path

from experiments import flags
from experiments.command_line import ABOVE_ZERO, AT_LEAST_ONE, Flag, Group

BENCHMARK = Group(
    "Benchmark",
    "what is run and how often",
    (
        Flag("stages", "integer", 8, "Devices in a row.", legal=AT_LEAST_ONE),
        Flag(
            "micro_batches",
            "integer",
            16,
            "Micro-batches of a step; a multiple of --stages.",
            legal=AT_LEAST_ONE,
        ),
        Flag("chunks", "integer", 2, "Chunks a stage, of interleaved.", legal=AT_LEAST_ONE),
        Flag(
            "milliseconds",
            "number",
            40.0,
            "That one action of a stage takes.",
            legal=ABOVE_ZERO,
        ),
        Flag("rounds", "integer", 3, "Timed steps of each schedule.", legal=AT_LEAST_ONE),
        Flag("keep", "text", "experiments/results", "Folder for the JSON; empty keeps none."),
        Flag("page", "text", "", "HTML file to draw the schedules in; empty draws none."),
    ),
)
GROUPS = (BENCHMARK,)
WIDTH = 4
"""Features of the activations that travel."""


def main(values):
    """Runs the benchmark; see the module docstring."""
    import os

    # XLA's pool has a thread a core, and each sleeping device needs one.
    os.environ["NPROC"] = str(4 * values.stages)
    import jax
    import numpy as np

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", values.stages)
    from experiments import measurement
    from sparse_dataflow.parallel.pipeline import schedules
    from sparse_dataflow.reporting.schedule_figure import schedule_page

    rows = []
    names = [(name, False) for name in schedules.SCHEDULES] + [("zero_bubble", True)]
    cases = []
    for name, recompute in names:
        chunks = values.chunks if name == "interleaved" else 1
        counts = values.stages, values.micro_batches, chunks
        cases.append((schedules.make(name, *counts, recompute), recompute))
    if values.page:
        _write_page(Path(values.page), schedule_page([schedule for schedule, _ in cases]))
    for schedule, recompute in cases:
        name, chunks = schedule.name, schedule.chunks
        step, slept = sleeping_step(schedule)
        step(0)
        measured, lengths = [], []
        for _ in range(values.rounds):
            slept.clear()
            seconds = step(1e-3 * values.milliseconds / chunks)
            lengths.append(seconds)
            measured.append(1 - sum(slept) / (values.stages * seconds))
        of_table, found = schedule.bubble(), float(np.median(measured))
        row = {
            "schedule": name,
            "chunks": chunks,
            "recompute": recompute,
            "ticks": schedule.ticks,
            "step_seconds": float(np.median(lengths)),
            "bubble_of_table": of_table,
            "bubble_measured": found,
        }
        rows.append(row)
        label = name + " with recomputation" * recompute
        print(
            f"{label:32} {schedule.ticks:4} ticks  bubble of the table {of_table:.3f}"
            f"  measured {found:.3f}  ({found / max(of_table, 1e-9) - 1:+.1%})"
        )
    result = {
        "inputs": "blocks that sleep in place of computing",
        "stages": values.stages,
        "micro_batches": values.micro_batches,
        "action_ms": values.milliseconds,
        "rows": rows,
    }
    measurement.keep(values.keep, "pipeline_bubble_cpu", "cpu", result)


def _write_page(path, page):
    """Writes the page; UserError where a file is there that is no such page."""
    import os

    from sparse_dataflow.files import json_files
    from sparse_dataflow.files.errors import UserError

    head = page[: page.index("</title>")].encode()
    try:
        if os.path.lexists(path) and not json_files.read_bytes(path).startswith(head):
            raise UserError(f"--page={path} is a file that this experiment did not write.")
        path.write_text(page)
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"--page={path} cannot be written: {error}.") from error


def sleeping_step(schedule):
    """(function that makes one step whose actions take so many seconds, and returns how many the
    step took; list to which it adds the seconds of each sleep)."""
    import functools
    import time

    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    from sparse_dataflow.parallel.pipeline import pipeline
    from sparse_dataflow.parallel.pipeline.stages import divide

    slept, length = [], 0.0

    def rest(x):
        start = time.perf_counter()
        time.sleep(length)
        slept.append(time.perf_counter() - start)
        return x

    def asleep(x):
        return jax.pure_callback(rest, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    @jax.custom_vjp
    def sleep(params, x):
        return asleep(x) * params

    def forward(params, x):
        y = asleep(x)
        return y * params, (params, y)

    def backward(saved, dy):
        params, y = saved
        return jnp.sum(asleep(dy * y)), asleep(dy) * params

    sleep.defvjp(forward, backward)

    def block(params, held, x):
        return sleep(params, x)

    if schedule.actions[1] == pipeline.RECOMPUTE:
        block = jax.checkpoint(block)
    division = divide(schedule.virtual_stages, schedule.stages, schedule.chunks)
    plan = pipeline.make_plan(division, schedule)
    mesh = Mesh(np.array(jax.devices()[: schedule.stages]), ("stage",))

    def local(table, params, tokens):
        work = pipeline.Work(
            lambda params, tokens: jnp.ones((*tokens.shape, WIDTH)) * params,
            block,
            lambda embed, head, x, targets, weights: jnp.mean(x) * head,
            params,
            {},
            tokens,
            jnp.ones(tokens[..., 1:].shape),
        )
        return jax.lax.psum(pipeline.run_stage(plan, table[0], work), "stage")

    parts = {"embed": P(), "blocks": P("stage"), "head": P()}
    program = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P("stage"), parts, P()),
        out_specs=P(),
        check_vma=False,
    )
    params = {"embed": np.float32(1), "blocks": np.ones(schedule.virtual_stages, np.float32)}
    tokens = np.zeros((schedule.micro_batches, 1, 3), np.int32)
    run = functools.partial(
        jax.jit(program), pipeline.rows(plan), params | {"head": np.float32(1)}, tokens
    )

    def step(seconds):
        nonlocal length
        length = seconds
        start = time.perf_counter()
        jax.block_until_ready(run())
        return time.perf_counter() - start

    return step, slept


if __name__ == "__main__":
    flags.run(main, __doc__, GROUPS)
