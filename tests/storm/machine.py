"""The machine of the storm: virtual devices, of which a case uses the first ones."""

import contextlib
import importlib
import os
from collections.abc import Iterator
from unittest import mock

import jax

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import detect

DEVICES = 4

IMPORTED = (
    "datasets", "pyarrow.parquet", "orbax.checkpoint", "safetensors.numpy",
    "sparse_dataflow.commands.models.evaluate", "sparse_dataflow.commands.train",
    "experiments.evaluate", "experiments.export", "experiments.generate",
    "experiments.gpt13b_sparse",
)  # fmt: skip
"""Imported once, before the processes of the draws begin."""


def prepare(programs: str) -> None:
    """Sets what jax reads when its runtime starts: virtual devices, quick compilation, and a folder
    of compiled programs; and the rates of this machine."""
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={DEVICES}".strip()
    for name, value in {
        "jax_platforms": "cpu",
        "jax_disable_most_optimizations": True,
        "jax_compilation_cache_dir": programs,
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }.items():
        jax.config.update(name, value)
    for name in IMPORTED:
        importlib.import_module(name)
    # Measuring takes the time of some draws, and makes plans depend on what else the machine does.
    detect.measure_cpu = lambda dtype="float32": 1e11
    detect.measure_cpu_bandwidth = lambda: 1e10


@contextlib.contextmanager
def with_devices(count: int) -> Iterator[None]:
    """Inside, jax says that there are so many devices."""
    every = jax.devices()
    if count > len(every):
        raise UserError(f"The storm has {len(every)} devices; legal: a smaller mesh.")
    first = every[:count]
    with contextlib.ExitStack() as stack:
        for name, value in {
            "devices": lambda *_, **__: first,
            "local_devices": lambda *_, **__: first,
            "device_count": lambda *_, **__: count,
            "local_device_count": lambda *_, **__: count,
        }.items():
            stack.enter_context(mock.patch.object(jax, name, value))
        yield
