"""`sparsify` and `densify` change how the linears of a model are stored."""

import dataclasses
import typing

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from marks import some

import sparse_dataflow as sd
from sparse_dataflow.core.layouts.evolution import largest_blocks


class Mlp(nnx.Module):
    def __init__(self, rngs, width=64):
        self.embed = nnx.Embed(11, 32, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(32, width, rngs=rngs), nnx.Linear(width, 32, rngs=rngs)])
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.head = nnx.Linear(32, 11, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.head(self.norm(x + self.blocks[1](nnx.gelu(self.blocks[0](x)))))


TOKENS = jnp.arange(10).reshape(2, 5)
in_blocks = lambda path, linear: path.startswith("blocks")  # noqa: E731


def test_where_selects_by_path_and_module_and_the_model_stays():
    model = Mlp(nnx.Rngs(0))
    before = model(TOKENS)
    seen = {}
    sparse = sd.sparsify(
        model, density=0.5, block=8,
        where=lambda path, linear: seen.setdefault(path, linear.out_features) > 11,
    )  # fmt: skip
    assert seen == {"blocks.0": 64, "blocks.1": 32, "head": 11}
    kinds = [type(layer) for layer in (*sparse.blocks, sparse.head)]
    assert kinds == [sd.BlockSparseLinear, sd.BlockSparseLinear, nnx.Linear]
    assert all(type(layer) is nnx.Linear for layer in model.blocks)
    np.testing.assert_array_equal(model(TOKENS), before)
    assert sparse(TOKENS).shape == (2, 5, 11)


@pytest.mark.parametrize("pattern", ["magnitude", "random"])
@pytest.mark.parametrize("evolving", some([False, True], False))
def test_density_one_and_densify_compute_the_same_function(pattern, evolving):
    model = Mlp(nnx.Rngs(0))
    options = {"block": 8, "where": in_blocks, "evolving": evolving}
    sparse = sd.sparsify(model, pattern, density=1, **options)
    np.testing.assert_allclose(sparse(TOKENS), model(TOKENS), atol=1e-5)
    half = sd.sparsify(model, pattern, density=0.5, **options)
    dense = sd.densify(half)
    assert type(dense.blocks[0]) is nnx.Linear
    np.testing.assert_allclose(dense(TOKENS), half(TOKENS), atol=1e-5)


@hypothesis.given(st.sampled_from([0.25, 0.5, 0.75]), st.integers(0, 5))
@hypothesis.settings(max_examples=5)
def test_magnitude_keeps_the_largest_balanced_blocks(density, seed):
    model = nnx.Linear(32, 64, rngs=nnx.Rngs(seed))
    kernel = np.asarray(model.kernel[...])
    layer = sd.sparsify(model, "magnitude", density=density, block=8)
    norms = np.sqrt(np.square(kernel).reshape(4, 8, 8, 8).sum(axis=(1, 3)))
    assert layer.layout == largest_blocks(norms, 8, round(4 * density))
    assert layer.layout.balanced and layer.layout.density == density
    np.testing.assert_array_equal(layer.values[...], layer.layout.from_dense(kernel))
    np.testing.assert_array_equal(layer.bias[...], model.bias[...])


def test_a_pattern_for_training_keeps_the_variance_of_the_outputs():
    model = nnx.Linear(512, 512, rngs=nnx.Rngs(0))
    sparse = sd.sparsify(model, "random", density=0.125, block=32)
    y = sparse(jax.random.normal(jax.random.key(1), (256, 512)))
    assert abs(float(jnp.std(y)) - 1) < 0.05


def test_every_layer_has_its_own_random_layout():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(*[nnx.Linear(64, 64, rngs=rngs) for _ in range(3)])
    sparse = sd.sparsify(model, density=0.5, block=8)
    assert len({layer.layout for layer in sparse.layers}) == 3


@pytest.mark.parametrize("pattern", some(["magnitude", "random"], "magnitude"))
@pytest.mark.parametrize("evolving", [False, True])
def test_a_stack_of_scanned_layers_shares_a_layout_or_evolves_its_own(pattern, evolving):
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def build(rngs):
        return nnx.Linear(32, 32, rngs=rngs)

    stack, x = build(nnx.Rngs(0)), jnp.ones((2, 32))
    sparse = sd.sparsify(stack, pattern, density=0.5, block=8, evolving=evolving)
    apply = nnx.scan(
        lambda x, layer: jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
    )
    assert sparse.values.shape == (3, 8, 8, 8)
    distinct = len(set(sparse.layouts()))
    assert distinct == (3 if evolving and pattern == "magnitude" else 1)
    np.testing.assert_allclose(apply(x, sparse), apply(x, sd.densify(sparse)), atol=1e-5)


class Pair(typing.NamedTuple):
    first: typing.Any
    second: typing.Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    inner: typing.Any


CONTAINERS = {
    "tuple": lambda a, b: (a, b),
    "tuple of one linear": lambda a, b: (a, a),
    "named tuple": Pair,
    "nested": lambda a, b: {"x": [(a,), Pair(b, (a, None))]},
    "list in a tuple": lambda a, b: ([a], [b]),
    "dataclass": lambda a, b: Record((a, {"y": b})),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_linears_in_any_container_become_sparse_and_dense_again(name):
    class Held(nnx.Module):
        def __init__(self):
            linears = [nnx.Linear(32, 32, rngs=nnx.Rngs(n)) for n in range(2)]
            self.held = nnx.data(CONTAINERS[name](*linears))

        def __call__(self, x):
            is_module = lambda node: isinstance(node, nnx.Module)  # noqa: E731
            for layer in jax.tree.leaves(self.held, is_leaf=is_module):
                x = jnp.tanh(layer(x))
            return x

    model, x = Held(), jnp.ones((2, 32))
    sparse = sd.sparsify(model, density=1, block=8)
    kinds = {type(module) for _, module in nnx.iter_modules(sparse)}
    assert kinds == {Held, sd.BlockSparseLinear}
    assert type(sparse.held) is type(model.held)
    np.testing.assert_allclose(sparse(x), model(x), atol=1e-5)
    sd.evolve(sparse, None, "gradual", density=0.5)
    np.testing.assert_allclose(sd.densify(sparse)(x), sparse(x), atol=1e-5)
    assert nnx.graphdef(sd.densify(sparse)) == nnx.graphdef(model)


def test_a_linear_in_a_tuple_and_in_a_list_is_refused():
    model = nnx.Sequential(nnx.Linear(32, 32, rngs=nnx.Rngs(0)))
    model.again = nnx.data((model.layers[0],))
    with pytest.raises(sd.UserError, match="in a tuple and at another place"):
        sd.sparsify(model, density=0.5, block=8)


STACKED = {
    "nnx.Linear": lambda rngs: nnx.Linear(16, 32, rngs=rngs),
    "nnx.Linear without a bias": lambda rngs: nnx.Linear(16, 32, use_bias=False, rngs=rngs),
    "nnx.LinearGeneral": lambda rngs: nnx.LinearGeneral(16, (4, 8), rngs=rngs),
    "nnx.Einsum": lambda rngs: nnx.Einsum("bi,ijk->bjk", (16, 4, 8), (4, 8), rngs=rngs),
}


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("name", STACKED)
def test_a_stack_is_on_the_first_axis_or_refused(name, axis):
    build = nnx.split_rngs(splits=3)(nnx.vmap(STACKED[name], out_axes=axis))
    stack = build(nnx.Rngs(0))
    if axis:
        with pytest.raises(sd.UserError, match="stacked along the first axis"):
            sd.sparsify(stack, density=1, block=8)
        return
    sparse, x = sd.sparsify(stack, density=1, block=8), jnp.ones((2, 16))
    apply = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))
    np.testing.assert_allclose(apply(sparse, x), apply(stack, x), atol=1e-5)


