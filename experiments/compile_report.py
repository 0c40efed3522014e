"""Compiles a plan, tells of it, and keeps it."""

import contextlib
import dataclasses
import importlib.metadata

from experiments import measurement, planner_flags
from experiments.recipes import RECIPES
from sparse_dataflow.aot import compile, hlo, topologies
from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import detect as hardware
from sparse_dataflow.hardware.chips import GIB
from sparse_dataflow.parallel import mesh as meshes
from sparse_dataflow.parallel.executor import ONE_DEVICE
from sparse_dataflow.parallel.pipeline import schedules
from sparse_dataflow.parallel.pipeline.pipelined import executor_over
from sparse_dataflow.planning import cost, layout_memory, nearest, search
from sparse_dataflow.planning.memory import USABLE
from sparse_dataflow.planning.run_layout import RunLayout

FITS, TOO_LARGE = "fits", "does not fit"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is compiled.

    Attributes:
      scale: its name.
      config: the model, with its remat.
      sequence: tokens a sequence.
      topology: the chips.
      layout: of the model on them.
    """

    scale: str
    config: ModelConfig
    sequence: int
    topology: topologies.Topology
    layout: RunLayout

    @property
    def flags(self) -> str:
        """The flags of `compile_plan` that ask for it."""
        sparse = next(iter(dict(self.config.linears).values()), None)
        said = [f"--scale={self.scale}"]
        if sparse is not None:
            said += [f"--density={sparse.density:g}", f"--block={sparse.block}"]
        said += [f"--topology={self.topology.name}"]
        said += [f"--slices={self.topology.slices}"] if self.topology.slices > 1 else []
        axes = ",".join(f"{a}:{getattr(self.layout, a)}" for a in meshes.AXES)
        said += [f"--mesh={axes}", f"--zero={self.layout.zero}", f"--batch={self.layout.batch}"]
        said += [f"--accumulation={self.layout.accumulation}", f"--remat={self.layout.remat}"]
        if self.layout.stage > 1:
            said += [
                f"--schedule={schedules.written(self.layout.schedule, int(self.layout.chunks))}"
            ]
        if self.layout.state_dtype != "float32":
            said += [f"--state_dtype={self.layout.state_dtype}"]
        return " ".join(said)


def run(asked) -> int:
    """Compiles, prints and keeps; the status is 0 where the asked plan fits.

    Args:
      asked: the flags of `compile_plan`.

    Raises:
      UserError: no such topology, mesh or batch, or no compiler here.
    """
    plan = asked_plan(asked)
    if reason := topologies.refusal(plan.topology):
        raise UserError(f"--topology={asked.topology}: {reason}")
    found = verdict(plan)
    print(told(plan, found))
    if found["verdict"] == FITS:
        _keep(asked.out, plan, found)
        return 0
    near = _nearest(plan, asked.tries)
    if near is not None:
        _keep(asked.out, *near)
    return 1


def verdict(plan: Plan) -> dict:
    """The plan, compiled: what a result file says of it.

    Raises:
      UserError: the layout cannot be made of this model or these chips.
    """
    layout, topology = plan.layout, plan.topology
    devices = topologies.devices(topology)
    batch, accumulation = int(layout.batch), int(layout.accumulation)
    training = TrainingConfig(1, batch, plan.sequence, accumulation, state_dtype=layout.state_dtype)
    executor = _executor(plan, devices)
    flops = cost.flops_per_token(plan.config, plan.sequence)
    share = layout.batch * plan.sequence / layout.chips
    common = {
        "plan": plan.flags,
        "chips": topology.size,
        "memory_bytes": topology.chip.memory_bytes,
        "model_flops": flops.total * share,
    }
    try:
        step = compile.compile_step(plan.config, training, executor, devices[0])
    except compile.DoesNotFit as error:
        return common | {"verdict": TOO_LARGE, "needed_bytes": error.needed, "said": str(error)}
    # The TPU's compiler refuses what does not fit; the GPU's leaves that to the runtime.
    usable = USABLE if topology.platform == "cuda" else 1.0
    fits = step.bytes.total <= usable * topology.chip.capacity
    return common | {
        "verdict": FITS if fits else TOO_LARGE,
        "needed_bytes": step.bytes.total,
        "bytes": dataclasses.asdict(step.bytes),
        "memory_analysis": step.allocated,
        "flops": step.flops,
        "kernels_without_flops": list(step.silent),
        "collectives": [
            dataclasses.asdict(c) | {"moved": round(c.moved)} for c in step.collectives
        ],
        "seconds": {
            "trace": round(step.trace_seconds, 1),
            "compile": round(step.compile_seconds, 1),
            "processor": round(step.cpu_seconds, 1),
        },
    }


def asked_plan(asked) -> Plan:
    """The plan that the flags of `compile_plan` name, checked in words.

    Raises:
      UserError: no such topology, axes that do not make up its chips, or a batch that they do not
        divide.
    """
    topology = topologies.parse(asked.topology, asked.slices)
    config = planner_flags.model(asked.scale, asked.density, asked.block)
    sequence = asked.sequence or config.max_len
    if asked.mesh == "auto":
        layout = _fastest(asked, config, sequence, topology)
    else:
        sizes = meshes.parse(asked.mesh, topology.size)
        rows = sizes["data"] * sizes["fsdp"] * asked.accumulation
        batch = asked.batch or rows * max(1, RECIPES[asked.scale].batch // rows)
        if batch % rows:
            raise UserError(
                f"--batch={batch} cannot be cut into {asked.accumulation} micro-batches over "
                f"data:{sizes['data']} x fsdp:{sizes['fsdp']}; legal: multiples of {rows}."
            )
        schedule, chunks = schedules.parse(asked.schedule)
        layout = RunLayout(
            data=sizes["data"],
            stage=sizes["stage"],
            fsdp=sizes["fsdp"],
            tensor=sizes["tensor"],
            zero=asked.zero,
            micro_batch=batch // rows,
            accumulation=asked.accumulation,
            chunks=chunks,
            schedule=schedule,
            remat=asked.remat,
            executor="pipeline" if sizes["stage"] > 1 else "whole",
            sequence_parallel=True,
            state_dtype=asked.state_dtype,
        )
    config = dataclasses.replace(config, remat=layout.remat)
    return Plan(asked.scale, config, sequence, topology, layout)


def _fastest(asked, config, sequence, topology) -> RunLayout:
    batch = asked.batch or max(RECIPES[asked.scale].batch, topology.size)
    request = search.Request(
        config, sequence, batch, topology.chip, topology.size, asked.state_dtype
    )
    found = nearest.fitting(request, None)
    if not found:
        search.refuse(search.price(request, search.space(request)))
    return found[0]


def _executor(plan: Plan, devices):
    layout = plan.layout
    if layout.chips == 1:
        return ONE_DEVICE
    mesh = meshes.make({axis: getattr(layout, axis) for axis in meshes.AXES}, devices)
    schedule = schedules.written(layout.schedule, int(layout.chunks))
    return executor_over(mesh, layout.zero, plan.config.num_layers, schedule)


def _nearest(plan: Plan, tries: int) -> tuple[Plan, dict] | None:
    """The nearest plan that fits, told as it is found."""
    layout, topology = plan.layout, plan.topology
    batch = int(layout.batch)
    request = search.Request(
        plan.config, plan.sequence, batch, topology.chip, topology.size, layout.state_dtype
    )
    candidates = nearest.fitting(request, layout)
    if not candidates:
        try:
            search.refuse(search.price(request, search.space(request)))
        except UserError as error:
            print(f"\n{error}")
        return None
    for candidate in candidates[:tries]:
        config = dataclasses.replace(plan.config, remat=candidate.remat)
        other = dataclasses.replace(plan, config=config, layout=candidate)
        print(f"\ntrying {other.flags}", flush=True)
        found = verdict(other)
        print(f"it {found['verdict']}: {_gib(found['needed_bytes'])} GiB a chip")
        if found["verdict"] == FITS:
            print(f"\nThe nearest plan that fits:\n\n{told(other, found)}")
            return other, found
    print(f"\nNone of the {min(tries, len(candidates))} nearest fits; legal: more --tries.")
    return None


def told(plan: Plan, found: dict) -> str:
    """A plan and what the compiler says, as text."""
    model = f"{plan.scale} {'sparse' if plan.config.sparse_projections else 'dense'}"
    lines = [
        f"{model} on {plan.topology.size:,} chips of {plan.topology.name}, "
        f"{plan.layout.batch:,} x {plan.sequence:,} tokens a step",
        f"  {plan.layout}",
        f"  {found['verdict']}: {_gib(found['needed_bytes'])} of "
        f"{_gib(found['memory_bytes'])} GiB a chip",
    ]
    if "bytes" not in found:
        return "\n".join([*lines, f"  the compiler: {found['said']}"])
    lines += ["", _memory(plan, found), "", _flops(found), "", _collectives(found)]
    seconds = found["seconds"]
    lines += [
        "",
        f"traced in {seconds['trace']:.0f} s, compiled in {seconds['compile']:.0f} s; "
        f"{seconds['processor']:.0f} s of processor time",
    ]
    return "\n".join(lines)


def predicted(plan: Plan) -> dict[str, float]:
    """The planner's bytes a chip in the compiler's categories."""
    found = layout_memory.layout_bytes(plan.config, plan.sequence, plan.layout).categories
    return {
        "parameters": found["parameters"],
        "moments": found["moments"],
        "inputs": found["layout_tables"],
        "gradients": found["gradients"],
        "activations": found["activations"],
        "temporaries": sum(found[n] for n in ("working_copy", "working_set", "logits")),
        "program": 0,
    }


def _memory(plan, found) -> str:
    guessed = predicted(plan)
    rows = [(name, size, guessed[name]) for name, size in found["bytes"].items()]
    rows.append(("total", sum(found["bytes"].values()), sum(guessed.values())))
    lines = [f"{'GiB a chip':<14}{'compiled':>10}{'predicted':>11}"]
    lines += [f"{name:<14}{_gib(size):>10}{_gib(guess):>11}" for name, size, guess in rows]
    error = rows[-1][2] / rows[-1][1] - 1
    return "\n".join([*lines, f"{'error':<14}{'':>10}{error:>+11.1%}"])


def _flops(found) -> str:
    silent = found["kernels_without_flops"]
    said = f"{found['flops'] / 1e12:,.1f} TFLOP a chip and step"
    if silent:
        return f"{said}, without {', '.join(silent)}, which say none"
    return f"{said}; the model alone is {found['model_flops'] / found['flops']:.0%} of them"


def _collectives(found) -> str:
    lines = [f"{'a chip and step':<21}{'group':>7}{'times':>9}{'GB':>10}{'GB sent':>10}"]
    all_ = [
        hlo.Collective(c["kind"], c["group"], c["times"], c["bytes"]) for c in found["collectives"]
    ]
    for group in sorted({(c.kind, c.group) for c in all_}):
        mine = [c for c in all_ if (c.kind, c.group) == group]
        total = hlo.by_kind(mine)[group[0]]
        lines.append(
            f"{group[0]:<21}{group[1]:>7}{total['times']:>9,.0f}{total['bytes'] / 1e9:>10.2f}"
            f"{total['moved'] / 1e9:>10.2f}"
        )
    return "\n".join(lines if len(lines) > 1 else ["nothing is sent between chips"])


def _gib(size) -> str:
    return "?" if size is None else f"{size / GIB:.2f}"


def _keep(out, plan: Plan, found: dict) -> None:
    compilers = {}
    for package in ("libtpu", "jax-cuda13-plugin"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            compilers[package] = importlib.metadata.version(package)
    density = min((spec.density for spec in dict(plan.config.linears).values()), default=1.0)
    kind = f"density-{density:g}" if density < 1 else "dense"
    name = f"{plan.scale}_{kind}_{plan.topology.name}".replace(":", "-")
    measurement.keep(out, name, hardware.cpu_name(), {"compilers": compilers, **found})
