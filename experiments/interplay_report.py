"""Runs the interplay study: measures by child processes, predicts, tabulates, draws."""

import csv
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

from experiments.interplay import DENSITIES
from experiments.planner_flags import model as planned_model
from sparse_dataflow.errors import UserError
from sparse_dataflow.planning import chips
from sparse_dataflow.planning.chips import Chip
from sparse_dataflow.planning.efficiency import EFFICIENCIES, PRIOR
from sparse_dataflow.planning.run_layout import RunLayout
from sparse_dataflow.planning.step_time import step_time, with_passes
from sparse_dataflow.reporting import planner_figures

LONGEST = 512
NO_FUSION = "--xla_disable_hlo_passes=fusion"


def run(asked) -> None:
    """Measures what is asked for, then predicts and reports.

    Args:
      asked: the flags of `interplay`.

    Raises:
      UserError: this machine is to be predicted but not measured, or it has no CPU backend.
    """
    config = planned_model(asked.scale)
    here = asked.hardware == "this"
    sequence = min(config.max_len, LONGEST) if here else config.max_len
    batch = max(1, asked.tokens // sequence)
    measured = {}
    if asked.measure == "yes":
        asking = {"scale": asked.scale, "sequence": sequence, "batch": batch}
        asking |= {"block": asked.block, "rounds": asked.rounds}
        measured = {fused: _measured(asking | {"rates": fused}, fused) for fused in (False, True)}
    elif here:
        raise UserError("--hardware=this is known by measuring; legal: --measure=yes, or a chip.")
    chip = Chip(**measured[True]["chip"]) if here else chips.named(asked.hardware)
    rows, rooflines = [], {}
    for density in DENSITIES:
        for fused in (False, True):
            found = measured.get(fused, {}).get("densities", {}).get(f"{density:g}", {})
            rates = measured[True]["densities"][f"{density:g}"]["rates"] if here else None
            model = planned_model(
                asked.scale, density, asked.block, "float32" if here else "bfloat16"
            )
            serial, pipelined = _predicted(asked, model, chip, sequence, batch, fused, rates)
            sections = with_passes(serial.sections)
            label = f"{'dense' if density == 1 else f'{density:g}'}, {_word(fused)}"
            rooflines[label] = sections
            rows.append(
                {
                    "density": density,
                    "fused": fused,
                    "measured_ms": 1e3 * found["seconds"] if found else None,
                    "predicted_ms": 1e3 * float(serial.total),
                    "pipelined_ms": 1e3 * float(pipelined.total) / asked.micro_batches
                    * asked.stages,
                    **{f"intensity_{n}": float(s.intensity) for n, s in sections.items()},
                }
            )  # fmt: skip
    _print(rows, chip)
    _keep(asked, rows, rooflines, chip)


def _word(fused):
    return "fused" if fused else "unfused"


def _measured(asking, fused):
    flags = os.environ.get("XLA_FLAGS", "")
    environment = {**os.environ, "XLA_FLAGS": flags if fused else f"{flags} {NO_FUSION}".strip()}
    done = subprocess.run(
        [sys.executable, "-m", "experiments.interplay_step"],
        input=json.dumps(asking),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UserError(f"the {_word(fused)} steps ended early: {done.stderr.strip()[-400:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _predicted(asked, model, chip, sequence, batch, fused, rates):
    """The serial step of one micro-batch, and the pipelined step of all of them on all stages."""
    efficiency = EFFICIENCIES.get(chip.family, PRIOR)
    # XLA keeps attention's scores on a CPU, fused or not: its measured rate stands for both.
    layout = RunLayout(micro_batch=batch, fused=fused, fused_attention=fused and rates is None)
    if rates:
        rates = {**rates}
        if not fused:
            # Each pass takes as long as a fused one.
            rates |= {name: chip.bandwidth * efficiency.bandwidth for name in ("norms", "gelu")}
    serial = step_time(model, sequence, layout, chip, efficiency, rates=rates)
    network = chip.network or chips.Network(asked.stages, chip.bandwidth, chip.bandwidth)
    several = dataclasses.replace(
        layout, stage=asked.stages, accumulation=asked.micro_batches, executor="pipeline"
    )
    joined = dataclasses.replace(chip, network=network)
    return serial, step_time(model, sequence, several, joined, efficiency, rates=rates)


def _print(rows, chip):
    base = rows[0]
    print(f"{chip.name}: milliseconds a micro-batch and chip; x is the gain over dense, unfused")
    print(
        f"{'density':>8} {'':<8}{'measured':>10}{'x':>6}{'predicted':>11}{'x':>6}{'pipelined':>11}"
        f"{'x':>6}  FLOP/byte of qkv, attn_out, mlp_in, mlp_out"
    )
    for row in rows:
        measured, gain = row["measured_ms"], ""
        if measured:
            gain = f"{base['measured_ms'] / measured:.2f}"
        intensity = (row[f"intensity_{n}"] for n in ("qkv", "attn_out", "mlp_in", "mlp_out"))
        print(
            f"{row['density']:>8g} {_word(row['fused']):<8}"
            f"{f'{measured:.1f}' if measured else 'not run':>10}{gain:>6}"
            f"{row['predicted_ms']:>11.2f}{base['predicted_ms'] / row['predicted_ms']:>6.2f}"
            f"{row['pipelined_ms']:>11.2f}{base['predicted_ms'] / row['pipelined_ms']:>6.2f}  "
            f"{', '.join(f'{value:.0f}' for value in intensity)}"
        )
    for key, name in (("measured_ms", "measured"), ("predicted_ms", "predicted")):
        if rows[0][key]:
            alone = rows[0][key] / rows[-2][key]
            both = rows[1][key] / rows[-1][key]
            print(f"{name}: 1/8 of the blocks gains {alone:.2f}x unfused, {both:.2f}x fused")


def _keep(asked, rows, rooflines, chip):
    folder = Path(asked.out)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "interplay.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    kinds = [("measured_ms", "measured, serial")] if rows[0]["measured_ms"] else []
    kinds += [("predicted_ms", "predicted, serial"), ("pipelined_ms", "predicted, pipelined")]
    bars = {}
    for fused in (False, True):
        for key, name in kinds:
            chosen = [row[key] for row in rows if row["fused"] == fused]
            base = rows[0]["measured_ms" if key == "measured_ms" else "predicted_ms"]
            bars[f"{_word(fused)}, {name}"] = [base / value for value in chosen]
    labels = ["dense", *(f"{density:g}" for density in DENSITIES[1:])]
    title = f"{asked.scale} on {chip.name}: gain over dense, unfused, serial"
    figure = planner_figures.bars(labels, bars, "gain, times", title)
    print(planner_figures.save(figure, folder / "interplay.png"))
    shown = {n: s for n, s in rooflines.items() if n.startswith(("dense", "0.125"))}
    dtype = "float32" if asked.hardware == "this" else "bfloat16"
    title = f"{asked.scale} on {chip.name}: sections of a block, forward, with their passes"
    figure = planner_figures.roofline(chip, dtype, shown, title)
    print(planner_figures.save(figure, folder / "roofline.png"))
