"""Chooses and prints what each block of a run does with its activations, before its first step."""

import dataclasses
import math
import os

import jax

from sparse_dataflow.cluster import processes
from sparse_dataflow.core.config import remat as kinds_of_remat
from sparse_dataflow.core.config.model import REMATS, ModelConfig
from sparse_dataflow.core.config.parallel import PINNED_GIB, PINNED_SETTING
from sparse_dataflow.core.config.run import RunConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import mesh as meshes
from sparse_dataflow.core.executors.executor import SINGLE_DEVICE, Executor
from sparse_dataflow.core.executors.sharded import Sharded
from sparse_dataflow.core.training.monitoring.metrics import say
from sparse_dataflow.core.training.variants import Variant, variants
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import GIB, Chip, Network
from sparse_dataflow.hardware.detect import host_memory_bytes
from sparse_dataflow.planner import memory, plan_memory, remat
from sparse_dataflow.planner.attention import runs_fused
from sparse_dataflow.planner.efficiency import EFFICIENCIES, PRIOR, own_key
from sparse_dataflow.planner.parallel_plan import ParallelPlan
from sparse_dataflow.planner.step_time import step_time

STEP_TERMS = ("head", "bubble", "sends", "state", "optimizer", "waits")
"""Terms of a step's time that are not those of blocks."""


def settled(config: RunConfig, chip: Chip, executor: Executor) -> RunConfig:
    """Returns the config with the remat that the planner chooses under `parallel.memory_limit`.

    Prints the plan.  A remat that the config has is checked against the limit and stays.  All
    processes call it and get the plan of process 0.

    Raises:
      UserError: no plan is within the limit, or the chip has no known rates or the mesh has stages.
    """
    limit = config.parallel.memory_limit_bytes
    if limit is None:
        return config
    if executor != SINGLE_DEVICE and type(executor) is not Sharded:
        raise UserError(
            f"parallel.memory_limit={config.parallel.memory_limit} with {executor.describe()}, "
            "whose blocks are all treated alike; legal with it: a mesh without stages."
        )

    models = variants(config)
    for each in models:
        for phase in each.phase_specs:
            executor.check(phase.model, each.training)

    text = processes.on_first(lambda: _decided(config, models, limit, chip, executor))
    return config.change(model__remat=text)


def _decided(config, models, limit, chip, executor) -> str:
    """Prints the plan within the limit; returns its remat."""
    try:
        costs = run_costs(models, chip, executor)
    except UserError as error:
        raise UserError(
            f"parallel.memory_limit needs the chip's rates, to plan by: {error} Legal: no "
            "parallel.memory_limit."
        ) from None
    if config.model.remat == kinds_of_remat.AUTO:
        plan = remat.choose(costs, limit, host_limit())
    else:
        loops = kinds_of_remat.loops(config.model.remat, config.model.num_layers)
        plan = remat.estimate(costs, loops)
        if plan.device_bytes > limit:
            least = math.ceil(100 * plan.device_bytes / GIB) / 100
            raise UserError(
                f"model.remat={config.model.remat[:60]} needs {least:.2f}GiB by the estimate, "
                f"above parallel.memory_limit={config.parallel.memory_limit}; legal: "
                f"{least:.2f}GiB or more, or model.remat=auto, for which the planner chooses."
            )
    if any(each.transfer is None for each in costs):
        say(f"no block is offloaded: {chip.name} has no known link to a memory of its host")
    say(f"activations within {limit / GIB:.3f} GiB: model.remat={plan.text}")
    for line in remat.table(plan, costs).splitlines():
        say(f"  {line}")
    return plan.text


def host_limit() -> float:
    """Returns the bytes of host memory that the activations of one device may take."""
    usable = host_memory_bytes() * memory.USABLE / jax.local_device_count()
    if jax.default_backend() != "gpu":
        return usable
    pinned = float(os.environ.get(PINNED_SETTING) or PINNED_GIB) * GIB
    return min(usable, pinned)


