"""Patterns: balance on any grid, what each one connects, mixing over depth, refusals."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import ROW_PARALLEL, LinearSpec
from sparse_dataflow.core.config.sparsity import GROUPED_PATTERNS
from sparse_dataflow.core.layouts import patterns
from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.core.layouts.patterns import (
    PATTERNS,
    from_permutations,
    legal_densities,
    make_layout,
    register,
)
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.families import FAMILIES

NAMES = sorted(set(PATTERNS) - {"dense"})
names = st.sampled_from(NAMES)


def square(pattern, ring, degree, offset=0):
    """Mask of a pattern on a ring x ring grid."""
    return make_layout(pattern, ring * 8, ring * 8, 8, degree / ring, offset).mask


def legal_degrees(pattern, ring):
    """Equal groups need degrees that divide the ring; other patterns accept any degree."""
    return [k for k in range(1, ring + 1) if pattern not in GROUPED_PATTERNS or ring % k == 0]


@st.composite
def grids(draw, pattern="cyclic"):
    """(in_blocks, out_blocks, degree)."""
    in_blocks, out_blocks = draw(st.integers(1, 24)), draw(st.integers(1, 24))
    if draw(st.booleans()):  # Coprime counts have a ring of 1; draw multiples often.
        out_blocks = in_blocks * draw(st.integers(1, 4))
    if draw(st.booleans()):
        in_blocks, out_blocks = out_blocks, in_blocks
    degree = draw(st.sampled_from(legal_degrees(pattern, math.gcd(in_blocks, out_blocks))))
    return in_blocks, out_blocks, degree


grouped_grids = st.sampled_from(GROUPED_PATTERNS).flatmap(
    lambda name: st.tuples(st.just(name), grids(name))
)
patterned_grids = names.flatmap(lambda name: st.tuples(st.just(name), grids(name)))


def test_all_documented_patterns_are_registered():
    plan = {"pixelfly", "butterfly", "monarch", "shuffle", "cyclic", "random", "banded", "dense"}
    assert plan <= set(PATTERNS)


@settings(max_examples=200)
@given(patterned_grids, st.integers(0, 60), st.sampled_from([1, 8, 24]))
def test_every_pattern_is_balanced_and_has_the_requested_density(patterned_grid, offset, block):
    pattern, (in_blocks, out_blocks, degree) = patterned_grid
    ring = math.gcd(in_blocks, out_blocks)
    density = degree / ring
    layout = make_layout(pattern, in_blocks * block, out_blocks * block, block, density, offset)
    assert (layout.in_blocks, layout.out_blocks, layout.block) == (in_blocks, out_blocks, block)
    assert layout.balanced
    assert set(layout.fan_in) == {degree * in_blocks // ring}
    assert set(layout.fan_out) == {degree * out_blocks // ring}
    assert math.isclose(layout.density, density)
    again = make_layout(pattern, in_blocks * block, out_blocks * block, block, density, offset)
    assert again == layout


@given(st.sampled_from(sorted(PATTERNS)), grids())
def test_density_one_stores_every_block(pattern, grid):
    in_blocks, out_blocks, _ = grid
    assert make_layout(pattern, in_blocks * 4, out_blocks * 4, 4, 1.0).mask.all()


@given(st.sampled_from(["pixelfly", "butterfly", "cyclic", "banded"]), grids(), st.integers(0, 20))
def test_a_rectangular_grid_expands_a_square_grid(pattern, grid, offset):
    in_blocks, out_blocks, degree = grid
    ring = math.gcd(in_blocks, out_blocks)
    layout = make_layout(pattern, in_blocks * 8, out_blocks * 8, 8, degree / ring, offset)
    rectangle = np.ones((in_blocks // ring, out_blocks // ring), bool)
    np.testing.assert_array_equal(
        layout.mask, np.kron(square(pattern, ring, degree, offset), rectangle)
    )


@pytest.mark.parametrize("ring", [4, 8, 16, 32])
def test_pixelfly_is_the_flat_butterfly(ring):
    i, j = np.indices((ring, ring))
    for degree in range(1, ring.bit_length() + 1):
        strides = [0, *(1 << k for k in range(degree - 1))]
        np.testing.assert_array_equal(square("pixelfly", ring, degree), np.isin(i ^ j, strides))


@given(st.sampled_from(["pixelfly", "banded"]), st.integers(2, 24), st.data())
def test_pixelfly_and_banded_are_equal_in_every_layer_and_nested(pattern, ring, data):
    degree = data.draw(st.integers(1, ring - 1))
    mask = square(pattern, ring, degree)
    np.testing.assert_array_equal(square(pattern, ring, degree, offset=3), mask)
    assert np.all(square(pattern, ring, degree + 1)[mask])
    assert mask.diagonal().all()


def mixing(pattern, ring, degree, layers):
    """Whether each output depends on each input after `layers` weights, from any first offset."""
    for start in range(6):
        reached = np.eye(ring, dtype=int)
        for offset in range(start, start + layers):
            reached = np.minimum(reached @ square(pattern, ring, degree, offset), 1)
        if not reached.all():
            return False
    return True


@pytest.mark.parametrize("pattern", ["butterfly", "cyclic"])
@pytest.mark.parametrize("factors", [1, 2, 3, 4, 5])
def test_rotating_patterns_mix_everything_in_logarithmic_depth(pattern, factors):
    ring = 2**factors
    for degree in range(2, factors + 2):
        assert mixing(pattern, ring, degree, factors)
    assert not mixing(pattern, ring, 2, factors - 1)  # 2^(factors - 1) paths reach no more inputs.


@pytest.mark.parametrize("pattern", ["butterfly", "cyclic"])
@pytest.mark.parametrize("ring", [3, 5, 6, 7, 9, 12, 20])
def test_rotating_patterns_mix_everything_on_any_ring(pattern, ring):
    assert mixing(pattern, ring, degree=2, layers=2 * ring.bit_length())


def test_pixelfly_alone_does_not_mix_where_butterfly_does():
    assert mixing("butterfly", 16, degree=2, layers=4)
    assert not mixing("pixelfly", 16, degree=2, layers=8)


@given(grouped_grids, st.integers(0, 20))
def test_groups_are_block_diagonal_up_to_a_permutation(patterned_grid, offset):
    """Rows and columns form ring / degree groups of equal, disjoint support."""
    pattern, (in_blocks, out_blocks, degree) = patterned_grid
    ring = math.gcd(in_blocks, out_blocks)
    mask = make_layout(pattern, in_blocks, out_blocks, 1, degree / ring, offset).mask
    for lines in (mask, mask.T):
        supports = np.unique(lines, axis=0)
        assert len(supports) == ring // degree
        assert np.all(supports.sum(0) == 1)


@given(grouped_grids, st.integers(0, 20))
def test_groups_are_the_same_at_every_depth(patterned_grid, offset):
    pattern, grid = patterned_grid
    density = grid[2] / math.gcd(*grid[:2])
    first, other = (make_layout(pattern, *grid[:2], 1, density, n).mask for n in (0, offset))
    np.testing.assert_array_equal(first, other)


@given(grouped_grids, st.sampled_from([None, True, False]))
def test_groups_are_equal_and_their_outputs_contiguous(patterned_grid, reads):
    pattern, (in_blocks, out_blocks, degree) = patterned_grid
    ring = math.gcd(in_blocks, out_blocks)
    layout = make_layout(pattern, in_blocks, out_blocks, 1, degree / ring, 0, reads)
    groups = layout.groups
    assert layout.balanced
    assert groups.count == groups.in_parts == groups.out_parts == ring // degree
    assert groups.out_run == out_blocks // groups.count


@pytest.mark.parametrize("ring", [4, 6, 8, 9, 16, 20, 32, 40])
def test_shuffle_mixes_in_as_few_weights_as_its_fan_in_allows(ring):
    for degree in legal_degrees("shuffle", ring)[1:]:
        weight = square("shuffle", ring, degree).astype(int)
        depth = math.ceil(math.log(ring, degree) - 1e-9)
        assert (np.linalg.matrix_power(weight, depth) > 0).all()
        assert not (np.linalg.matrix_power(weight, depth - 1) > 0).all()


@pytest.mark.parametrize("ring", [4, 6, 8, 9, 16, 20, 32, 40])
def test_shuffle_mixes_within_an_mlp(ring):
    """An output depends on as many inputs as two fan-ins allow, and on all over depth."""
    for degree in legal_degrees("shuffle", ring):
        into, out_of = mlp_weights("shuffle", ring, degree)
        depends_on = ((into @ out_of) > 0).sum(0)
        assert np.all(depends_on >= min(ring, degree * min(degree, ring // degree)))
        reached = np.eye(ring, dtype=int)
        for _ in range(2 * ring.bit_length()):
            reached = np.minimum(reached @ into @ out_of, 1)
        assert reached.all()


def mlp_weights(pattern, ring, degree):
    """Masks of a pattern's two weights of an MLP that widens by 4."""
    sides = (ring, 4 * ring), (4 * ring, ring)
    return [make_layout(pattern, *side, 1, degree / ring).mask.astype(int) for side in sides]


