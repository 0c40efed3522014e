"""The matmul of layouts of equal groups on TPUs: the implementation "pallas_tpu_grouped"."""
