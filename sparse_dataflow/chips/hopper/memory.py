"""Warp groups and shared memory on a Hopper GPU: one producer fills a ring for two consumers."""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from sparse_dataflow.chips.hopper.tuning import CONSUMERS

CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40
"""Registers per thread: 2 x 128 x 232 + 128 x 40 of a multiprocessor's 65,536."""

Ref = TypeVar("Ref")
"""A place in shared memory: its shape outside of the kernel, the ref inside."""


def run_groups(
    stages: int, empty: jax.Ref, over: Callable, consume: Callable, produce: Callable
) -> None:
    """Run two consumer warp groups and one producer warp group, each with its registers.

    Args:
      stages: length of the ring.
      empty: barriers on which consumers release stages.
      over: (act) calls `act` on each piece of work, and returns the stages of all.
      consume: (index of the consumer, *piece) multiplies and writes.
      produce: (*piece) fills the stages.
    """
    group = lax.axis_index("group")

    def consumer():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        over(functools.partial(consume, group))
        # Shared memory must outlive the copies from it.
        plgpu.wait_smem_to_gmem(0)

    def producer():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        total = over(produce)

        # The program must outlive the cluster's last arrivals, and every barrier phase must be
        # waited for.
        @pl.loop(lax.max(0, total - stages), total)
        def _(step):
            plgpu.barrier_wait(empty.at[lax.rem(step, stages)])

    lax.cond(group < CONSUMERS, consumer, producer)


def transforms(columns: int, dtype) -> tuple:
    """Return the transforms that TMA and wgmma share: tiles of 8 rows, swizzled."""
    itemsize = jnp.dtype(dtype).itemsize
    # In bits.
    swizzle = plgpu.find_swizzle(columns * itemsize * 8)
    return (
        plgpu.TilingTransform((8, swizzle // itemsize)),
        plgpu.SwizzleTransform(swizzle),
    )


def swizzled(shape: tuple[int, ...], dtype, columns: int | None = None) -> pl.MemoryRef:
    """Return a shared-memory scratch array, swizzled for rows of `columns` (default: last axis)."""
    return plgpu.SMEM(shape, dtype, transforms=transforms(columns or shape[-1], dtype))