@pytest.mark.parametrize("ring", [4, 6, 8, 9, 16, 20, 32, 40])
def test_monarch_groups_stay_apart_within_an_mlp(ring):
    for degree in legal_degrees("monarch", ring)[1:]:
        into, out_of = mlp_weights("monarch", ring, degree)
        outputs_read_by = (into @ out_of) > 0
        np.testing.assert_array_equal(outputs_read_by.sum(1), degree)
        assert all(np.ptp(np.flatnonzero(outputs)) < degree for outputs in outputs_read_by)


@pytest.mark.parametrize("ring", [4, 6, 8, 9, 16, 20, 32, 40])
def test_monarch_mixes_everything_over_depth(ring):
    """A network of radix `degree` needs log_degree(ring) layers; a single cell still mixes."""
    for degree in legal_degrees("monarch", ring):
        into, out_of = mlp_weights("monarch", ring, degree)
        radix = degree if degree > 1 else min(4, ring)
        depth = math.ceil(math.log(ring, radix) - 1e-9)
        reached = np.eye(ring, dtype=int)
        for layer in range(2 * depth):
            assert layer >= depth - 1 or not reached.all()
            reached = np.minimum(reached @ into @ out_of, 1)
        assert reached.all()


def role_mask(model, name, by_role=True):
    """Mask of one projection of a model, by its role or by its shape alone."""
    reads = name not in ROW_PARALLEL if by_role else None
    shape = *model.projection_shape(name), model.linear(name).block
    return make_layout("monarch", *shape, model.linear(name).density, 0, reads).mask


