"""Checks before a run that the device memory can train its models, and names settings that fit."""

import dataclasses
import math

import jax

from sparse_dataflow.core.training.phases import Variant
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import GIB
from sparse_dataflow.planner import memory, plan_memory
from sparse_dataflow.runs.run_config import SIZES, RunConfig, rescaled
from sparse_dataflow.runs.variants import variants as variants_of


def needed_bytes(variants: list[Variant]) -> int:
    """Returns the bytes of training the variants alternately on one device.

    A variant with several phases counts with its largest.
    """
    flash = jax.default_backend() != "cpu"
    plans = [
        [plan_memory.training_bytes(p.model, v.training, flash) for p in v.phase_specs]
        for v in variants
    ]
    return int(plan_memory.alternating_bytes(plans))


def fitting(variants: list[Variant], memory_bytes: int) -> tuple[str, int] | None:
    """Returns (remat, micro-batches) with which the variants fit, or None.

    Prefers the fewest micro-batches, and the remat that the variants have.
    """
    batch, micro = variants[0].training.batch, variants[0].training.micro_batches
    for count in (n for n in range(micro, batch + 1) if batch % n == 0):
        for remat in dict.fromkeys((variants[0].model.remat, "full")):
            need = needed_bytes(_with(variants, remat, micro_batches=count))
            if need <= memory_bytes * memory.USABLE:
                return remat, count
    return None


def refuse_too_large(config: RunConfig, variants: list[Variant], memory_bytes: int | None) -> None:
    """Checks that one device can train the variants.

    Args:
      config: config of the run.
      variants: models of the run.
      memory_bytes: memory of the device; None skips the check.

    Raises:
      UserError: it cannot; names both sizes, and settings or a scale that fit.
    """
    if memory_bytes is None:
        return
    need = needed_bytes(variants)
    if need <= memory_bytes * memory.USABLE:
        return
    model = f"--scale={config.run.scale}" if config.run.scale else config.run.init_from
    raise UserError(
        f"Training {model} needs {math.ceil(need / GIB):,} GiB with these "
        f"settings, and this machine has {math.floor(memory_bytes / GIB):,}; "
        f"{_advice(config, variants, memory_bytes)}."
    )


def _advice(config, variants, memory_bytes):
    for flag, candidate in (
        ("", variants),
        ("--set training.state_dtype=bfloat16 ", _with(variants, state_dtype="bfloat16")),
        ("--twin=no ", variants[:1]),
    ):
        if fit := fitting(candidate, memory_bytes):
            return f"it fits with {flag}{_settings(fit)}"
    # Weights of --init_from have no scale.
    scales = list(SIZES)
    smaller = scales[: scales.index(config.run.scale)] if config.run.scale else []
    for scale in reversed(smaller):
        if fit := _fitting_scale(config, scale, memory_bytes):
            return f"the largest scale that fits is --scale={scale} {_settings(fit)}"
    return "no smaller scale fits with these settings"


def _settings(fit):
    return f"--set model.remat={fit[0]} --set training.micro_batches={fit[1]}"


def _fitting_scale(config, scale, memory_bytes):
    try:
        return fitting(variants_of(rescaled(config, scale)), memory_bytes)
    except UserError:  # These settings describe no model of that scale.
        return None


def _with(variants, remat=None, **training):
    return [
        dataclasses.replace(
            v,
            model=dataclasses.replace(v.model, remat=remat or v.model.remat),
            training=dataclasses.replace(v.training, **training),
        )
        for v in variants
    ]
