"""What the layer promises to models that we did not write: each kind of fault that was found."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import export
from marks import some

import sparse_dataflow as sd
from sparse_dataflow.layers.evolve import gradient_norms
from sparse_dataflow.layers.replace import block_sparse_layers

each_kind = pytest.mark.parametrize("evolving", [False, True])


def make(evolving=False, sides=(32, 64), seed=0, **options):
    options = {"density": 0.5, "block": 8, "rngs": nnx.Rngs(seed)} | options
    return sd.BlockSparseLinear(*sides, evolving=evolving, **options)


def drawn(*shape):
    return jax.random.normal(jax.random.key(3), shape)


# Gradient norms are those of the summed dense gradient.


def scanned(apply, x):
    def body(total, batch):
        return total + jnp.mean((apply(batch) - 1) ** 2), None

    return jax.lax.scan(body, 0.0, x)[0]


LOSSES = {
    "vmap": lambda apply, x: jnp.mean(jax.vmap(lambda row: jnp.sum(jnp.sin(apply(row))))(x[0])),
    "micro-batches": scanned,
    "tied": lambda apply, x: jnp.mean((apply(jnp.tanh(apply(x))) - 1) ** 2),
    "remat of vmap": lambda apply, x: jnp.sum(jax.vmap(jax.checkpoint(apply))(x) ** 2),
    "tied within vmap": lambda apply, x: jnp.sum(jax.vmap(lambda r: apply(jnp.sin(apply(r))))(x)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_block_norms_are_those_of_the_summed_dense_gradient(name):
    layer, x = make(sides=(48, 48), use_bias=False), drawn(4, 6, 48)
    kernel = jnp.asarray(layer.layout.to_dense(np.asarray(layer.values[...])))
    norms = gradient_norms(
        layer, block_sparse_layers(layer, None), lambda m, x: LOSSES[name](m, x), (x,)
    )[()][0]
    gradient = np.asarray(jax.grad(lambda w: LOSSES[name](lambda x: x @ w, x))(kernel), np.float64)
    expected = np.linalg.norm(gradient.reshape(6, 8, 6, 8), axis=(1, 3))
    np.testing.assert_allclose(norms, expected, rtol=1e-3, atol=1e-5)


# The state of another layout is refused, also of parameters alone.


def another(evolving):
    return [make(evolving, layout=sd.make_layout("random", 32, 64, 8, 0.5, n)) for n in (0, 1)]


def test_parameters_of_another_static_layout_are_refused():
    first, second = another(False)
    nnx.update(second, nnx.state(first, nnx.Param))
    with pytest.raises(sd.UserError, match="legal: a state of the same layout"):
        second(drawn(2, 32))


def test_parameters_of_other_tables_are_refused_and_inside_jit_give_nan():
    first, second = another(True)
    nnx.update(second, nnx.state(first, nnx.Param))
    for use in (lambda layer: layer(drawn(2, 32)), sd.densify, sd.evolve):
        with pytest.raises(sd.UserError, match="another layout than its values"):
            use(second)
    assert np.all(np.isnan(nnx.jit(lambda layer, x: layer(x))(second, drawn(2, 32))))


needs_averages = pytest.mark.skipif(not hasattr(nnx, "EMA"), reason="this flax has no nnx.EMA")


@needs_averages
@pytest.mark.parametrize("decay", some([0.9, 0.99, 0.999], 0.99))
def test_an_average_of_all_variables_of_one_layout_is_the_layer(decay):
    layer = make(True, sides=(256, 256), density=0.25)
    average = nnx.EMA(layer, decay)
    for _ in range(3):
        average.update(layer)
    x = drawn(4, 256)
    np.testing.assert_allclose(average.apply_to(layer)(x), layer(x), atol=1e-5)


@needs_averages
def test_an_average_over_two_layouts_is_refused():
    static, evolving = make(), make(True)
    averages = [nnx.EMA(layer, 0.9, only=nnx.Param) for layer in (static, evolving)]
    averaged = averages[1].apply_to(evolving)
    for layer in (static, evolving):
        sd.evolve(layer, None, "set", share=0.3, seed=1)
    with pytest.raises(ValueError, match="layout_"):
        averages[0].update(static)
    averages[1].update(evolving)
    with pytest.raises(sd.UserError, match="another layout than its values"):
        averaged(drawn(2, 32))


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.astype(jnp.bfloat16),
        lambda a: a.astype(jnp.float16),
        lambda a: a * 0.3,
        lambda a: 0.9 * a + 0.1 * a,
    ],
)
def test_a_cast_or_decayed_state_of_one_layout_is_taken(change):
    layer = make(True)
    state = nnx.state(layer, nnx.Param)
    nnx.update(layer, jax.tree.map(change, state))
    assert np.all(np.isfinite(np.asarray(layer(drawn(2, 32)), np.float32)))


def test_weight_decay_and_averages_inside_an_optimizer_survive_evolution():
    layer = make(True)
    chain = optax.chain(optax.adamw(1e-2, weight_decay=0.5), optax.ema(0.9))
    optimizer = nnx.Optimizer(layer, chain, wrt=nnx.Param)
    step = nnx.jit(lambda m, o: o.update(m, nnx.grad(lambda m: jnp.mean(m(drawn(8, 32)) ** 2))(m)))
    for seed in range(3):
        step(layer, optimizer)
        sd.evolve(layer, optimizer, "set", share=0.3, seed=seed)
    assert np.all(np.isfinite(layer(drawn(2, 32))))


@pytest.mark.parametrize("method", ["set", "static"])
@each_kind
def test_an_optax_state_follows_the_name_of_a_static_layout(method, evolving):
    layer, tx = make(evolving), optax.adam(1e-2)
    state = tx.init(nnx.state(layer, nnx.Param))
    state = sd.evolve(layer, state, method, share=0.3)
    params = nnx.state(layer, nnx.Param)
    gradients = nnx.grad(lambda m: jnp.mean(m(drawn(8, 32)) ** 2))(layer)
    updates, _ = tx.update(gradients, state, params)
    nnx.update(layer, optax.apply_updates(params, updates))
    assert np.all(np.isfinite(layer(drawn(2, 32))))


# A static layer has parameters alone, as nnx.Linear has.


def test_the_state_of_a_static_layer_is_parameters_alone():
    layer, x = make(), drawn(2, 32)
    graph, params = nnx.split(layer, nnx.Param)
    gradients = jax.grad(lambda params: jnp.sum(nnx.merge(graph, params)(x)))(params)
    stepped = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
    assert nnx.merge(graph, stepped)(x).shape == (2, 64)
    assert jax.grad(lambda m: jnp.sum(m(x)))(layer).values.shape == layer.values.shape


# sparsify and densify.


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.head = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 8, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(64, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.head(self.drop(self.norm(self.first(x))))


def first(path, linear):
    return path == "first"


CONVERSIONS = {
    "sparsify": lambda: (model := Model(), sd.sparsify(model, density=0.5, block=8, where=first)),
    "densify": lambda: (
        model := sd.sparsify(Model(), density=0.5, block=8, where=first),
        sd.densify(model),
    ),
    "an attention": lambda: (
        model := nnx.MultiHeadAttention(4, 32, 64, decode=False, rngs=nnx.Rngs(0)),
        sd.sparsify(model, density=0.5, block=8, where=lambda path, linear: path == "query"),
    ),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_the_old_model_shares_no_variable_and_no_buffer_with_the_new_one(name):
    old, new = CONVERSIONS[name]()
    before = jax.tree.map(np.asarray, nnx.state(old, nnx.Param))

    @nnx.jit(donate_argnums=0)
    def change(model):
        nnx.update(model, jax.tree.map(lambda a: a + 1, nnx.state(model, nnx.Param)))

    change(new)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(old, nnx.Param), before)


def double(*args, **options):
    return jax.lax.dot_general(*args, **options) * 2


def to_bfloat16(arrays, dtype=None):
    return tuple(None if a is None else jnp.asarray(a, jnp.bfloat16) for a in arrays)


class Frozen(nnx.Variable):
    pass


SETTINGS = {
    "dot_general": {"dot_general": double},
    "promote_dtype": {"promote_dtype": to_bfloat16},
    "preferred": {"dtype": jnp.bfloat16, "preferred_element_type": jnp.float32},
    "narrower": {"preferred_element_type": jnp.bfloat16},
    "precision": {"precision": "highest"},
    "enum": {"precision": jax.lax.Precision.HIGH},
    "metadata": {"kernel_metadata": {"tag": "mine"}, "bias_metadata": {"tag": "ours"}},
}


@pytest.mark.parametrize("density, evolving", some([(1, False), (0.5, True)], 0.5))
@pytest.mark.parametrize("name", SETTINGS)
def test_sparsify_and_densify_keep_the_settings(name, density, evolving):
    linear, x = nnx.Linear(32, 64, **SETTINGS[name], rngs=nnx.Rngs(0)), drawn(4, 32)
    sparse = sd.sparsify(linear, "magnitude", density=density, block=8, evolving=evolving)
    dense = sd.densify(sparse)
    model = linear if density == 1 else dense
    assert sparse(x).dtype == linear(x).dtype == dense(x).dtype
    as_float = lambda a: np.asarray(a, np.float32)  # noqa: E731
    np.testing.assert_allclose(as_float(sparse(x)), as_float(model(x)), rtol=2e-2, atol=2e-2)
    assert dense.precision == linear.precision and dense.dot_general is linear.dot_general
    for a, b, c in (
        (linear.kernel, sparse.values, dense.kernel),
        *[[m.bias for m in (linear, sparse, dense)]],
    ):
        assert (
            a.get_metadata().get("tag")
            == b.get_metadata().get("tag")
            == c.get_metadata().get("tag")
        )


@pytest.mark.parametrize("evolving", some([False, True], True))
@pytest.mark.parametrize(
    "sides", some({"filled": ((32, 64),), "one padded": ((30, 44),), "odd": ((24, 9),)}, "odd")
)
def test_the_kernel_is_read_as_that_of_the_dense_layer(sides, evolving):
    layer = sd.BlockSparseLinear(*sides, density=0.5, block=8, evolving=evolving, rngs=nnx.Rngs(0))
    dense = sd.densify(layer).kernel[...]
    assert layer.kernel.shape == sides and layer.kernel.dtype == dense.dtype
    for read in (lambda m: m.kernel[...], lambda m: jnp.asarray(m.kernel)):
        np.testing.assert_array_equal(read(layer), dense)
        np.testing.assert_array_equal(nnx.jit(read)(layer), dense)
    np.testing.assert_array_equal(layer.kernel, dense)
    np.testing.assert_array_equal(layer.kernel[3, 2:5], dense[3, 2:5])
    assert (len(layer.kernel), layer.kernel.size) == (sides[0], dense.size)
    for read in (
        lambda kernel: kernel.T,
        lambda kernel: kernel.astype(jnp.bfloat16),
        lambda kernel: kernel * 2 + 1,
        lambda kernel: 1 - kernel / 2,
        lambda kernel: jnp.ones((3, sides[0])) @ kernel,
    ):
        np.testing.assert_array_equal(read(layer.kernel), read(dense))
    np.testing.assert_allclose(jnp.sum(layer.kernel[...] ** 2), jnp.sum(dense**2), rtol=1e-5)
    gradient = nnx.grad(lambda m: jnp.sum(m.kernel[...] ** 2) / 2)(layer)
    filled = layer.weight().dense()  # Values where the shape ends have no gradient.
    assert float(jnp.sum(gradient["values"][...] ** 2)) == pytest.approx(
        float(jnp.sum(filled[: sides[0], : sides[1]] ** 2)), rel=1e-5
    )
    new = sd.BlockSparseLinear(*sides, layout=layer.layout, evolving=evolving, rngs=nnx.Rngs(1))
    new.kernel[...] = dense
    np.testing.assert_array_equal(new.kernel[...], dense)
    new.kernel.set_value(2 * dense)
    np.testing.assert_array_equal(new.values[...], 2 * sd.cut_blocks(dense, layer.layout))


def test_a_kernel_that_the_layer_cannot_store_is_not_written():
    layer = sd.BlockSparseLinear(32, 64, density=0.5, block=8, rngs=nnx.Rngs(0))
    before, whole = jnp.copy(layer.values[...]), jnp.ones((32, 64))
    one = jnp.asarray(layer.kernel[...]).at[tuple(np.argwhere(layer.kernel[...] == 0)[0])].set(1)
    refused = ((whole, "of density 0.5"), (one, "of density 0.5"), (whole.T, "legal: .32, 64"))
    for kernel, words in refused:
        with pytest.raises(sd.UserError, match=words):
            layer.kernel.set_value(kernel)
    evolving = sd.BlockSparseLinear(32, 64, density=1, block=8, evolving=True, rngs=nnx.Rngs(0))
    for each in (layer, evolving):
        with pytest.raises(sd.UserError, match="Inside `jit` it is not known"):
            nnx.jit(lambda m, k: m.kernel.set_value(k))(each, whole)
    np.testing.assert_array_equal(layer.values[...], before)
    full = sd.BlockSparseLinear(32, 64, density=1, block=8, rngs=nnx.Rngs(0))
    nnx.jit(lambda m, k: m.kernel.set_value(k))(full, whole)
    np.testing.assert_array_equal(full.kernel[...], whole)


@pytest.mark.parametrize("evolving", some([False, True], True))
def test_the_kernel_of_a_stack_is_that_of_its_layers(evolving):
    make = lambda rngs: sd.BlockSparseLinear(  # noqa: E731
        16, 24, density=0.5, block=8, offset=3, evolving=evolving, rngs=rngs
    )
    stack = nnx.split_rngs(splits=3)(nnx.vmap(make))(nnx.Rngs(0))
    dense = sd.densify(stack).kernel[...]
    np.testing.assert_array_equal(stack.kernel[...], dense)
    stack.kernel[...] = 3 * dense
    np.testing.assert_array_equal(stack.kernel[...], 3 * dense)


def test_a_kernel_of_another_type_keeps_it():
    linear = nnx.Linear(32, 64, rngs=nnx.Rngs(0))
    linear.kernel = Frozen(linear.kernel[...])
    sparse = sd.sparsify(linear, density=0.5, block=8)
    assert type(sparse.values) is Frozen is type(sd.densify(sparse).kernel)


def test_what_sparsify_cannot_keep_is_refused():
    own = nnx.Linear(32, 64, rngs=nnx.Rngs(0))
    own.scale = 3
    tied = nnx.Sequential(*[nnx.Linear(32, 32, rngs=nnx.Rngs(0)) for _ in range(2)])
    tied.layers[1].kernel = tied.layers[0].kernel
    einsum = nnx.Einsum(
        "ab,bc->ac", (32, 64), einsum_op=lambda *a, **k: jnp.einsum(*a, **k), rngs=nnx.Rngs(0)
    )
    for model, words in (
        (own, "attributes of its own: scale"),
        (tied, "kernel is a parameter of layers.0 and layers.1"),
        (einsum, "einsum_op of its own"),
        (nnx.Linear(32, 64, precision=("high", "highest"), rngs=nnx.Rngs(0)), "same for both"),
    ):
        with pytest.raises(sd.UserError, match=words):
            sd.sparsify(model, density=0.5, block=8)


def test_a_density_for_each_layer():
    model = nnx.Sequential(*[nnx.Linear(32, 32, rngs=nnx.Rngs(n)) for n in range(2)])
    sparse = sd.sparsify(model, density={"layers.0": 0.25, "layers.1": 0.5}, block=8)
    assert [layer.layout.density for layer in sparse.layers] == [0.25, 0.5]
    with pytest.raises(sd.UserError, match=r"layers.1: `density` has no value for it"):
        sd.sparsify(model, density={"layers.0": 0.25}, block=8)


# Random layouts follow rngs.


def test_random_layouts_follow_rngs():
    rngs = nnx.Rngs(0)
    layers = [make(sides=(128, 128), rngs=rngs) for _ in range(3)]
    layers += [make(sides=(128, 128), seed=7)]
    assert len({layer.layout for layer in layers}) == 4
    assert make(seed=7).layout == make(seed=7).layout
    assert make(offset=2).layout == nnx.eval_shape(lambda: make(offset=2)).layout


def test_layers_made_inside_a_transformation_have_layouts_of_their_own():
    def pair():
        rngs = nnx.Rngs(0)
        return nnx.List([make(rngs=rngs) for _ in range(2)])

    one, two = nnx.eval_shape(pair)
    again, _ = nnx.eval_shape(pair)
    assert one.layout != two.layout and one.layout == again.layout


def test_calls_of_sparsify_one_after_the_other_have_layouts_of_their_own():
    model = nnx.Sequential(*[nnx.Linear(64, 64, rngs=nnx.Rngs(n)) for n in range(2)])
    for n in range(2):
        model = sd.sparsify(
            model, density=0.5, block=8, where=lambda path, _, n=n: path == f"layers.{n}"
        )
    assert model.layers[0].layout != model.layers[1].layout


INITIALIZERS = {
    "glorot": nnx.initializers.glorot_uniform(),
    "normal": nnx.initializers.normal(0.02),
    "orthogonal": nnx.initializers.orthogonal(),
    "he": nnx.initializers.he_normal(),
}


@pytest.mark.parametrize("name", some([*INITIALIZERS], "glorot", "normal"))
def test_outputs_have_the_variance_of_the_dense_layer_with_any_initializer(name):
    sides, x, init = (256, 256), np.asarray(drawn(256, 256)), INITIALIZERS[name]
    dense = nnx.Linear(*sides, kernel_init=init, rngs=nnx.Rngs(0))
    sparse = make(sides=sides, density=0.125, block=16, kernel_init=init)
    assert 0.9 < np.std(sparse(x)) / np.std(dense(x)) < 1.1


# Programs.


@pytest.mark.parametrize("pattern", some(["random", "monarch"], "random"))
@each_kind
def test_export_takes_a_symbolic_batch(pattern, evolving):
    layer = make(evolving, pattern=pattern)
    batch, length = export.symbolic_shape("b, t")
    program = export.export(jax.jit(lambda x: layer(x)))(
        jax.ShapeDtypeStruct((batch, length, 32), jnp.float32)
    )
    for shape in ((1, 1), (3, 5), (2, 40)):
        x = drawn(*shape, 32)
        np.testing.assert_allclose(program.call(x), layer(x), rtol=1e-4, atol=1e-5)


@each_kind
def test_precision_reaches_the_products_and_their_gradients(evolving):
    layer = make(evolving, precision="highest")
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    loss = lambda params, x: jnp.sum(nnx.merge(graph, params, rest)(x) ** 2)  # noqa: E731
    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(params, drawn(64, 32)))
    assert text.count("HIGHEST") >= 3 and "precision=None" not in text


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rows, use_bias", some([(1, False), (128, False), (300, True)], 300))
def test_gradients_in_16_bits_of_an_evolving_layer(dtype, rows, use_bias):
    layer = make(True, dtype=dtype, use_bias=use_bias)
    wide = make(True, use_bias=use_bias)
    gradient = nnx.jit(nnx.grad(lambda m, x: jnp.mean(m(x).astype(jnp.float32) ** 2)))
    x = drawn(rows, 32)
    got, expected = (gradient(m, x)["values"][...] for m in (layer, wide))
    np.testing.assert_allclose(got, expected, rtol=0.05, atol=0.02)


MASK = np.array([[1, 0, 0], [1, 1, 1], [0, 1, 0], [0, 1, 0]], bool)


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("rows", [4, 64])
@pytest.mark.parametrize("block", [0, 2])
def test_an_infinite_input_reaches_the_outputs_that_read_it_alone(value, rows, block):
    layout = sd.BlockLayout.from_mask(MASK, 16)
    values = jnp.ones((layout.nnz, 16, 16))
    x = jnp.ones((rows, 64)).at[:, 16 * block : 16 * block + 16].set(value)
    dy = jnp.ones((rows, 48)).at[:, :16].set(value)
    for name in ("xla", "xla_static"):
        y, pullback = jax.vjp(lambda x, n=name: sd.block_sparse_matmul(x, values, layout, n), x)
        finite = np.isfinite(np.asarray(y).reshape(rows, 3, 16)).all(axis=(0, 2))
        np.testing.assert_array_equal(finite, ~MASK[block])
        (dx,) = pullback(dy)
        finite = np.isfinite(np.asarray(dx).reshape(rows, 4, 16)).all(axis=(0, 2))
        np.testing.assert_array_equal(finite, ~MASK[:, 0])