def steps_of(model, by_role):
    """Masks of a block's four steps in order, where q, k and v are one step, as are gate and in.

    A block is one head, so the output of attention depends on the queries of its head, and on the
    keys and values that they read.
    """
    masks = {name: role_mask(model, name, by_role) for name in model.projections}
    heads = np.arange(model.num_heads)
    keys = heads // (model.num_heads // model.kv_heads)
    if model.fused_qkv:
        attended = masks["qkv"].reshape(len(heads), -1, 3).any(2)
    else:
        attended = masks["q"] | masks["k"][:, keys] | masks["v"][:, keys]
    hidden = masks["mlp_in"] | masks.get("mlp_gate", False)
    return [step.astype(int) for step in (attended, masks["attn_out"], hidden, masks["mlp_out"])]


def projections_to_mix(model, by_role=True):
    """Projections until every output depends on every input, from the worst first one."""
    steps, counts = steps_of(model, by_role), []
    for start in range(4):
        reached = np.eye(len(steps[start]), dtype=int)
        for count in range(1, 100):
            reached = np.minimum(reached @ steps[(start + count - 1) % 4], 1)
            if reached.all():
                break
        counts.append(count)
    return max(counts)


def one_head_a_block(family, heads, kv_heads, d_ff, density):
    model = ModelConfig(
        1, 8 * heads, heads, 8 * d_ff, 64, 64, **FAMILIES[family], num_kv_heads=kv_heads
    )
    return model.with_linears(LinearSpec("block_sparse", "monarch", density, 8))


