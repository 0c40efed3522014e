"""Runs the interplay study: measures by child processes, predicts, tabulates, draws."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from sparse_dataflow.commands import measurement
from sparse_dataflow.files import folders, output
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import chips
from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.planner.efficiency import EFFICIENCIES, PRIOR
from sparse_dataflow.planner.parallel_plan import ParallelPlan
from sparse_dataflow.planner.step_time import step_time, with_passes

from ..planning import figures, png
from . import interplay_step, prediction
from .benchmark import named_model
from .interplay_step import DENSITIES, Work

NO_FUSION = "--xla_disable_hlo_passes=fusion"
ORDERS = ("serial", "pipelined")
WAYS = ("measured", "predicted")


def report_interplay(options) -> None:
    """Measures where `options.measure`, then predicts and reports; see `experiments.interplay`.

    Raises:
      UserError: the model has fewer layers than stages, this machine is to be predicted without
        measuring or has fewer cores than stages, or --out holds files of another program.
    """
    folders.refuse_foreign(Path(options.out), "interplay")
    config = named_model(options.scale)
    here = options.hardware == "this"
    sequence = min(config.max_len, prediction.LONGEST) if here else config.max_len
    batch = max(1, options.tokens // sequence)
    if options.stages > config.num_layers:
        raise UserError(
            f"--stages={options.stages} is more than the {config.num_layers} layers of "
            f"{options.scale!r}; legal: 1 to {config.num_layers}."
        )
    if here and not options.measure:
        raise UserError("--hardware=this is known by measuring; legal: --measure=yes, or a chip.")
    measured = _all_measured(options, sequence, batch) if options.measure else {}
    known = measured.get((True, "serial"), {})
    chip = Chip(**known["chip"]) if here else chips.lookup(options.hardware)
    dtype = "float32" if here else "bfloat16"
    rows, rooflines = [], {}
    for density in DENSITIES:
        for fused in (False, True):
            rates = known["densities"][f"{density:g}"]["rates"] if here else None
            model = named_model(options.scale, density, options.block, dtype)
            predicted = _predicted(options, model, chip, sequence, batch, fused, rates)
            sections = with_passes(predicted["serial"].sections)
            label = f"{'dense' if density == 1 else f'{density:g}'}, {_word(fused)}"
            rooflines[label] = sections
            row = {"density": density, "fused": fused}
            for order, chips_used in (("serial", 1), ("pipelined", options.stages)):
                results = measured.get((fused, order), {}).get("densities", {})
                seconds = results.get(f"{density:g}", {}).get("seconds")
                ours = 1e3 * chips_used / options.micro_batches
                row[_key(order, "measured")] = seconds and ours * seconds
                row[_key(order, "predicted")] = ours * float(predicted[order].total)
            row |= {f"intensity_{n}": float(s.intensity) for n, s in sections.items()}
            rows.append(row)
    text = _table(rows, chip)
    print(text)
    _keep(options, rows, rooflines, chip, dtype, text, known["chip"]["name"] if known else "")


def _word(fused):
    return "fused" if fused else "unfused"


def _all_measured(options, sequence, batch) -> dict:
    """{(whether fused, order): the result of `_measured`}."""
    cores, measured = _cores(options.stages), {}
    work = Work(
        options.scale, sequence, batch, options.micro_batches, options.block, options.rounds
    )
    for fused in (False, True):
        serial = dataclasses.replace(work, rates=fused)
        measured[fused, "serial"] = _measured(serial, fused, cores)
        if options.stages > 1:
            pipelined = dataclasses.replace(work, stages=options.stages)
            measured[fused, "pipelined"] = _measured(pipelined, fused, cores)
    return measured


def _cores(stages):
    """A core for each stage."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < stages:
        raise UserError(
            f"--stages={stages} are measured on a core each, and {len(cores)} can be chosen here; "
            "legal: fewer --stages, or --measure=no."
        )
    return cores[:stages]


