"""All kinds of weights; `core` imports them, so the registry has them for whoever asks it."""

from sparse_dataflow.core.weights import block_sparse, block_tensor_train, dense, low_rank, masked

__all__ = ["block_sparse", "block_tensor_train", "dense", "low_rank", "masked"]
