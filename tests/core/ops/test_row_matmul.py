"""The product with rows, in XLA and in C++, against numpy in float64."""

import stat

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sparse_dataflow.chips.cpu import kernels as native
from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.core.ops.row_matmul import ROW_WIDTHS, row_width
from sparse_dataflow.core.ops.row_matmul.row_matmul_op import IMPLEMENTATIONS, row_matmul
from sparse_dataflow.core.weights.block_sparse import BlockSparse
from sparse_dataflow.core.weights.masked import Masked
from sparse_dataflow.core.weights.rows import all_rows, rows_of, rows_of_blocks
from sparse_dataflow.files.errors import UserError

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request, compiled_kernels):
    if request.param == "native" and compiled_kernels:
        pytest.skip(compiled_kernels)
    return request.param


@st.composite
def masked_weights(draw):
    """Returns (masked weight with any number of rows in each group, width of a row)."""
    width, groups = draw(st.sampled_from(ROW_WIDTHS)), draw(st.integers(1, 5))
    inputs = draw(st.integers(4, 70))
    dtype, rng = (
        draw(st.sampled_from(list(TOLERANCE))),
        np.random.default_rng(draw(st.integers(0, 999))),
    )
    fan_in = draw(st.lists(st.integers(0, inputs // 2), min_size=groups, max_size=groups))
    stored = rng.permuted(np.arange(inputs)[:, None] < fan_in, axis=0)
    kernel = rng.normal(size=(inputs, groups * width)).astype(jnp.dtype(dtype))
    return Masked(kernel, stored.repeat(width, 1)), width


@settings(max_examples=30)
@given(
    case=masked_weights(), tokens=st.integers(1, 20), seed=st.integers(0, 99), stacked=st.booleans()
)
def check_product(implementation, case, tokens, seed, stacked):
    weight, width = case
    inputs, dtype = len(weight.mask), weight.kernel.dtype
    x = np.random.default_rng(seed).normal(size=(tokens, inputs)).astype(dtype)
    expected = x.astype(np.float64) @ np.where(weight.mask, weight.kernel, 0).astype(np.float64)
    rows = rows_of(weight, width)
    y = row_matmul(x, rows.values, rows.inputs, implementation=implementation)
    assert y.dtype == dtype
    tolerance = TOLERANCE[dtype.name]
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, tolerance, 8 * tolerance)
    if stacked:
        with_axes = x.reshape(1, tokens, 1, inputs) @ rows
        assert with_axes.shape == (1, tokens, 1, len(weight.kernel[0]))


def test_a_product_is_that_of_the_masked_weight(implementation):
    check_product(implementation)


@settings(max_examples=20)
@given(
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 90),
    tokens=st.integers(1, 20),
    dtypes=st.tuples(*[st.sampled_from(list(TOLERANCE))] * 2),
    in_int8=st.booleans(),
    seed=st.integers(0, 99),
)
def check_whole(implementation, inputs, outputs, tokens, dtypes, in_int8, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, inputs)).astype(jnp.dtype(dtypes[0]))
    kernel = rng.normal(size=(inputs, outputs)).astype(jnp.dtype(dtypes[1]))
    rows = all_rows(kernel, in_int8=in_int8)
    whole = np.asarray(rows.columns(np.arange(outputs)), np.float64).T
    rounded = np.asarray(rows.scale[:outputs]) / 1.99 if in_int8 else 0
    assert (np.abs(whole - kernel.astype(np.float64)) <= rounded).all()
    y = row_matmul(x, rows.values, None, rows.scale, implementation)[:, :outputs]
    tolerance = TOLERANCE[dtypes[0]]
    expected = x.astype(np.float64) @ whole
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, tolerance, 8 * tolerance)
    assert y.dtype == x.dtype and (x @ rows).shape == y.shape


def test_a_product_is_that_of_the_whole_matrix(implementation):
    check_whole(implementation)


@pytest.mark.parametrize("tokens", [1, 3, 8, 17])
def test_values_that_are_not_finite_stay_in_their_outputs_and_tokens(implementation, tokens):
    values, inputs = np.ones((3, 2, 16), np.float32), np.asarray([[0, 1], [1, 2], [2, 3]])
    values[1, 0, 5] = np.inf
    x = np.ones((tokens, 4), np.float32)
    x[-1, 3] = np.nan
    y = np.asarray(row_matmul(x, values, inputs.astype(np.uint16), implementation=implementation))
    expected = np.full((tokens, 48), 2.0)
    expected[:, 21], expected[-1, 32:] = np.inf, np.nan
    np.testing.assert_array_equal(y, expected)


