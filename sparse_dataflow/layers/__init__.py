"""Block-sparse layers for any flax nnx model."""
