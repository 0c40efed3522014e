"""An abstract A100 to trace for, and the interpreter of its kernels."""

import contextlib
import functools
from unittest import mock

from jax.experimental import pallas as pl
from simulated_hopper import targeted_gpu


@contextlib.contextmanager
def simulated_triton():
    """Trace for this GPU and interpret its kernels."""
    interpreted = functools.partial(pl.pallas_call, interpret=True)
    with (
        targeted_gpu("NVIDIA A100-SXM4-80GB", 108),
        mock.patch.object(pl, "pallas_call", interpreted),
    ):
        yield