@pytest.mark.parametrize(
    ("family", "heads", "kv_heads", "d_ff", "density", "by_shape", "by_role"),
    [
        ("gpt3", 32, 0, 128, 1 / 8, 5, 5),
        ("gpt3", 64, 0, 256, 1 / 8, 3, 3),
        ("llama", 32, 32, 128, 1 / 8, 9, 5),
        ("llama", 64, 16, 224, 1 / 8, 5, 3),
        ("llama", 32, 8, 112, 1 / 4, 5, 3),
        # Its keys have a single block in a ring cell, which read at a stride before too.
        ("llama", 32, 8, 112, 1 / 8, 5, 5),
    ],
)
def test_monarch_by_role_mixes_separate_projections(
    family, heads, kv_heads, d_ff, density, by_shape, by_role
):
    """Square weights that read the residual stream mix as those that widen."""
    model = one_head_a_block(family, heads, kv_heads, d_ff, density)
    assert projections_to_mix(model, by_role=False) == by_shape
    assert projections_to_mix(model) == by_role


@given(
    st.sampled_from([2, 3, 4, 6, 8, 12, 16, 24]),
    st.sampled_from([3, 4]),
    st.integers(0, 3),
)
def test_monarch_of_gpt_does_not_depend_on_the_role(ring, widening, factor):
    """Layouts of recorded results: qkv, attn_out, mlp_in, mlp_out."""
    density = 1 / ring * math.gcd(ring, 2**factor)
    for sides, reads in (
        ((ring, 3 * ring), True),
        ((ring, ring), False),
        ((ring, widening * ring), True),
        ((widening * ring, ring), False),
    ):
        by_shape, by_role = (
            make_layout("monarch", *sides, 1, density, 0, role) for role in (None, reads)
        )
        assert by_shape == by_role


@pytest.mark.parametrize("pattern", GROUPED_PATTERNS)
def test_degrees_of_groups_must_divide_the_ring(pattern):
    with pytest.raises(UserError, match=r"no density of 3/8 .* legal: 1/8, 2/8, 4/8, 8/8"):
        make_layout(pattern, 64, 64, 8, 3 / 8)


@pytest.mark.parametrize("ring", [5, 6, 8, 13])
def test_cyclic_moves_by_powers_of_two(ring):
    i, j = np.indices((ring, ring))
    np.testing.assert_array_equal(square("cyclic", ring, 4), np.isin((i - j) % ring, [0, 1, 2, 4]))


