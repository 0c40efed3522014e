"""A weight that changes the product of another one."""

import dataclasses
from collections.abc import Callable
from typing import Any

from sparse_dataflow.core.weights.kind import Weight


class Wrapper(Weight):
    """A weight that changes the product of its `base`."""

    base: Weight

    def dense(self) -> Any:
        """See `Weight`; W of the base, where the wrapper does not change it."""
        return self.base.dense()

    def around(self, base: Weight) -> "Wrapper":
        """Returns the wrapper with another base; its own may be None."""
        return dataclasses.replace(self, base=base)  # type: ignore[type-var]

    def map_stored(self, function: Callable[[Weight], Weight]) -> Weight:
        return dataclasses.replace(self, base=self.base.map_stored(function))  # type: ignore[type-var]