def run_costs(models: list[Variant], chip: Chip, executor: Executor) -> list[remat.BlockCosts]:
    """Returns the costs of each phase of each variant; the states of other variants are in `fixed`.

    Raises:
      UserError: the chip has no known rates.
    """
    resident = [
        max(_resident(p.model, v.training, executor, chip) for p in v.phase_specs) for v in models
    ]
    return [
        model_costs(p.model, v.training, chip, executor, sum(resident) - own)
        for v, own in zip(models, resident, strict=True)
        for p in v.phase_specs
    ]


def model_costs(
    model: ModelConfig,
    training: TrainingConfig,
    chip: Chip,
    executor: Executor = SINGLE_DEVICE,
    other_bytes: float = 0,
) -> remat.BlockCosts:
    """Returns the costs of one model; `other_bytes` of a device belong to others."""
    layers, plans = (
        model.num_layers,
        {kind: _plan(model, training, executor, kind, chip) for kind in REMATS},
    )
    estimates = {kind: _estimate(model, training, plans[kind], executor) for kind in REMATS}
    if chip.network is None:  # The differences between kinds of remat are then without links.
        chip = dataclasses.replace(chip, network=Network(2**20, math.inf, math.inf))
    efficiency = EFFICIENCIES.get(own_key(chip.family), PRIOR)
    times = {
        # The optimizer is no part of a block, and Muon's needs rates that a CPU's chip lacks.
        kind: step_time(
            model,
            training.sequence,
            dataclasses.replace(plan, optimizer="adamw"),
            chip,
            efficiency,
        )
        for kind, plan in plans.items()
    }
    block = {
        kind: sum(float(s) for name, s in time.terms.items() if name not in STEP_TERMS) / layers
        for kind, time in times.items()
    }
    sections = times["none"].sections
    forward = sum(float(s.seconds) for name, s in sections.items() if name != "head")
    forward *= training.micro_batches
    recompute = {kind: max(seconds - block["none"], 0.0) for kind, seconds in block.items()}
    # What a block keeps: its activations, and with "none" its weights in the compute dtype.
    least = float(min(each.working_copy for each in estimates.values()))
    tokens = plans["none"].micro_batch * training.sequence
    ends = float(tokens * plan_memory.gathered_residual(model, plans["none"]))
    saved = {
        kind: float(each.activations - ends + each.working_copy - least) / layers
        for kind, each in estimates.items()
    }
    offloaded = saved["dots"]
    largest = max(estimates.values(), key=_rest)
    parameters = float(estimates["none"].parameters)
    blocks = 1 - memory.embeddings(model) / memory.parameter_count(model)
    seconds = None
    if chip.host_bandwidth:
        seconds = training.micro_batches * offloaded / chip.host_bandwidth
    return remat.BlockCosts(
        layers=layers,
        forward=forward,
        backward=max(block["none"] - forward, 0.0),
        recompute=recompute | {"offload": recompute["dots"]},
        fixed=other_bytes + _rest(largest) + ends + least,
        saved=saved | {"offload": 0.0},
        offloaded=offloaded,
        transfer=seconds,
        copied=parameters * blocks,
    )


def _rest(estimate):
    return float(estimate.total - estimate.activations - estimate.working_copy)


def _plan(model, training, executor, kind, chip):
    sharded = isinstance(executor, Sharded)
    sizes = executor.mesh.shape if sharded else dict.fromkeys(meshes.AXES, 1)
    rows = training.micro_batches * sizes["data"] * sizes["fsdp"]
    return ParallelPlan(
        **sizes,
        zero=executor.zero if sharded else 0,
        experts="exchange" if sharded and executor.exchange else "gather",
        micro_batch=training.batch // rows,
        accumulation=training.micro_batches,
        remat=kind,
        sequence_parallel=sharded,
        fused_attention=runs_fused(model, chip, jax.default_backend() == "cpu"),
        state_dtype=training.state_dtype,
        optimizer=training.optimizer,
    )


def _estimate(model, training, plan, executor):
    model = dataclasses.replace(model, remat=plan.remat)
    if executor == SINGLE_DEVICE:
        return memory.training_config_bytes(model, training, plan.fused_attention)
    return plan_memory.plan_bytes(model, training.sequence, plan)


def _resident(model, training, executor, chip):
    plan = _plan(model, training, executor, "none", chip)
    each = _estimate(model, training, plan, executor)
    return float(each.parameters + each.moments + each.layout_tables)
