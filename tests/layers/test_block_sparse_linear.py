"""`BlockSparseLinear` is an nnx.Linear of the stored blocks, under every transformation."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from marks import examples, some

import sparse_dataflow as sd
from sparse_dataflow.layers.layout_state import MARK_SIZE, layout_name

IN, OUT, BLOCK = 64, 32, 8
each_kind = pytest.mark.parametrize("evolving", [False, True])
evolving_kind = pytest.mark.parametrize("evolving", some([False, True], True))


def make(evolving=False, in_features=IN, out_features=OUT, **options):
    options = {"density": 0.5, "block": BLOCK, "rngs": nnx.Rngs(0)} | options
    return sd.BlockSparseLinear(in_features, out_features, evolving=evolving, **options)


def inputs(*shape):
    return jax.random.normal(jax.random.key(7), (*shape, IN))


def dense_product(layer, x, values=None):
    values = layer.values[...] if values is None else values
    return x @ layer.layout.to_dense(np.asarray(values)) + layer.bias[...]


def mean_square(layer, x):
    return jnp.mean(layer(x) ** 2)


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@each_kind
@hypothesis.given(
    st.sampled_from(["random", "monarch", "cyclic", "butterfly"]),
    st.sampled_from([0.5, 1.0]),
    st.sampled_from([8, 16]),
    st.sampled_from([(), (3,), (2, 5)]),
)
@hypothesis.settings(max_examples=examples(8))
def test_it_is_the_product_with_its_dense_matrix(evolving, pattern, density, block, shape):
    layer = make(evolving, pattern=pattern, density=density, block=block)
    x = inputs(*shape)
    close(layer(x), dense_product(layer, x))
    assert layer.layout.density == density and layer.evolving == evolving


def test_its_arguments_are_those_of_nnx_linear():
    options = {
        "use_bias": False,
        "dtype": jnp.bfloat16,
        "param_dtype": jnp.float16,
        "kernel_init": nnx.initializers.ones_init(),
        "bias_init": nnx.initializers.ones_init(),
    }
    dense = nnx.Linear(IN, OUT, rngs=nnx.Rngs(0), **options)
    sparse = make(**options)
    y = sparse(jnp.ones((2, IN)))
    assert y.dtype == dense(jnp.ones((2, IN))).dtype == jnp.bfloat16
    assert sparse.values.dtype == jnp.float16 and sparse.bias is None is dense.bias
    np.testing.assert_array_equal(np.asarray(y, np.float32), IN / 2)
    assert np.all(np.asarray(make(bias_init=options["bias_init"]).bias[...]) == 1)
    for name in ("in_features", "out_features", "use_bias", "dtype", "param_dtype"):
        assert getattr(sparse, name) == getattr(dense, name)


def test_an_initializer_with_sharding_metadata_draws_the_same_values():
    plain = nnx.initializers.lecun_normal()
    partitioned = make(kernel_init=nnx.with_partitioning(plain, (None, "model")))
    np.testing.assert_array_equal(partitioned.values[...], make(kernel_init=plain).values[...])


@pytest.mark.parametrize("density", some([1 / 8, 1], 1 / 8))
def test_the_variance_of_the_outputs_does_not_depend_on_the_density(density):
    layer = make(in_features=1024, out_features=1024, block=32, density=density)
    y = layer(jax.random.normal(jax.random.key(1), (256, 1024)))
    assert abs(float(jnp.std(y)) - 1) < 0.05


def test_outputs_of_unequal_fan_in_have_equal_variance():
    mask = np.zeros((8, 2), bool)
    mask[:1, 0] = mask[:, 1] = True
    layer = make(in_features=512, out_features=128, layout=sd.BlockLayout.from_mask(mask, 64))
    y = layer(jax.random.normal(jax.random.key(1), (512, 512)))
    stds = np.asarray(jnp.std(y.reshape(512, 2, 64), axis=(0, 2)))
    np.testing.assert_allclose(stds, 1, rtol=0.1)


def test_a_static_layout_is_no_array_and_its_program_is_specialised():
    """The program equals that of the static layout: no index table enters it."""
    layer, x = make(), inputs(64)
    state = nnx.state(layer)
    kinds = {type(leaf) for leaf in jax.tree.leaves(state, is_leaf=_is_variable)}
    assert kinds == {nnx.Param}
    graph, params, names = nnx.split(layer, nnx.Param, ...)

    def apply(params, x):
        return nnx.merge(graph, params, names)(x)

    def product(values, bias, x):
        return sd.block_sparse_matmul(x, values, layer.layout, "xla_static") + bias

    program = jax.make_jaxpr(apply)(params, x)
    expected = jax.make_jaxpr(product)(layer.values[...], layer.bias[...], x)
    count = lambda jaxpr: sorted(array.size for array in jaxpr.in_avals)  # noqa: E731
    assert count(program) == sorted([MARK_SIZE, *count(expected)])
    assert "gather" not in str(program) or "gather" in str(expected)
    assert hash(graph) == hash(nnx.split(make())[0]) and graph == nnx.split(make())[0]
    other = make(layout=sd.make_layout("random", IN, OUT, BLOCK, 0.5, offset=1))
    assert graph != nnx.split(other)[0]


def _is_variable(leaf):
    return isinstance(leaf, nnx.Variable)


def test_an_evolving_layout_changes_without_recompiling():
    layer, x, traces = make(True), inputs(3), []

    @nnx.jit
    def apply(layer, x):
        traces.append(1)
        return layer(x)

    before = apply(layer, x)
    layer.set_layouts([sd.make_layout("random", IN, OUT, BLOCK, 0.5, offset=3)], evolving=True)
    after = apply(layer, x)
    close(after, dense_product(layer, x))
    assert len(traces) == 1 and not np.allclose(before, after)


@evolving_kind
def test_jit(evolving):
    layer, x = make(evolving), inputs(3)
    close(nnx.jit(lambda layer, x: layer(x))(layer, x), dense_product(layer, x))


@each_kind
def test_grad_is_that_of_the_dense_matrix_at_stored_blocks(evolving):
    layer, x = make(evolving), inputs(3)
    gradients = nnx.grad(mean_square)(layer, x)
    dense = jnp.asarray(layer.layout.to_dense(np.asarray(layer.values[...])))
    expected = jax.grad(lambda w: jnp.mean((x @ w + layer.bias[...]) ** 2))(dense)
    close(gradients["values"][...], layer.layout.from_dense(expected))
    assert gradients["bias"].shape == (OUT,)


@pytest.mark.parametrize("evolving", some([False, True], True))
def test_vmap_over_inputs_and_over_an_ensemble(evolving):
    layer, x = make(evolving), inputs(3, 4)
    close(jax.vmap(layer)(x), dense_product(layer, x))

    @nnx.split_rngs(splits=5)
    @nnx.vmap
    def ensemble(rngs):
        return make(evolving, rngs=rngs)

    members = ensemble(nnx.Rngs(0))
    assert members.values.shape == (5, 16, BLOCK, BLOCK)
    y = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(members, x)
    layout = members.layouts()[0]
    for member, values in zip(y, members.values[...]):
        close(member, x @ layout.to_dense(np.asarray(values)))


class Residual(nnx.Module):
    def __init__(self, evolving, rngs):
        self.up = make(evolving, rngs=rngs)
        self.down = make(evolving, in_features=OUT, out_features=IN, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


def stack(evolving, layers=3):
    @nnx.split_rngs(splits=layers)
    @nnx.vmap
    def build(rngs):
        return Residual(evolving, rngs)

    return build(nnx.Rngs(0))


def unrolled(blocks, x, layers=3):
    graph, state = nnx.split(blocks)
    for layer in range(layers):
        x = nnx.merge(graph, jax.tree.map(lambda leaf, i=layer: leaf[i], state))(x)
    return x


@evolving_kind
@pytest.mark.parametrize("remat", some([False, True], True))
def test_scan_and_remat(evolving, remat):
    blocks, x = stack(evolving), inputs(4)
    apply = lambda x, block: block(x)  # noqa: E731
    apply = nnx.remat(apply) if remat else apply
    scan = nnx.scan(apply, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    scanned = nnx.grad(lambda blocks: jnp.mean(scan(x, blocks) ** 2))(blocks)
    expected = nnx.grad(lambda blocks: jnp.mean(unrolled(blocks, x) ** 2))(blocks)
    jax.tree.map(close, scanned, expected)


@evolving_kind
def test_split_and_merge(evolving):
    layer, x = make(evolving), inputs(2)
    graph, params, others = nnx.split(layer, nnx.Param, ...)
    name = "table_mark" if evolving else layout_name(layer.layout)
    assert sorted(params) == sorted(["bias", "values", name])
    assert len(others) == (4 if evolving else 0)
    merged = nnx.merge(graph, params, others)
    np.testing.assert_array_equal(merged(x), layer(x))
    assert merged.layout == layer.layout and merged.layout is not None


@evolving_kind
def test_optax_trains_the_stored_blocks_alone(evolving):
    layer, x, y = make(evolving), inputs(64), jnp.ones((64, OUT))
    optimizer = nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.Param)
    sizes = {leaf.size for leaf in jax.tree.leaves(optimizer.opt_state)}
    assert sizes == {1, MARK_SIZE, OUT, layer.values.size}

    @nnx.jit
    def step(layer, optimizer):
        loss, gradients = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(layer)
        optimizer.update(layer, gradients)
        return loss

    losses = [float(step(layer, optimizer)) for _ in range(30)]
    assert losses[-1] < losses[0] / 2


@evolving_kind
def test_orbax_restores_the_state(evolving, tmp_path):
    layer, x = make(evolving, offset=0), inputs(2)
    if evolving:
        sd.evolve(layer, None, "set", share=0.3, seed=5)
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "state", nnx.state(layer))
    checkpointer.wait_until_finished()
    graph, abstract = nnx.split(nnx.eval_shape(lambda: make(evolving, offset=0)))
    restored = nnx.merge(graph, checkpointer.restore(tmp_path / "state", abstract))
    np.testing.assert_array_equal(restored(x), layer(x))
    assert restored.layout == layer.layout


masks = st.lists(st.permutations(range(8)), min_size=4, max_size=4).map(
    lambda columns: np.stack([np.asarray(column) < 4 for column in columns], axis=1)
)
"""Drawn [8, 4] grids of blocks, each column with 4 stored ones."""


@hypothesis.given(masks, masks)
@hypothesis.settings(max_examples=12, deadline=None)
def test_a_state_is_taken_by_its_own_layout_alone(tmp_path_factory, one, two):
    """Layouts of equally many blocks, so the shapes of the arrays fit both ways."""
    first, second = (
        make(layout=sd.BlockLayout.from_mask(mask, BLOCK), rngs=nnx.Rngs(seed))
        for seed, mask in enumerate((one, two))
    )
    folder, x = tmp_path_factory.mktemp("state") / "state", inputs(2)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, nnx.state(first))
    graph, state = nnx.split(second)

    def restored():
        with ocp.StandardCheckpointer() as checkpointer:
            return nnx.merge(graph, checkpointer.restore(folder, state))

    def updated():
        other = nnx.clone(second)
        nnx.update(other, nnx.state(first))
        return other

    def updated_by_arrays():
        other = nnx.clone(second)
        nnx.update(other, nnx.to_pure_dict(nnx.state(first)))
        return other

    def merged():
        return nnx.merge(graph, nnx.state(first))

    run = nnx.jit(lambda layer, x: layer(x))
    if np.array_equal(one, two):
        for load in (restored, updated, updated_by_arrays, merged):
            np.testing.assert_array_equal(run(load(), x), run(first, x))
        return
    names = [name for name in (*nnx.state(first), *state) if name.startswith("layout_")]
    with pytest.raises(ValueError, match=r"do not match|mismatch") as refusal:
        restored()
    assert all(name in str(refusal.value) for name in names)
    message = (
        f"The state of this 64 x 32 layer is of {names[0]}, and the layer has {names[1]}; legal"
    )
    for load in (updated, updated_by_arrays, merged):
        for use in (lambda layer: run(layer, x), lambda layer: layer(x), sd.densify, sd.evolve):
            with pytest.raises(sd.UserError, match=message):
                use(load())


def test_a_state_that_evolves_is_not_taken_by_a_static_layer_nor_the_reverse():
    static, evolving = make(), make(True)
    (name,) = [name for name in nnx.state(static) if name.startswith("layout_")]
    changed = nnx.clone(evolving)
    nnx.update(changed, nnx.state(static))
    with pytest.raises(sd.UserError, match=f"is of {name}, and the layer has an evolving layout"):
        changed(inputs(2))
    with pytest.raises(ValueError, match="in_index"):
        nnx.update(static, nnx.state(evolving))


def test_a_pruned_layer_is_restored_with_its_layout_if_it_was_saved_evolving(tmp_path):
    trained, x = nnx.Linear(IN, OUT, rngs=nnx.Rngs(3)), inputs(2)
    pruned = sd.sparsify(trained, "magnitude", density=0.5, block=BLOCK, evolving=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(pruned))
    with ocp.StandardCheckpointer() as checkpointer:
        graph, abstract = nnx.split(nnx.eval_shape(lambda: make(True)))
        layer = nnx.merge(graph, checkpointer.restore(tmp_path / "state", abstract))
    sd.evolve(layer, None, "static")
    assert layer.layout == pruned.layout and not layer.evolving
    close(layer(x), pruned(x))


def test_what_does_not_fit_is_refused_in_words():
    with pytest.raises(sd.UserError, match="multiples of 1/4"):
        make(density=0.3)
    with pytest.raises(sd.UserError, match=r"larger than a side of a 64 x 32 .* of at most 32"):
        make(block=48)
    with pytest.raises(sd.UserError, match="64 x 64 weight and the layer has 64 x 32"):
        make(layout=sd.make_layout("random", 64, 64, 8, 0.5))
    with pytest.raises(sd.UserError, match=r"reads \[..., 64\]"):
        make()(jnp.ones((2, 32)))


@pytest.mark.parametrize("evolving", some([False, True], True))
def test_forward_mode_is_that_of_the_dense_layer(evolving):
    layer = sd.BlockSparseLinear(16, 32, density=0.5, block=8, evolving=evolving, rngs=nnx.Rngs(0))
    dense = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
    dense.kernel[...], dense.bias[...] = sd.densify(layer).kernel[...], layer.bias[...]
    x = jax.random.normal(jax.random.key(0), (16,))
    for transform in (jax.jacfwd, jax.hessian):
        mine, right = (transform(lambda x, f=f: jnp.sin(f(x[None])))(x) for f in (layer, dense))
        np.testing.assert_allclose(mine, right, atol=1e-5)


@pytest.mark.parametrize("evolving", [False, True])
def test_a_layer_prints_in_one_line_and_shows_its_layout(evolving):
    layer = sd.BlockSparseLinear(
        64, 96, density=0.25, block=8, evolving=evolving, use_bias=False, rngs=nnx.Rngs(0)
    )
    layout = "an evolving layout" if evolving else repr(layer.layout)
    words = f"BlockSparseLinear(64 -> 96, {layout}, values=f32[24,8,8], bias=None)"
    assert str(layer) == repr(layer) == words
    assert layer._repr_html_() == layer.layout._repr_html_()
    abstract = nnx.eval_shape(lambda: layer)
    assert "f32[24,8,8]" in repr(abstract)