@given(st.integers(2, 24), st.data())
def test_banded_reads_the_nearest_on_the_ring(ring, data):
    degree = data.draw(st.integers(1, ring))
    i, j = np.indices((ring, ring))
    distance = np.minimum((i - j) % ring, (j - i) % ring)
    mask = square("banded", ring, degree)
    assert distance[mask].max() <= degree // 2
    assert mask[distance <= (degree - 1) // 2].all()


def test_random_stores_every_block_equally_often():
    seeds = 400
    masks = [make_layout("random", 48, 96, 8, 1 / 3, offset).mask for offset in range(seeds)]
    assert len({mask.tobytes() for mask in masks}) == seeds
    deviation = math.sqrt(1 / 3 * 2 / 3 / seeds)
    assert np.abs(np.mean(masks, axis=0) - 1 / 3).max() < 4.5 * deviation


def test_random_is_more_than_a_shuffled_band():
    """Shuffled rows and columns keep singular values, so one shuffled band has one spectrum."""
    masks = [make_layout("random", 64, 64, 8, 3 / 8, offset).mask for offset in range(50)]
    spectra = {tuple(np.linalg.svd(mask, compute_uv=False).round(6)) for mask in masks}
    assert len(spectra) > 10


def test_a_registered_pattern_is_used(monkeypatch):
    monkeypatch.setattr(patterns, "PATTERNS", dict(PATTERNS))

    @register("every_third")
    def every_third(in_blocks, out_blocks, degree, offset):
        ring = math.gcd(in_blocks, out_blocks)
        return from_permutations(
            [(np.arange(ring) + 3 * k) % ring for k in range(degree)], in_blocks, out_blocks
        )

    layout = make_layout("every_third", 80, 160, 8, 0.3)
    assert layout.balanced and set(layout.fan_in) == {3}
    assert np.flatnonzero(layout.mask[:, 0]).tolist() == [0, 3, 6]
    with pytest.raises(ValueError, match="'every_third' is already registered"):
        register("every_third")(every_third)


def test_permutations_name_the_input_of_each_output():
    mask = from_permutations([np.array([1, 2, 0])], 3, 3)
    assert [np.flatnonzero(mask[:, j]).tolist() for j in range(3)] == [[1], [2], [0]]


def test_an_unknown_pattern_is_refused_with_the_names():
    with pytest.raises(UserError, match=r"'pixelfy' is unknown; legal: .*pixelfly"):
        make_layout("pixelfy", 64, 64, 8, 0.5)


@pytest.mark.parametrize("block", [-8, 0, 48])
def test_a_block_that_does_not_divide_is_refused_with_blocks_that_do(block):
    with pytest.raises(UserError, match="does not divide a 256 x 768 weight") as refusal:
        make_layout("cyclic", 256, 768, block, 1.0)
    legal = re.findall(r"\d+", str(refusal.value).split("legal blocks up to 512:")[1])
    assert legal == ["8", "16", "32", "64", "128", "256"]
    for block in map(int, legal):
        assert isinstance(make_layout("cyclic", 256, 768, block, 1.0), BlockLayout)


def test_features_without_a_usable_block_are_refused():
    with pytest.raises(UserError, match="none from 8 up"):
        make_layout("cyclic", 7, 11, 4, 1.0)


@pytest.mark.parametrize("density", [-0.5, 0.0, 0.01, 0.3, 1.5, 17 / 16])
def test_a_density_without_balanced_layout_is_refused(density):
    with pytest.raises(UserError, match=r"no balanced layout.*legal: multiples of 1/16 \(0.0625\)"):
        make_layout("random", 256, 768, 16, density)


def test_blocks_that_give_the_density_are_named():
    with pytest.raises(UserError, match=r"or this density with block=8 or 16\.$"):
        make_layout("monarch", 128, 384, 64, 1 / 8)
    for block in (8, 16):
        assert make_layout("monarch", 128, 384, block, 1 / 8).density == 1 / 8
    for block in (32, 64, 128):
        with pytest.raises(UserError, match="no balanced layout"):
            make_layout("monarch", 128, 384, block, 1 / 8)


@given(grids(), st.sampled_from([1, 8]))
def test_exactly_the_legal_densities_are_accepted(grid, block):
    in_blocks, out_blocks, _ = grid
    shape = in_blocks * block, out_blocks * block
    densities = legal_densities(*shape, block)
    assert densities == sorted(densities) and densities[-1] == 1
    for density in densities:
        assert math.isclose(make_layout("cyclic", *shape, block, density).density, density)
        with pytest.raises(UserError):
            make_layout("cyclic", *shape, block, density + densities[0] / 2)


def test_dense_pattern_has_one_density():
    with pytest.raises(UserError, match="legal density: 1"):
        make_layout("dense", 64, 64, 8, 0.5)
