"""Compiles a parallel plan for chips that are not here, prints the result, and writes it."""

import contextlib
import dataclasses
import importlib.metadata
from typing import Any

from sparse_dataflow.commands import measurement
from sparse_dataflow.commands.planning import plan_rows
from sparse_dataflow.compile import account, topologies, traced
from sparse_dataflow.compile import programs as compile
from sparse_dataflow.core.config import remat
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import mesh as meshes
from sparse_dataflow.core.executors.executor import SINGLE_DEVICE
from sparse_dataflow.core.training import cost
from sparse_dataflow.files import output
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import detect as hardware
from sparse_dataflow.hardware.chips import GIB
from sparse_dataflow.pipeline import action_tables
from sparse_dataflow.pipeline.pipelined import executor_over
from sparse_dataflow.planner import plan_memory, search, settle_advice
from sparse_dataflow.planner.memory import USABLE
from sparse_dataflow.planner.parallel_plan import ParallelPlan

FITS, TOO_LARGE = "fits", "does not fit"


@dataclasses.dataclass(frozen=True)
class CompilePlan:
    """A model, chips, and the parallel plan that is compiled.

    Attributes:
      config: the model, with its remat.
      sequence: tokens per sequence.
    """

    scale: str
    config: ModelConfig
    sequence: int
    topology: topologies.Topology
    parallel: ParallelPlan

    def with_parallel(self, parallel: ParallelPlan) -> "CompilePlan":
        """The same model and chips under another parallel plan."""
        config = dataclasses.replace(self.config, remat=parallel.remat)
        return dataclasses.replace(self, config=config, parallel=parallel)

    @property
    def request(self) -> search.Request:
        """The search for other parallel plans of the same batch."""
        return search.Request(
            self.config,
            self.sequence,
            int(self.parallel.batch),
            self.topology.chip,
            self.topology.size,
            self.parallel.state_dtype,
            self.parallel.optimizer,
            largest_feature=int(self.parallel.feature),
        )

    @property
    def flags(self) -> str:
        """The flags of `experiments.compile_plan` that describe it."""
        parallel, slices = self.parallel, self.topology.slices
        sparse = next(iter(dict(self.config.linears).values()), None)
        schedule = action_tables.format_rule(parallel.schedule, int(parallel.chunks))
        flags = {
            "scale": self.scale,
            "density": sparse and sparse.density,
            "block": sparse and sparse.block,
            "topology": self.topology.name,
            "slices": slices if slices > 1 else None,
            "mesh": parallel.mesh,
            "zero": parallel.zero,
            "batch": parallel.batch,
            "accumulation": parallel.accumulation,
            "remat": parallel.remat,
            "schedule": schedule if parallel.stage > 1 else None,
            "state_dtype": parallel.state_dtype if parallel.state_dtype != "float32" else None,
            "optimizer": parallel.optimizer if parallel.optimizer != "adamw" else None,
        }
        return " ".join(f"--{name}={text}" for name, text in flags.items() if text is not None)


def report_compilation(options) -> int:
    """Compiles, prints and writes; returns the exit status, 0 where the plan fits.

    Args:
      options: of `experiments.compile_plan`.

    Raises:
      UserError: no such topology, mesh or batch, or no compiler here.
    """
    plan = plan_of(options)
    if reason := topologies.missing_compiler(plan.topology):
        raise UserError(f"--topology={options.topology}: {reason}")
    if options.account:
        accounted = account_of(plan)
        print(account_text(plan, accounted))
        _write(options.out, plan, accounted, "account")
        return 0
    result = verdict(plan)
    print(report(plan, result))
    if result["verdict"] == FITS:
        _write(options.out, plan, result)
        return 0
    near = _nearest(plan, options.tries)
    if near is not None:
        _write(options.out, *near)
    return 1


