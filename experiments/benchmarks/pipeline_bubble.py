"""The loop of the pipeline over blocks that sleep, for `pipeline_bubble`."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sparse_dataflow.commands import measurement
from sparse_dataflow.core.batch import Batch
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.pipeline import action_tables, pipeline
from sparse_dataflow.pipeline.action_tables import Table
from sparse_dataflow.pipeline.stages import Kind, divide

from .schedules_page import schedules_page

WIDTH = 4
"""Features of the activations that travel."""


def measure_bubbles(options) -> None:
    """Measures the table of every rule, prints and writes; see `experiments.pipeline_bubble`."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.stages)
    cases = []
    for name, recompute in [(name, False) for name in action_tables.RULES] + [
        ("zero_bubble", True)
    ]:
        chunks = options.chunks if name == "interleaved" else 1
        counts = options.stages, options.micro_batches, chunks
        cases.append((action_tables.make(name, *counts, recompute), recompute))
    if options.page:
        _write_page(Path(options.page), schedules_page([table for table, _ in cases]))
    rows = []
    for table, recompute in cases:
        seconds, bubble = _measured(table, 1e-3 * options.milliseconds, options.rounds)
        table_bubble = table.bubble()
        rows.append(
            {
                "schedule": table.name,
                "chunks": table.chunks,
                "recompute": recompute,
                "ticks": table.ticks,
                "step_seconds": seconds,
                "bubble_of_table": table_bubble,
                "bubble_measured": bubble,
            }
        )
        label = table.name + " with recomputation" * recompute
        error = bubble / max(table_bubble, 1e-9) - 1
        print(
            f"{label:32} {table.ticks:4} ticks  bubble of the table {table_bubble:.3f}"
            f"  measured {bubble:.3f}  ({error:+.1%})"
        )
    result = {
        "inputs": "blocks that sleep in place of computing",
        "stages": options.stages,
        "micro_batches": options.micro_batches,
        "action_ms": options.milliseconds,
        "rows": rows,
    }
    measurement.keep(options.keep, "pipeline_bubble_cpu", "cpu", [result])


def _measured(table: Table, action: float, rounds: int) -> tuple[float, float]:
    """(seconds of a step, measured bubble), medians, where an action takes `action` seconds."""
    step, slept = sleeping_step(table)
    step(0)
    bubbles, lengths = [], []
    for _ in range(rounds):
        slept.clear()
        seconds = step(action / table.chunks)
        lengths.append(seconds)
        bubbles.append(1 - sum(slept) / (table.stages * seconds))
    return float(np.median(lengths)), float(np.median(bubbles))


def _write_page(path, page):
    """Writes the page; UserError where the path holds a file that is not such a page."""
    head = page[: page.index("</title>")].encode()
    try:
        foreign = os.path.lexists(path) and not json_files.read_bytes(path).startswith(head)
        if not foreign:
            path.write_text(page)
    except (OSError, ValueError) as error:
        raise UserError(f"--page={path} cannot be written: {error}.") from error
    if foreign:
        raise UserError(f"--page={path} is a file that this experiment did not write.")


def sleeping_block(rest: Callable) -> Callable:
    """Returns a block that multiplies its input by its parameter, and rests once in each action."""

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
    return lambda params, untrained, x, context: (sleep(params, x), {})


def sleeping_step(table: Table) -> tuple[Callable[[float], float], list[float]]:
    """(step, slept): `step(seconds)` runs a table once, whose actions take `seconds` each, and
    returns the seconds of the whole step; it adds the seconds of each sleep to `slept`."""
    slept: list[float] = []
    length = 0.0

    def rest(x):
        start = time.perf_counter()
        time.sleep(length)
        slept.append(time.perf_counter() - start)
        return x

    block = sleeping_block(rest)
    if table.actions[1] == pipeline.RECOMPUTE:
        block = jax.checkpoint(block)
    division = divide(table.virtual_stages, table.stages, table.chunks)
    plan = pipeline.make_plan(division, table)
    mesh = Mesh(np.array(jax.devices()[: table.stages]), ("stage",))

    def local(rows, params, tokens):
        work = pipeline.Work(
            lambda params, tokens: jnp.ones((*tokens.shape, WIDTH)) * params,
            lambda embed, head, x, batch: (jnp.mean(x) * head, {}),
            (Kind(block, recompute=pipeline.RECOMPUTE in table.actions),),
            params,
            Batch(tokens),
        )
        return jax.lax.psum(pipeline.run_stage(plan, rows[0], work), "stage")

    specs = P("stage"), {"embed": P(), "blocks": P("stage"), "head": P()}, P()
    program = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    )
    ones = np.ones(table.virtual_stages, np.float32)
    params = {"embed": np.float32(1), "blocks": ones, "head": np.float32(1)}
    arguments = pipeline.rows(plan), params, np.zeros((table.micro_batches, 1, 2), np.int32)

    def step(seconds):
        nonlocal length
        length = seconds
        start = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        return time.perf_counter() - start

    return step, slept
