"""The block-sparse product timed and tuned beside the dense one, for `kernel_bench`."""
