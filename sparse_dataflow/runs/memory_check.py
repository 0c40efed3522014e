"""Refuses at start-up what this machine's memory cannot train, and names what it can."""

import dataclasses
import math

import jax
from sparse_dataflow.config.presets import SIZES

from sparse_dataflow.config.presets import SIZES, rescaled
from sparse_dataflow.config.run import RunConfig
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.detect import GIB
from sparse_dataflow.planning import memory
from sparse_dataflow.training.variants import Variant
from sparse_dataflow.training.variants import variants as variants_of

def needed_bytes(variants: list[Variant]) -> int:
    """Memory of training the variants by turns on one device.

    A variant that trains several models in turn counts as the one that needs most.
    """
    flash = jax.default_backend() != "cpu"
    plans = [
        max(
            (
                memory.training_config_bytes(phase.model, v.training, flash)
                for phase in v.phase_specs
            ),
            key=lambda plan: plan.total,
        )
        for v in variants
    ]
    return memory.alternating_bytes(plans)


def fitting(variants: list[Variant], memory_bytes: int) -> tuple[str, int] | None:
    """(remat, accumulation) under which the variants fit, with the fewest micro-batches, or None.

    What the variants have is left as it is where that fits.
    """
    batch, micro = variants[0].training.batch, variants[0].training.micro_batches
    for parts in (n for n in range(micro, batch + 1) if batch % n == 0):
        for remat in dict.fromkeys((variants[0].model.remat, "full")):
            if (
                needed_bytes(_with(variants, remat, micro_batches=parts))
                <= memory_bytes * memory.USABLE
            ):
                return remat, parts
    return None


def refuse_too_large(config: RunConfig, variants: list[Variant], memory_bytes: int | None) -> None:
    """Refuses variants that the memory cannot train.

    Args:
      config: of the run; its settings are named in the answer.
      variants: what they describe.
      memory_bytes: of one device; nothing is refused where it is None.

    Raises:
      UserError: with both figures, and flags or a scale that fit.
    """
    if memory_bytes is None:
        return
    need = needed_bytes(variants)
    if need <= memory_bytes * memory.USABLE:
        return
    raise UserError(
        f"Training --scale={config.run.scale} needs {math.ceil(need / GIB):,} GiB with these settings, "
        f"and this machine has {math.floor(memory_bytes / GIB):,}; "
        f"{_advice(config, variants, memory_bytes)}."
    )


def _advice(config, variants, memory_bytes):
    fit = fitting(variants, memory_bytes)
    if fit:
        return f"it fits with {_settings(fit)}"
    rounded = _with(variants, state_dtype="bfloat16")
    fit = fitting(rounded, memory_bytes)
    if fit:
        return f"it fits with --set training.state_dtype=bfloat16 {_settings(fit)}"
    fit = fitting(variants[:1], memory_bytes) if len(variants) > 1 else None
    if fit:
        return f"it fits with --twin=no {_settings(fit)}"
    smaller = list(SIZES)[: list(SIZES).index(config.run.scale)]
    for scale in reversed(smaller):
        fit = _fitting_scale(config, scale, memory_bytes)
        if fit:
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