WRAPPERS = {
    "WeightNorm": lambda module, rngs: nnx.WeightNorm(module, rngs=rngs),
    "SpectralNorm": lambda module, rngs: nnx.SpectralNorm(module, rngs=rngs),
    "WeightNorm of a model": lambda module, rngs: nnx.WeightNorm(
        nnx.Sequential(module, nnx.LayerNorm(32, rngs=rngs)), rngs=rngs
    ),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_linear_whose_kernel_a_wrapper_reads_is_refused(name):
    rngs = nnx.Rngs(0)
    linears = [nnx.Linear(32, 32, rngs=rngs) for _ in range(2)]
    model = nnx.Sequential(WRAPPERS[name](linears[0], rngs), linears[1])
    with pytest.raises(sd.UserError, match=r"kernel is a parameter of .*Norm, which reads it"):
        sd.sparsify(model, density=1, block=8)
    where = lambda path, linear: path == "layers.1"  # noqa: E731
    sparse, x = sd.sparsify(model, density=1, block=8, where=where), jnp.ones((2, 32))
    np.testing.assert_allclose(sparse(x), nnx.clone(model)(x), atol=1e-5)


@pytest.mark.parametrize("evolving", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64])
def test_parameters_have_the_dtype_that_was_asked_for(dtype, evolving):
    """A mark that 16 bits cannot hold has 32."""
    with jax.enable_x64(dtype == jnp.float64):
        layer = sd.BlockSparseLinear(
            32, 32, density=0.5, block=8, evolving=evolving, param_dtype=dtype, rngs=nnx.Rngs(0)
        )
        dtypes = {path[-1]: v.dtype for path, v in nnx.to_flat_state(nnx.state(layer, nnx.Param))}
        mark = dtypes.pop("table_mark", dtype)
        assert mark == (jnp.promote_types(dtype, jnp.float32) if evolving else dtype)
        assert set(dtypes.values()) == {jnp.dtype(dtype)}


