"""The block-sparse matmul on TPUs, of any layout: the implementation "pallas_tpu"."""