def account_of(plan: CompilePlan) -> dict:
    """Compiles two shallow steps of a plan for one chip; returns where the whole step's bytes go:
    the fields of a result file.

    Raises:
      UserError: the plan has several chips.
    """
    topology, layers = plan.topology, plan.config.num_layers
    if topology.size > 1:
        raise UserError(
            f"--account with --topology={topology.name}; legal: one chip, as in h200:1, v5p:1x1x1 "
            "and v6e:1x1."
        )
    device = topologies.devices(topology)[0]
    kinds = remat.kinds(plan.config.remat, layers)
    steps = [
        compile.compile_step(
            dataclasses.replace(plan.config, num_layers=depth, remat=kinds[0]),
            _training(plan),
            SINGLE_DEVICE,
            device,
        )
        for depth in (account.SHALLOW, account.DEEP)
    ]
    # All layers are alike, so a step's traffic is linear in their number: two shallow steps give
    # the line.
    shallow, deep = (account.account(step.program.as_text()) for step in steps)
    traffic = account.scaled(shallow, deep, layers)
    forward = cost.flops_per_token(plan.config, plan.sequence, training=False).attention
    backward = ("dkv", "dq") if topology.platform == "tpu" else ("bwd",)
    passes = 1 + sum(traced.ATTENTION[name] for name in backward) / traced.ATTENTION["fwd"]
    passes += kinds[0] in ("full", "offload")
    attention = forward * passes * int(plan.parallel.batch) * plan.sequence
    # The difference of both steps has neither the head nor the embedding.
    layer_flops = layers * (steps[1].flops - steps[0].flops) / (account.DEEP - account.SHALLOW)
    flops = {"products": layer_flops - attention, "attention": attention}
    chip = topology.chip
    estimate = account.seconds(
        traffic, flops, chip, plan.config.compute_dtype, account.rates(topology, plan.config)
    )
    return {
        "plan": plan.flags,
        "parts": {
            section: dataclasses.asdict(moved) | {"estimated_seconds": seconds, "bound": bound}
            for section, moved in traffic.items()
            for seconds, bound in [estimate[section]]
        },
        "bytes": sum(moved.bytes for moved in traffic.values()),
        "bytes_outside_products_and_attention": sum(
            moved.bytes for name, moved in traffic.items() if name not in flops
        ),
        "estimated_seconds": sum(seconds for seconds, _ in estimate.values()),
        "compile_seconds": [round(step.compile_seconds, 1) for step in steps],
    }


def account_text(plan: CompilePlan, result: dict) -> str:
    """Returns the result of `account_of` as text."""
    head = (
        f"{plan.scale} {'sparse' if plan.config.sparse_projections else 'dense'} on "
        f"{plan.topology.name}, {plan.parallel.batch:,} x {plan.sequence:,} tokens a step, "
        f"{plan.config.num_layers} layers, remat {plan.config.remat}"
    )
    compiled = ", ".join(f"{seconds:.0f} s" for seconds in result["compile_seconds"])
    rest = result["bytes_outside_products_and_attention"] / 1e9
    table = output.aligned(account.table(result["parts"]))
    return (
        f"{head}\n\n{table}\n\n{rest:.1f} GB outside of products and attention; "
        f"compiled in {compiled}"
    )


def _training(plan):
    parallel = plan.parallel
    return TrainingConfig(
        1,
        int(parallel.batch),
        plan.sequence,
        int(parallel.accumulation),
        optimizer=parallel.optimizer,
        state_dtype=parallel.state_dtype,
    )


def verdict(plan: CompilePlan) -> dict:
    """Compiles a plan; returns the fields of its result file.

    Raises:
      UserError: the parallel plan does not fit this model or these chips.
    """
    parallel, topology = plan.parallel, plan.topology
    devices = topologies.devices(topology)
    training = _training(plan)
    executor = _executor(plan, devices)
    flops = cost.flops_per_token(plan.config, plan.sequence)
    share = parallel.batch * plan.sequence / parallel.chips
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
        "kernels_without_flops": list(step.uncounted),
        "collectives": [
            dataclasses.asdict(c) | {"moved": round(c.moved)} for c in step.collectives
        ],
        "seconds": {
            "trace": round(step.trace_seconds, 1),
            "compile": round(step.compile_seconds, 1),
            "processor": round(step.cpu_seconds, 1),
        },
    }