def test_dtypes_are_those_of_the_linear():
    model = nnx.Linear(32, 32, dtype=jnp.bfloat16, param_dtype=jnp.float16, rngs=nnx.Rngs(0))
    sparse = sd.sparsify(model, density=0.5, block=8)
    assert sparse.values.dtype == jnp.float16 and sparse(jnp.ones((1, 32))).dtype == jnp.bfloat16
    dense = sd.densify(sparse)
    assert dense.kernel.dtype == jnp.float16 and dense(jnp.ones((1, 32))).dtype == jnp.bfloat16


def test_a_model_is_sparsified_without_its_arrays():
    abstract = nnx.eval_shape(
        lambda: sd.sparsify(Mlp(nnx.Rngs(0)), density=0.5, block=8, where=in_blocks)
    )
    assert abstract.blocks[0].values.shape == (16, 8, 8)


ABSTRACT = {
    "sparsify": lambda model: sd.sparsify(model, density=0.5, block=8, where=in_blocks),
    "magnitude": lambda model: sd.sparsify(model, "magnitude", density=0.5, block=8),
    "densify": lambda model: sd.densify(ABSTRACT["sparsify"](model)),
    "erk_densities": lambda model: sd.erk_densities(model, 0.5, block=8),
    "layouts": lambda model: sd.layouts(ABSTRACT["sparsify"](model)),
    "evolving layouts": lambda model: sd.layouts(
        sd.sparsify(model, density=0.5, block=8, where=in_blocks, evolving=True)
    ),
    "evolve": lambda model: sd.evolve(ABSTRACT["sparsify"](model), None, "set"),
    "partition_specs": lambda model: sd.partition_specs(
        ABSTRACT["sparsify"](model), jax.sharding.Mesh(jax.devices()[:1], ("x",)), "x"
    ),
}


@pytest.mark.parametrize("name", ABSTRACT)
def test_an_abstract_model_gives_what_a_concrete_one_does_or_words(name):
    concrete = Mlp(nnx.Rngs(0))
    abstract = nnx.eval_shape(lambda: Mlp(nnx.Rngs(0)))
    if name in ("magnitude", "evolving layouts", "evolve"):
        with pytest.raises(sd.UserError, match="abstract model"):
            ABSTRACT[name](abstract)
        return
    results = [ABSTRACT[name](model) for model in (concrete, abstract)]
    if isinstance(results[0], nnx.Module):
        graphs, states = zip(*(nnx.split(model) for model in results))
        assert graphs[0] == graphs[1]
        results = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), s) for s in states]
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_what_does_not_fit_is_refused_in_words():
    model = Mlp(nnx.Rngs(0))
    with pytest.raises(sd.UserError, match=r"legal: blocks.0, blocks.1, head\.$"):
        sd.sparsify(model, where=lambda path, linear: False)
    with pytest.raises(
        sd.UserError, match=r"head: A block of 16 is larger than a side of a 32 x 11 weight"
    ):
        sd.sparsify(model, density=0.5, block=16)
    with pytest.raises(sd.UserError, match=r"blocks.0: Density 0.3 .* multiples of 1/4"):
        sd.sparsify(model, "magnitude", density=0.3, block=8, where=in_blocks)
    with pytest.raises(sd.UserError, match="legal: magnitude, banded, butterfly"):
        sd.sparsify(model, "largest")
    with pytest.raises(sd.UserError, match=r"no linear; legal: nnx\.Linear, nnx"):
        sd.sparsify(nnx.LayerNorm(3, rngs=nnx.Rngs(0)))
    with pytest.raises(sd.UserError, match=r"no sd\.BlockSparseLinear"):
        sd.densify(model)
