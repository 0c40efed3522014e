"""Programs that are lowered and compiled in threads, before anything is timed."""

import concurrent.futures
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

Lower = Callable[[], jax.stages.Lowered]


class ProgramPool:
    """Compiled programs by name.

    A compiler for GPUs times products on the device, so no measurement may run beside it: `settle`
    first, then measure.
    """

    def __init__(self, threads: int):
        self._threads = concurrent.futures.ThreadPoolExecutor(threads)
        self._lower: dict[str, Lower] = {}
        self._programs: dict[str, concurrent.futures.Future] = {}
        self.seconds: dict[str, float] = {}

    def add(self, programs: Mapping[str, Lower]) -> None:
        """Starts to compile programs; the first that were added are compiled first."""
        for name, lower in programs.items():
            if name not in self._lower:
                self._lower[name] = lower
                self._programs[name] = self._threads.submit(self._compiled, name)

    def settle(self, deadline: float) -> list[str]:
        """Waits until nothing is being compiled.

        Args:
          deadline: on the clock of `time.monotonic`; programs that have not begun by then are left
            to `get`.

        Returns:
          Names of the programs that are left.
        """
        left = max(0.0, deadline - time.monotonic())
        concurrent.futures.wait(self._programs.values(), left)
        skipped = [name for name, program in self._programs.items() if program.cancel()]
        concurrent.futures.wait(self._programs.values())
        return skipped

    def get(self, name: str) -> jax.stages.Compiled:
        """Returns a program, which is compiled here if `settle` left it; raises what its compiler
        raised."""
        if self._programs[name].cancelled():
            self._programs[name] = self._threads.submit(self._compiled, name)
        return self._programs[name].result()

    def _compiled(self, name: str) -> Any:
        start = time.perf_counter()
        program = self._lower[name]().compile()
        self.seconds[name] = time.perf_counter() - start
        return program
