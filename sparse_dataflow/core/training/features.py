"""Stored features: what a side network reads of the frozen layers, computed once for each row.

The inputs of the layers of a frozen model depend on its weights and on the tokens of a row alone.
The first step that reads a row computes them and stores them as a derived file; later steps, epochs
and runs read them, and compute the side network and the head alone.  Rows are found by their
tokens, so an order, a seed or a mixture of old and new text changes nothing.

A row is stored as `side.packed` has it: int8 [T, L + 1, D + 4] or uint16 [T, L + 1, D].
"""

import dataclasses
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.model import side
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.files import console, derived, storage
from sparse_dataflow.files.errors import first_line

FORM = 1
"""Number of the form of a row; another one is another file."""

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class StoredFeatures:
    """The stored features of one frozen model.

    Attributes:
      model: with the side network.
      dtype: "int8" or "bfloat16".
      store: folder of the derived files.
    """

    model: ModelConfig
    dtype: str
    store: Path

    @property
    def base(self) -> ModelConfig:
        """The frozen model, as it computes its layers."""
        return dataclasses.replace(self.model, side_width=0, remat="none")

    @property
    def row_shape(self) -> tuple[int, int, np.dtype]:
        """Places, numbers of a place and their dtype, for each token."""
        width = self.model.d_model
        if self.dtype == "int8":
            return self.model.num_layers + 1, width + 4, np.dtype(np.int8)
        return self.model.num_layers + 1, width, np.dtype(np.uint16)

    def example(self, batch: Batch) -> Batch:
        """Returns the batch with features of zeros."""
        places, numbers, dtype = self.row_shape
        shape = *batch.tokens.shape, places, numbers
        return dataclasses.replace(batch, features=np.zeros(shape, dtype))

    def program(self) -> Callable[[Batch, object], Batch]:
        """Returns (batch, frozen weights) -> the batch with its features, and says their size."""
        places, numbers, dtype = self.row_shape
        say(f"stored features: {places * numbers * dtype.itemsize:,} bytes a token in {self.store}")

        @jax.jit
        def compute(rest, tokens):
            weights = weights_of(self.base, {}, rest)
            inputs = whole.layer_inputs(self.base, weights, Batch(tokens))
            return side.packed(jnp.stack(inputs, axis=2), self.dtype)

        origin: dict = {}

        def with_features(batch, rest):
            if not origin:
                origin.update(self._origin(rest))
            tokens = np.asarray(batch.tokens)
            rows = [{**origin, "tokens": row.tobytes()} for row in tokens]
            stored = [self._read(row) for row in rows]
            if any(features is None for features in stored):
                computed = np.asarray(compute(rest, batch.tokens))
                for number, features in enumerate(stored):
                    if features is None:
                        stored[number] = computed[number]
                        self._write(rows[number], computed[number])
            return dataclasses.replace(batch, features=np.stack(stored))

        return with_features

    def _origin(self, rest):
        """Returns all that decides the features of a row, but its tokens."""
        digest = hashlib.sha256()
        for path, leaf in jax.tree_util.tree_leaves_with_path(rest):
            array = np.ascontiguousarray(jax.device_get(leaf))
            digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
            digest.update(array.tobytes())
        return {
            "form": FORM,
            "version": console.version(),
            "model": self.base.to_json(),
            "weights": digest.hexdigest(),
            "dtype": self.dtype,
        }

    def _read(self, origin):
        path = derived.place(self.store, "row", origin, ".npy")
        if derived.read(path, origin) is None:
            return None
        return np.load(storage.regular(path), allow_pickle=False)

    def _write(self, origin, features):
        def make(path):
            with path.open("wb") as file:
                np.save(file, features)

        try:
            derived.derive(self.store, "row", origin, make, ".npy")
        except OSError as error:
            _LOG.warning("features of a row are not stored: %s", first_line(error))
