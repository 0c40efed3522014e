"""All kinds of weights.  Whoever asks the registry imports this."""

from sparse_dataflow.core.weights import block_sparse, dense, low_rank, masked

__all__ = ["block_sparse", "dense", "low_rank", "masked"]
