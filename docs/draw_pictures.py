"""Draws pictures of the guides from the product's own data: python docs/draw_pictures.py FOLDER.

patterns.png: a layout of each pattern. mesh.png: the devices of a mesh, with the sequences and the
part of a weight on each. relay.png: the spans of a step of the relay, which this machine runs.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from matplotlib.figure import Figure

import sparse_dataflow as sd
from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.executors import mesh, sharding
from sparse_dataflow.core.executors.mesh_axes import parse_mesh
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.relay.host_state import fresh_state
from sparse_dataflow.relay.relay import Relay, RelayConfig
from sparse_dataflow.relay.timeline import KINDS, Span
from sparse_dataflow.runs.variants import variant

PATTERNS = ("monarch", "shuffle", "pixelfly", "butterfly", "cyclic", "banded", "random")
COLOURS = ("#88ccee", "#44aa99", "#ddcc77", "#cc6677", "#aa4499", "#999933")
MESH = "data:2,fsdp:2,tensor:2"
STEPS = 3
"""Steps of the relay; the first compiles, the last is drawn."""


def draw_patterns(path: Path) -> None:
    """Draws a layout of each pattern; block (0, 0) is at the top left."""
    figure = Figure(figsize=(10, 5.4), layout="constrained")
    *panels, last = figure.subplots(2, 4).flatten()
    for axes, name in zip(panels, PATTERNS, strict=True):
        layout = sd.make_layout(name, 512, 512, block=32, density=0.25)
        layout.plot(axes).set_title(name)
    last.set_axis_off()
    text = (
        "512 x 512 weights,\nblocks of 32,\ndensity 1/4:\nevery row and every\ncolumn has 4 blocks"
    )
    last.text(0.0, 0.95, text, va="top", fontsize=11)
    figure.savefig(path, dpi=100)


def draw_mesh(path: Path) -> None:
    """Draws the devices of `MESH` with the sequences and the part of a weight on each."""
    devices = mesh.make(parse_mesh(MESH, 8))
    model = variant(
        sd.preset("nano").change(model__num_layers=1).dense().without_auto(), "dense"
    ).model
    params = jax.eval_shape(lambda key: gpt.init(model, key), jax.random.key(0))
    weight = jax.tree.leaves(params["blocks"]["mlp_in"])
    specs = jax.tree.leaves(sharding.specs(params, model, devices)["blocks"]["mlp_in"])
    shape, spec = next((w.shape, s) for w, s in zip(weight, specs, strict=True) if w.ndim == 3)
    parts = NamedSharding(devices, spec).devices_indices_map(shape)
    batch = NamedSharding(devices, PartitionSpec(mesh.BATCH_AXES)).devices_indices_map((8,))
    places = {device.id: place for place, device in np.ndenumerate(devices.devices)}
    figure = Figure(figsize=(10, 5), layout="constrained")
    inputs, outputs = shape[1:]
    for device, axes in zip(jax.devices(), figure.subplots(2, 4).flatten(), strict=True):
        part = np.zeros(shape[1:])
        part[parts[device][1:]] = 1
        extent = (0, outputs, inputs, 0)
        axes.imshow(part, cmap="Blues", vmin=0, vmax=1.4, aspect="auto", extent=extent)
        named = dict(zip(devices.axis_names, places[device.id], strict=True))
        where = ", ".join(f"{axis} {named[axis]}" for axis in ("data", "fsdp", "tensor"))
        first, stop, _ = batch[device][0].indices(8)
        title = f"device {device.id}: {where}\nsequences {first} to {stop - 1}"
        axes.set_title(title, fontsize=9)
        axes.set(xticks=[0, outputs // 2, outputs], yticks=[0, inputs // 2, inputs])
        axes.tick_params(labelsize=7)
    figure.supxlabel(f"outputs of mlp_in, {spec[2]}", fontsize=9)
    figure.supylabel(f"inputs, {spec[1]}", fontsize=9)
    title = f"--mesh={MESH}: eight sequences, and mlp_in of {inputs} x {outputs}"
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=100)


def relay_spans() -> Sequence[Span]:
    """Returns the spans of a step of four block-sparse layers."""
    config = sd.preset("nano").change(
        model__num_layers=4, sparsity__block=64, training__batch=8, training__micro_batches=4
    )
    model, training = variant(config.without_auto(), "sparse").model, config.training
    relay = Relay(model, training, RelayConfig(stash="host", clipping="eager"), changing=False)
    state, shape = fresh_state(model, training), (training.batch, training.sequence + 1)
    state = state._replace(rest=stacks.with_groups(state.rest))
    windows = np.random.default_rng(0).integers(0, model.vocab_size, shape, np.int32)
    for _ in range(STEPS):
        state, _ = relay.train_step(state, Batch.from_windows(windows), 1e-3)
    return relay.timeline.spans


def draw_relay(path: Path) -> None:
    """Draws what the relay's threads do in a step: one lane a kind of work."""
    spans = relay_spans()
    start = min(span.start for span in spans)
    sections = list(dict.fromkeys(s.section for s in sorted(spans, key=lambda s: s.start)))
    colours = dict(zip(sections, COLOURS, strict=True))
    figure = Figure(figsize=(10, 3), layout="constrained")
    axes = figure.subplots()
    for span in spans:
        left, width = 1e3 * (span.start - start), 1e3 * (span.stop - span.start)
        axes.barh(KINDS.index(span.kind), width, left=left, color=colours[span.section])
    axes.set(xlabel="milliseconds", yticks=range(len(KINDS)), ylim=(len(KINDS) - 0.4, -0.6))
    axes.set_yticklabels(KINDS)
    handles = [axes.barh(0, 0, color=colours[name], label=name) for name in sections]
    figure.legend(handles=handles, loc="outside right upper", fontsize=9)
    figure.savefig(path, dpi=100)


def main(folder: str) -> None:
    """Draws all pictures in a folder."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    draw_patterns(out / "patterns.png")
    draw_mesh(out / "mesh.png")
    draw_relay(out / "relay.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
