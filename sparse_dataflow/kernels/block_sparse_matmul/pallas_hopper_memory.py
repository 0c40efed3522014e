"""Shared memory and warp groups of a Hopper GPU: one group fills a ring of stages, two empty it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from sparse_dataflow.kernels.block_sparse_matmul.tuning_hopper import CONSUMERS

CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40
"""Registers a thread; 2 x 128 x 232 + 128 x 40 of the 65,536 of a multiprocessor."""


def run_groups(
    consume: Callable[[jax.Array], Any], produce: Callable[[], jax.Array], empty: Any, stages: int
) -> None:
    """Two warp groups multiply, a third copies for them; each with the registers that it needs.

    Args:
      consume: of a consumer's number; returns when its last result is on its way.
      produce: returns how many stages it has filled.
      empty: the barriers on which consumers release stages.
      stages: of the ring.
    """
    group = lax.axis_index("group")

    def consumer():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        consume(group)
        plgpu.wait_smem_to_gmem(0)

    def producer():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        total = produce()

        # A cluster's last arrivals must find this program still there, and no barrier may be left
        # with a phase that nobody saw.
        @pl.loop(lax.max(0, total - stages), total)
        def _(step):
            plgpu.barrier_wait(empty.at[lax.rem(step, stages)])

    lax.cond(group < CONSUMERS, consumer, producer)


def transforms(columns: int, dtype) -> tuple:
    """The layout that TMA writes and wgmma reads: tiles of 8 rows, swizzled over their bytes."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * itemsize * 8)
    return (
        plgpu.TilingTransform((8, swizzle // itemsize)),
        plgpu.SwizzleTransform(swizzle),
    )


def swizzled(shape: tuple[int, ...], dtype, columns: int | None = None) -> Any:
    """A scratch array of shared memory in the layout of rows of `columns`, or of its own."""
    return plgpu.SMEM(shape, dtype, transforms=transforms(columns or shape[-1], dtype))
