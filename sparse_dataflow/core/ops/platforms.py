"""What is special on which platforms.  Ops and executors ask for a trait with `dispatch.on`."""

CPU, GPU, TPU = "cpu", "gpu", "tpu"

ATTENTION = {CPU: "xla", GPU: "cudnn", TPU: "splash"}
"""Platform -> fastest implementation of `self_attention`."""

HOST = (CPU,)
"""The chip is the host, without a memory of its own."""

ATTENTION_SCORES = (CPU,)
"""Attention keeps its scores for the backward pass; see `chips.cpu.attention`."""

ROUNDED_OPERATIONS = (CPU,)
"""XLA rounds each 16-bit operation of a fusion, which takes longer than the operation."""

NARROW_SUMS = (CPU,)
"""A dot accumulates in the dtype of its result, not in float32."""

SLOW_TRANSPOSED = (CPU,)
"""A 16-bit product with a transposed operand is slow, or does not exist."""

MERGED_PASSES = (CPU,)
"""XLA computes in the forward pass what the backward pass computes again, unless a barrier is
between them."""

SCANNED_LAYERS = (GPU,)
"""Layers that compute again are in a loop, where nothing merges the passes."""

CACHED_CHUNKS = (CPU,)
"""Chunks of tokens fit the caches; a few of them are unrolled."""

EXPERT_LOOP = (CPU,)
"""A loop over tiles multiplies the rows of experts; `jax.lax.ragged_dot` is slower."""

STATIC_LAYOUTS = (CPU,)
"""A program with the indices of a static layout as constants is faster."""

LIBRARY_GROUPS = (GPU,)
"""Equal groups are one product of the vendor's library."""

FEW_ROWS = (CPU, GPU)
"""Products of few rows have an implementation of their own."""

SPLIT_ROW_PRODUCTS = (GPU,)
"""XLA turns a small product of one row into a multiplication, which it writes, and a sum."""

REORDERED_LOOPS = (GPU,)
"""XLA changes the order of arrays in memory for a loop over tokens."""

COSTLY_ARGUMENTS = (GPU,)
"""An argument of a program costs as much as a small kernel."""

SLOW_COMPILER = (CPU,)
"""A loop over tokens, or many equal layers, compile for minutes."""

ROW_KERNEL = (CPU,)
"""A weight of stored rows has a kernel."""

SKIPPED_ROWS = (CPU,)
"""A product of one row of inputs reads only the rows of the weight whose inputs are not zero."""

HEADS_KERNEL = (TPU,)
"""A kernel splits a product into heads."""

JOINED_SPLITS = (CPU,)
"""The gradient of a split is one copy, unlike that of a transposition."""
