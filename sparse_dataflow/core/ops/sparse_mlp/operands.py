"""The operands of a block-sparse MLP."""

from typing import Any, NamedTuple

import jax

from sparse_dataflow.core.layouts.layout import LayoutTables


class Operands(NamedTuple):
    """Operands of activation(x W_in + bias) W_out, or (activation(x W_gate) * x W_in) W_out.

    Attributes:
      x: float [tokens, in_features].
      values_in: stored blocks of W_in, [nnz, block, block].
      bias_in: [hidden_features], or None.
      values_out: stored blocks of W_out.
      tables_in: layout of W_in, and of W_gate; see `block_sparse_matmul`.
      tables_out: layout of W_out.
      values_gate: stored blocks of W_gate, or None.
      activation: such as "gelu" or "silu".
    """

    x: Any
    values_in: Any
    bias_in: Any
    values_out: Any
    tables_in: LayoutTables
    tables_out: LayoutTables
    values_gate: Any = None
    activation: str = "gelu"

    @property
    def hidden(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the hidden layer."""
        features = len(self.tables_in.in_index) * self.values_in.shape[-1]
        return jax.ShapeDtypeStruct((*self.x.shape[:-1], features), self.x.dtype)

    def plain_refusal(self) -> str:
        """Returns why the MLP is no GELU without a gate; empty if it is."""
        plain = self.values_gate is None and self.activation == "gelu" and self.bias_in is not None
        return "" if plain else "it has a GELU of a product with a bias, and no gate."
