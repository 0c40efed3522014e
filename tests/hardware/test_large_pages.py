"""Arrays in large pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.hardware import large_pages

DTYPES = ("float32", "bfloat16", "int8", "uint16")
SIZES = st.sampled_from([0, 1, 15, 64, 1000, 2**20, 2**24])


@given(st.lists(st.tuples(SIZES, st.sampled_from(DTYPES)), min_size=1, max_size=6))
def test_arrays_share_no_memory_and_jax_copies_none(cases):
    arrays = [large_pages.empty((2, size), jnp.dtype(dtype)) for size, dtype in cases]
    for number, array in enumerate(arrays):
        array[...] = number
    for number, array in enumerate(arrays):
        assert (array == number).all()
        placed = jax.device_put(array)
        if array.size:
            assert placed.unsafe_buffer_pointer() == array.ctypes.data


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_placed_array_is_a_copy(dtype):
    array = jnp.arange(70, dtype=dtype).reshape(7, 10)
    placed = large_pages.placed(array)
    assert placed.dtype == array.dtype
    np.testing.assert_array_equal(placed, array)
    assert placed.unsafe_buffer_pointer() != array.unsafe_buffer_pointer()
