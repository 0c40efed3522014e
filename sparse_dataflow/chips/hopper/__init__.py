"""The block-sparse matmul on Hopper GPUs: the implementation "pallas_hopper"."""