@given(masked_weights())
def test_rows_hold_the_stored_weights_alone(case):
    weight, width = case
    rows = rows_of(weight, width)
    most = max(1, weight.mask[:, ::width].sum(0).max())
    assert rows.values.shape == (weight.kernel.shape[1] // width, most, width)
    assert jnp.count_nonzero(rows.values) == np.count_nonzero(weight.kernel[weight.mask])


@settings(max_examples=30)
@given(
    block=st.sampled_from([8, 16, 24, 64, 128]),
    mask=hnp.arrays(bool, st.tuples(st.integers(1, 4), st.integers(1, 4))),
    seed=st.integers(0, 99),
)
def test_rows_of_blocks_are_the_blocks(block, mask, seed):
    layout = BlockLayout.from_mask(mask | (mask.sum() == 0), block)
    values = np.random.default_rng(seed).normal(size=(layout.nnz, block, block))
    weight = BlockSparse(values.astype(np.float32), layout)
    rows = rows_of_blocks(weight, row_width(block))
    padded = layout.out_blocks * layout.fan_in.max()
    assert (rows is None) == (padded > 1.5 * layout.nnz)
    if rows is not None:
        x = np.eye(layout.in_features, dtype=np.float32)
        np.testing.assert_array_equal(x @ rows, weight.dense())


@pytest.mark.parametrize(
    "mask",
    [
        np.ones((8, 32), bool),
        np.arange(8 * 32).reshape(8, 32) % 2 == 0,
        np.eye(8, 32, dtype=bool),
        np.arange(8)[:, None].repeat(32, 1) < np.asarray([8, 1]).repeat(16),
    ],
    ids=["all", "every other", "single", "one full group"],
)
def test_other_masks_are_not_rows(mask):
    assert rows_of(Masked(np.ones(mask.shape, np.float32), mask), 16) is None


def test_a_dtype_that_the_kernel_lacks_is_refused_by_name(compiled_kernels):
    arrays = (
        np.ones((1, 4), np.float16),
        np.ones((1, 2, 8), np.float16),
        np.zeros((1, 2), np.uint16),
    )
    with pytest.raises(UserError, match="read float32 or bfloat16, not float16"):
        row_matmul(*arrays, implementation="native")
    assert row_matmul(*arrays).tolist() == [[2.0] * 8]


def script(folder, text):
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture(name="not_built")
def no_state(monkeypatch):
    monkeypatch.setitem(native._state, "refusal", native._NOT_BUILT)


@pytest.mark.parametrize(
    ("compiler", "words"),
    [
        ("echo 'row_matmul.cc: no such flag' >&2; exit 1", "failed: row_matmul.cc: no such flag."),
        ("exit 3", "failed."),
        ("exit 0", "it was not compiled"),
        ('while [ "$1" != -o ]; do shift; done; echo not a library > "$2"', "cannot be loaded"),
    ],
)
def test_a_compiler_that_fails_is_a_refusal(not_built, monkeypatch, tmp_path, compiler, words):
    monkeypatch.setenv("CXX", script(tmp_path, compiler))
    assert words in native.build(tmp_path / "kernels")
    assert words in native.kernel_refusal(jnp.dtype("float32"))
    assert not list((tmp_path / "kernels").glob("*.partial"))


def test_a_machine_without_a_compiler_says_so(not_built, monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native.build(tmp_path) == (
        "this machine has no C++ compiler (c++, g++, clang++, or CXX)."
    )


@pytest.fixture(name="copied_library")
def library_of_a_fake_compiler(not_built, monkeypatch, tmp_path):
    """Makes a compiler write a file and note each call; returns a function that builds with it."""
    # A damaged library that is loaded ends the process.
    monkeypatch.setattr(native, "_registers", lambda library: True)
    (tmp_path / "whole").write_bytes(bytes(range(256)) * 40)
    compiler = 'while [ "$1" != -o ]; do shift; done; '
    copies = f'cp {tmp_path}/whole "$2"; echo >> {tmp_path}/calls'
    monkeypatch.setenv("CXX", script(tmp_path, compiler + copies))

    def build():
        assert native._build(tmp_path / "kernels") == ""
        return (tmp_path / "calls").read_text().count("\n")

    return build


def test_a_damaged_library_is_compiled_again(copied_library, tmp_path):
    assert copied_library() == copied_library() == 1
    [ours] = (tmp_path / "kernels").glob("*.so")
    whole = ours.read_bytes()
    flipped = whole[:4000] + bytes([whole[4000] ^ 1]) + whole[4001:]
    for calls, content in enumerate((flipped, whole[:-99], b"", bytes(len(whole))), start=2):
        ours.write_bytes(content)
        assert copied_library() == calls and ours.read_bytes() == whole


def test_another_processor_has_a_library_of_its_own(copied_library, monkeypatch):
    calls = []
    for name in ("one", "other"):
        monkeypatch.setattr(native, "processor", lambda name=name: name)
        calls += [copied_library(), copied_library()]
    assert calls == [1, 1, 2, 2]