def plan_of(options) -> CompilePlan:
    """Returns the plan that the options of `experiments.compile_plan` describe.

    Raises:
      UserError: no such topology, axes that do not make up its chips, or a batch that they do not
        divide.
    """
    topology = topologies.parse(options.topology, options.slices)
    plan = CompilePlan(
        options.scale, options.model, options.sequence_length, topology, ParallelPlan(remat="full")
    )
    if options.mesh == "auto":
        return plan.with_parallel(_fastest(options, topology))
    sizes: dict[str, Any] = meshes.parse(options.mesh, topology.size)
    rows = sizes["data"] * sizes["fsdp"] * options.accumulation
    batch = options.batch or rows * max(1, options.scale_batch // rows)
    if batch % rows:
        raise UserError(
            f"--batch={batch} cannot be cut into {options.accumulation} micro-batches over "
            f"data:{sizes['data']} x fsdp:{sizes['fsdp']}; legal: multiples of {rows}."
        )
    schedule, chunks = action_tables.parse(options.schedule)
    parallel = ParallelPlan(
        **sizes,
        zero=options.zero,
        micro_batch=batch // rows,
        accumulation=options.accumulation,
        chunks=chunks,
        schedule=schedule,
        remat=options.remat,
        sequence_parallel=True,
        tpu=topology.chip.is_tpu,
        state_dtype=options.state_dtype,
        optimizer=options.optimizer,
    )
    return plan.with_parallel(parallel)


def _fastest(options, topology) -> ParallelPlan:
    batch = options.batch or max(options.scale_batch, topology.size)
    request = search.Request(
        options.model,
        options.sequence_length,
        batch,
        topology.chip,
        topology.size,
        options.state_dtype,
        options.optimizer,
    )
    return settle_advice.fitting_plans(request, None)[0]


def _executor(plan: CompilePlan, devices):
    parallel = plan.parallel
    if parallel.chips == 1:
        return SINGLE_DEVICE
    mesh = meshes.make({axis: getattr(parallel, axis) for axis in meshes.AXES}, devices)
    schedule = action_tables.format_rule(parallel.schedule, int(parallel.chunks))
    layers, exchange = plan.config.num_layers, parallel.exchanges
    return executor_over(mesh, parallel.zero, layers, schedule, exchange)


def _nearest(plan: CompilePlan, tries: int) -> tuple[CompilePlan, dict] | None:
    """The nearest plan that fits, with its verdict; prints each plan that is tried."""
    try:
        candidates = settle_advice.fitting_plans(plan.request, plan.parallel)
    except UserError as error:
        print(f"\n{error}")
        return None
    for candidate in candidates[:tries]:
        other = plan.with_parallel(candidate)
        print(f"\ntrying {other.flags}", flush=True)
        result = verdict(other)
        print(f"it {result['verdict']}: {_gib(result['needed_bytes'])} GiB a chip")
        if result["verdict"] == FITS:
            print(f"\nThe nearest plan that fits:\n\n{report(other, result)}")
            return other, result
    print(f"\nNone of the {min(tries, len(candidates))} nearest fits; legal: more --tries.")
    return None


def report(plan: CompilePlan, result: dict) -> str:
    """Returns a plan and the verdict of the compiler as text."""
    model = f"{plan.scale} {'sparse' if plan.config.sparse_projections else 'dense'}"
    lines = [
        f"{model} on {plan.topology.size:,} chips of {plan.topology.name}, "
        f"{plan.parallel.batch:,} x {plan.sequence:,} tokens a step",
        f"  {plan.parallel}",
        f"  {result['verdict']}: {_gib(result['needed_bytes'])} of "
        f"{_gib(result['memory_bytes'])} GiB a chip",
    ]
    if words := plan_rows.slow_products(plan.config, plan.topology.chip):
        lines.append(f"  {words}")
    if "bytes" not in result:
        return "\n".join([*lines, f"  the compiler: {result['said']}"])
    lines += ["", _memory(plan, result), "", _flops(result), "", _collectives(result)]
    seconds = result["seconds"]
    lines += [
        "",
        f"traced in {seconds['trace']:.0f} s, compiled in {seconds['compile']:.0f} s; "
        f"{seconds['processor']:.0f} s of processor time",
    ]
    return "\n".join(lines)


def predicted_bytes(plan: CompilePlan) -> dict[str, float]:
    """Returns the planner's bytes a chip in the compiler's categories."""
    sizes: dict[str, float] = {
        **plan_memory.plan_bytes(plan.config, plan.sequence, plan.parallel).categories
    }
    if plan.parallel.chips == 1 and plan.parallel.remat == "none":
        # The compiler stacks the copy of the blocks' weights by layer, as it does activations.
        block_share = 1 - cost.embeddings(plan.config) / cost.parameter_count(plan.config)
        sizes["activations"] += sizes["working_copy"] * block_share
        sizes["working_copy"] *= 1 - block_share
    return {
        "parameters": sizes["parameters"],
        "moments": sizes["moments"],
        "inputs": sizes["layout_tables"],
        "gradients": sizes["gradients"],
        "activations": sizes["activations"],
        "temporaries": sum(sizes[n] for n in ("working_copy", "working_set", "logits")),
        "program": 0,
    }


def _memory(plan, result) -> str:
    predicted = predicted_bytes(plan)
    rows = [(name, size, predicted[name]) for name, size in result["bytes"].items()]
    rows.append(("total", sum(result["bytes"].values()), sum(predicted.values())))
    lines = [(name, _gib(size), _gib(guess)) for name, size, guess in rows]
    error = rows[-1][2] / rows[-1][1] - 1
    head = ("GiB a chip", "compiled", "predicted")
    return output.aligned([head, *lines, ("error", "", f"{error:+.1%}")])


def _flops(result) -> str:
    total = f"{result['flops'] / 1e12:,.1f} TFLOP a chip and step"
    if uncounted := result["kernels_without_flops"]:
        return f"{total}, without {', '.join(uncounted)}, which report none"
    return f"{total}; the model alone is {result['model_flops'] / result['flops']:.0%} of them"


def _collectives(result) -> str:
    if not result["collectives"]:
        return "nothing is sent between chips"
    lines = [("a chip and step", "group", "times", "GB", "GB sent")]
    for kind, group in sorted({(c["kind"], c["group"]) for c in result["collectives"]}):
        alike = [c for c in result["collectives"] if (c["kind"], c["group"]) == (kind, group)]
        times = sum(c["times"] for c in alike)
        size = sum(c["times"] * c["bytes"] for c in alike) / 1e9
        moved = sum(c["moved"] for c in alike) / 1e9
        lines.append((kind, f"{group}", f"{times:,.0f}", f"{size:.2f}", f"{moved:.2f}"))
    return output.aligned(lines)


def _gib(size) -> str:
    return "?" if size is None else f"{size / GIB:.2f}"


def _write(out: str, plan: CompilePlan, result: dict, kind_of_result: str = "") -> None:
    compilers = {}
    for package in ("libtpu", "jax-cuda13-plugin"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            compilers[package] = importlib.metadata.version(package)
    density = min((spec.density for spec in dict(plan.config.linears).values()), default=1.0)
    kind = f"density-{density:g}" if density < 1 else "dense"
    words = plan.scale, kind, plan.topology.name, kind_of_result
    name = "_".join(filter(None, words)).replace(":", "-")
    measurement.keep(out, name, hardware.cpu_name(), [{"compilers": compilers, **result}])
