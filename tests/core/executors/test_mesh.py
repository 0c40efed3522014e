"""`--mesh`: every legal text gives a mesh of all devices; others are refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.core.executors import mesh as meshes
from sparse_dataflow.files.errors import UserError

SIZES = st.dictionaries(st.sampled_from(meshes.AXES), st.integers(1, 6), min_size=1)


def text(sizes):
    return ",".join(f"{axis}:{size}" for axis, size in sizes.items())


@given(SIZES)
def test_sizes_are_parsed_in_the_order_of_the_axes(sizes):
    sizes_by_axis = meshes.parse(text(sizes), math.prod(sizes.values()))
    assert tuple(sizes_by_axis) == meshes.AXES
    assert sizes_by_axis == {axis: sizes.get(axis, 1) for axis in meshes.AXES}
    assert meshes.parse(text(sizes), None) == sizes_by_axis


@given(SIZES, st.data())
def test_one_size_may_be_left_open(sizes, data):
    whole = meshes.parse(text(sizes), None)
    left_out = data.draw(st.sampled_from(sorted(sizes)))
    for empty in (left_out, f"{left_out}:-1"):
        written = text(sizes).replace(f"{left_out}:{sizes[left_out]}", empty)
        assert meshes.parse(written, math.prod(sizes.values())) == whole


@given(SIZES, st.integers(1, 200))
def test_a_wrong_product_is_refused_with_a_legal_mesh(sizes, devices):
    if math.prod(sizes.values()) == devices:
        return
    with pytest.raises(UserError, match="whose product is") as refusal:
        meshes.parse(text(sizes), devices)
    proposed = str(refusal.value).rsplit("--mesh=", 1)[1].rstrip(".")
    assert math.prod(meshes.parse(proposed, devices).values()) == devices


def test_auto_is_fsdp_over_all_devices():
    assert meshes.parse("auto", 8) == dict.fromkeys(meshes.AXES, 1) | {"fsdp": 8}


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("tensr:8", "'tensr' is not an axis here; did you mean tensor"),
        ("data:2,data:4", "names data twice"),
        ("data:0", "has the size '0'; legal: 1 or more"),
        ("data:two", "has the size 'two'"),
        ("data,fsdp", "leaves the sizes of data and fsdp open; legal: one axis"),
        ("data:3,tensor", "legal: sizes whose product is 8"),
        ("data:16", "16 devices, and there are 8"),
    ],
)
def test_illegal_texts_are_refused(written, message):
    with pytest.raises(UserError, match=message):
        meshes.parse(written, 8)


@given(SIZES, st.integers(1, 12))
def test_the_outermost_axes_cross_the_islands(sizes, islands):
    """The product of inner and outer shape is the mesh, and outer axes cross first."""
    sizes = {axis: sizes.get(axis, 1) for axis in meshes.AXES}
    if math.prod(sizes.values()) % islands:
        return
    try:
        outer = meshes.outer_shape(sizes, islands)
    except UserError as refusal:
        assert "cannot be split at the borders" in str(refusal)
        return
    assert math.prod(outer) == islands
    inner = [size for size, crossed in zip(sizes.values(), outer) if crossed < size]
    assert all(size % crossed == 0 for size, crossed in zip(sizes.values(), outer))
    if inner and islands == sizes["data"]:
        assert outer == [islands] + [1] * (len(sizes) - 1)
