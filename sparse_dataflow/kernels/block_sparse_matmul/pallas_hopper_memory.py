"""Shared memory and registers of a Hopper GPU, as its copy engine and tensor cores want them."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40
"""Registers a thread; 2 x 128 x 232 + 128 x 40 of the 65,536 of a multiprocessor."""


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
