"""`--mesh`: every legal text gives a mesh of all devices, every other is answered with words."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.parallel import mesh as meshes

SIZES = st.dictionaries(st.sampled_from(meshes.AXES), st.integers(1, 6), min_size=1)


def text(sizes):
    return ",".join(f"{axis}:{size}" for axis, size in sizes.items())


@given(SIZES)
def test_a_mesh_is_what_was_written_in_the_order_of_the_axes(sizes):
    found = meshes.parse(text(sizes), math.prod(sizes.values()))
    assert tuple(found) == meshes.AXES
    assert found == {axis: sizes.get(axis, 1) for axis in meshes.AXES}
    assert meshes.parse(text(sizes), None) == found


@given(SIZES, st.data())
def test_one_size_may_be_left_open(sizes, data):
    whole = meshes.parse(text(sizes), None)
    left_out = data.draw(st.sampled_from(sorted(sizes)))
    for empty in (left_out, f"{left_out}:-1"):
        written = text(sizes).replace(f"{left_out}:{sizes[left_out]}", empty)
        assert meshes.parse(written, math.prod(sizes.values())) == whole


@given(SIZES, st.integers(1, 200))
def test_a_product_that_is_not_the_devices_is_answered_with_one_that_is(sizes, devices):
    if math.prod(sizes.values()) == devices:
        return
    with pytest.raises(UserError, match="whose product is") as refusal:
        meshes.parse(text(sizes), devices)
    proposed = str(refusal.value).rsplit("--mesh=", 1)[1].rstrip(".")
    assert math.prod(meshes.parse(proposed, devices).values()) == devices


def test_auto_is_fsdp_over_all_devices():
    assert meshes.parse("auto", 8) == {"data": 1, "stage": 1, "fsdp": 8, "tensor": 1}


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("tensr:8", "'tensr' is no axis; did you mean tensor"),
        ("data:2,data:4", "names data twice"),
        ("data:0", "has the size '0'; legal: 1 or more"),
        ("data:two", "has the size 'two'"),
        ("data,fsdp", "leaves the sizes of data and fsdp open; legal: one axis"),
        ("data:3,tensor", "legal: sizes whose product is 8"),
        ("data:16", "16 devices, and there are 8"),
    ],
)
def test_other_texts_are_refused_in_words(written, said):
    with pytest.raises(UserError, match=said):
        meshes.parse(written, 8)


@given(SIZES, st.integers(1, 12))
def test_groups_of_devices_are_crossed_by_the_outermost_axes(sizes, groups):
    """What is inside a slice or a node times what crosses is the mesh, crossed from outside in."""
    sizes = {axis: sizes.get(axis, 1) for axis in meshes.AXES}
    if math.prod(sizes.values()) % groups:
        return
    try:
        across = meshes.across(sizes, groups)
    except UserError as refusal:
        assert "cannot be cut at the borders" in str(refusal)
        return
    assert math.prod(across) == groups
    inner = [size for size, crossed in zip(sizes.values(), across) if crossed < size]
    assert all(size % crossed == 0 for size, crossed in zip(sizes.values(), across))
    if inner and groups == sizes["data"]:
        assert across == [groups, 1, 1, 1]