def _measured(work: Work, fused: bool, cores):
    """Runs `interplay_step` in a process on each of the cores at once; `fused` lets XLA fuse.

    Returns:
      The result of the first process, with the mean seconds of all.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    environment = {**os.environ, "XLA_FLAGS": flags if fused else f"{flags} {NO_FUSION}".strip()}
    staged = work.stages > 1
    address = _free_address() if staged else ""
    children = []
    try:
        for process, core in enumerate(cores):
            own = dataclasses.replace(
                work, coordinator=address, cores=(core,), process=process if staged else 0
            )
            child = subprocess.Popen(
                [sys.executable, "-m", interplay_step.__name__, json.dumps(vars(own))],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                text=True,
            )
            children.append(child)
        outputs = [child.communicate() for child in children]
    finally:
        for child in children:
            child.kill()
    for child, (_, errors) in zip(children, outputs):
        if child.returncode:
            raise UserError(f"the {_word(fused)} steps ended early: {errors.strip()[-400:]}")
    results = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    for density, first in results[0]["densities"].items():
        each = [result["densities"][density]["seconds"] for result in results]
        first["seconds"] = sum(each) / len(each)
    return results[0]


def _free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def _predicted(options, model, chip, sequence, batch, fused, rates):
    """{order: time of a step}: of one chip alone, and of all stages together."""
    efficiency = EFFICIENCIES.get(chip.family, PRIOR)
    # XLA keeps attention's scores on a CPU, fused or not: its measured rate stands for both.
    plan = ParallelPlan(
        micro_batch=batch,
        accumulation=options.micro_batches,
        fused=fused,
        fused_attention=fused and rates is None,
    )
    if rates and not fused:
        # Each pass takes as long as a fused one.
        bandwidth = chip.bandwidth * efficiency.bandwidth
        rates = {**rates, "norms": bandwidth, "gelu": bandwidth}
    serial = step_time(model, sequence, plan, chip, efficiency, rates=rates)
    network = chip.network or chips.Network(options.stages, chip.bandwidth, chip.bandwidth)
    several = dataclasses.replace(plan, stage=options.stages)
    joined = dataclasses.replace(chip, network=network)
    pipelined = step_time(model, sequence, several, joined, efficiency, rates=rates)
    return {"serial": serial, "pipelined": pipelined}


def _columns(rows):
    """(order, way) of those that are known."""
    every = [(order, way) for way in WAYS for order in ORDERS]
    return [pair for pair in every if rows[0][_key(*pair)]]


def _key(order, way):
    return f"{order}_{way}_ms"


def _gain(rows, row, way, order):
    """Over dense, unfused, serial, as found the same way."""
    return rows[0][_key("serial", way)] / row[_key(order, way)]


def _table(rows, chip):
    """Markdown."""
    columns, sections = _columns(rows), ("qkv", "attn_out", "mlp_in", "mlp_out")
    heads = [f"{way}, {order}" for order, way in columns]
    cells = [
        [
            f"{row['density']:g}",
            _word(row["fused"]),
            *(
                f"{row[_key(order, way)]:.2f} ({_gain(rows, row, way, order):.2f}x)"
                for order, way in columns
            ),
            ", ".join(f"{row[f'intensity_{name}']:.0f}" for name in sections),
        ]
        for row in rows
    ]
    lines = [
        f"{chip.name}: a chip's milliseconds for a micro-batch, and the gain over dense, unfused, "
        "serial",
        "",
        output.markdown(["density", "", *heads, f"FLOP/byte of {', '.join(sections)}"], cells),
        "",
    ]
    for order, way in columns:
        key = _key(order, way)
        alone, both = rows[0][key] / rows[-2][key], rows[1][key] / rows[-1][key]
        lines.append(
            f"- {way}, {order}: 1/8 of the blocks gains {alone:.2f}x unfused, {both:.2f}x fused"
        )
    return "\n".join(lines)


def _keep(options, rows, rooflines, chip, dtype, text, machine):
    folder = Path(options.out)
    folders.claim(folder, "interplay")
    pictures = "![gains](interplay.png)\n\n![roofline](roofline.png)\n"
    (folder / "interplay.md").write_text(f"# Interplay, {options.scale}\n\n{text}\n\n{pictures}")
    output.write_csv(folder / "interplay.csv", rows)
    panels = {
        order: {
            f"{_word(fused)}, {way}": [
                _gain(rows, row, way, order) for row in rows if row["fused"] == fused
            ]
            for fused in (False, True)
            for known, way in _columns(rows)
            if known == order
        }
        for order in ORDERS
    }
    labels = ["dense", *(f"{density:g}" for density in DENSITIES[1:])]
    title = f"{options.scale} on {chip.name}: gain over dense, unfused, serial"
    _bars(folder / "interplay.png", labels, panels, "gain, times", title)
    print(folder / "interplay.png")
    shown = {n: s for n, s in rooflines.items() if n.startswith(("dense", "0.125"))}
    title = f"{options.scale} on {chip.name}: sections of a block, forward, with their passes"
    figures.roofline(folder / "roofline.png", chip, dtype, shown, title)
    print(folder / "roofline.png")
    if machine:
        settings = ("scale", "tokens", "block", "stages", "micro_batches", "rounds")
        result = {name: getattr(options, name) for name in settings} | {"rows": rows}
        measurement.keep(options.keep, f"interplay_{machine}_{options.scale}", machine, [result])


def _bars(
    path: Path,
    labels: Sequence[str],
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    ylabel: str,
    title: str,
) -> None:
    """Plots panels of grouped bars on one scale.

    Args:
      path: PNG file to write.
      labels: labels of the x axis.
      panels: panel title -> legend label -> value at each x label; all panels have the same legend.
      ylabel: label of the values.
      title: title of the figure.
    """
    columns = len(panels)
    with png.figure(path, 4.2 * columns, 3.6, title, columns=columns, sharey=True) as (_, [row]):
        for axes, (panel, groups) in zip(row, panels.items()):
            width = 0.84 / len(groups)
            for number, (name, values) in enumerate(groups.items()):
                x = np.arange(len(labels)) + (number - (len(groups) - 1) / 2) * width
                drawn = axes.bar(x, values, 0.92 * width, color=figures.COLOURS[number], label=name)
                axes.bar_label(drawn, fmt="%.1f", fontsize=6.5)
            axes.set_xticks(range(len(labels)), labels)
            axes.grid(False, axis="x")
            axes.set(title=panel, xlabel="density (fraction of stored blocks)")
        row[0].set(ylabel=ylabel)
        row[0].legend(fontsize=7.5, loc="upper left")
