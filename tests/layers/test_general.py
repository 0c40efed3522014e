"""nnx.LinearGeneral and nnx.Einsum become block-sparse matrices that keep their axes."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from marks import examples, some

import sparse_dataflow as sd

SHAPE = 4, 8, 16, 8
"""Of drawn inputs."""


def drawn_inputs(*shape):
    return jax.random.normal(jax.random.key(1), shape or SHAPE)


@st.composite
def linear_generals(draw):
    axes = draw(st.permutations(range(1, 4)))[: draw(st.integers(1, 3))]
    features = [SHAPE[axis] for axis in sorted(axes)]
    axes = [axis - 4 if draw(st.booleans()) else axis for axis in axes]
    new = draw(st.sampled_from([(16,), (2, 8), (8, 3, 2)]))
    bias = draw(st.booleans())
    init = nnx.initializers.normal()
    return nnx.LinearGeneral(
        features,
        new,
        axis=axes,
        use_bias=bias,
        bias_init=init,
        rngs=nnx.Rngs(draw(st.integers(0, 9))),
    )


EQUATIONS = {
    "BTD,NDH->BTNH": ((*SHAPE[:2], 16), (4, 16, 8), (4, 8)),
    "BSD,CKDH->CBSKH": ((*SHAPE[:2], 16), (2, 3, 16, 8), (2, 3, 8)),
    "BTNH,NHD->BTD": (SHAPE, (16, 8, 24), (24,)),
    "...f, fg -> ...g": (SHAPE, (8, 16), (16,)),
    "a...b,cbad->...dc": ((4, 2, 3, 8), (2, 8, 4, 8), (8, 2)),
}
"""Equation -> shapes of inputs, kernel and bias; the first three are Gemma's."""


def einsum(equation, with_bias=True):
    _, kernel, bias = EQUATIONS[equation]
    init = nnx.initializers.normal()
    return nnx.Einsum(
        equation, kernel, bias if with_bias else None, bias_init=init, rngs=nnx.Rngs(0)
    )


def keeps_its_function(module, x, evolving=False):
    """At density 1 the sparse module equals the module; its dense form has equal parameters."""
    sparse = sd.sparsify(module, "magnitude", density=1, block=8, evolving=evolving)
    np.testing.assert_allclose(sparse(x), module(x), rtol=1e-4, atol=1e-5)
    dense = sd.densify(sparse)
    assert type(dense) is type(module)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(dense), nnx.state(module))
    np.testing.assert_array_equal(dense(x), module(x))


@hypothesis.given(linear_generals(), st.booleans())
@hypothesis.settings(max_examples=examples(6), deadline=None)
def test_a_linear_general_of_any_axes_keeps_its_function(module, evolving):
    keeps_its_function(module, drawn_inputs(), evolving)


@pytest.mark.parametrize("with_bias", some([False, True], True))
@pytest.mark.parametrize("equation", EQUATIONS)
def test_an_einsum_that_is_a_matrix_product_keeps_its_function(equation, with_bias):
    keeps_its_function(einsum(equation, with_bias), drawn_inputs(*EQUATIONS[equation][0]))


@pytest.mark.parametrize("equation", ["BSD,CKDH->CBSKH", "a...b,cbad->...dc"])
def test_blocks_that_are_not_stored_are_zeros_of_the_kernel(equation):
    module, x = einsum(equation), drawn_inputs(*EQUATIONS[equation][0])
    sparse = sd.sparsify(module, "magnitude", density=0.5, block=4)
    dense = sd.densify(sparse)
    np.testing.assert_allclose(dense(x), sparse(x), rtol=1e-4, atol=1e-5)
    kernel, original = np.asarray(dense.kernel[...]), np.asarray(module.kernel[...])
    assert (kernel == 0).mean() == 0.5 and np.all((kernel == 0) | (kernel == original))


def test_the_projections_of_flax_attention_are_trained_and_made_dense_again():
    attention = nnx.MultiHeadAttention(
        num_heads=4, in_features=32, qkv_features=64, decode=False, rngs=nnx.Rngs(0)
    )
    sparse = sd.sparsify(attention, density=0.5, block=8, evolving=True)
    names = ("query", "key", "value", "out")
    assert all(getattr(sparse, name).linear.values.shape == (16, 8, 8) for name in names)
    optimizer = nnx.Optimizer(sparse, optax.adam(1e-2), wrt=nnx.Param)
    x, y = drawn_inputs(8, 5, 32), jnp.tanh(drawn_inputs(8, 5, 32))
    causal = nnx.make_causal_mask(x[..., 0])

    def loss_fn(model):
        return jnp.mean((model(x, mask=causal) - y) ** 2)

    @nnx.jit
    def step(model, optimizer):
        loss, gradients = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    losses = [float(step(sparse, optimizer)) for _ in range(20)]
    before = sparse.query.linear.layout
    sd.evolve(sparse, optimizer, "set", share=0.25)
    losses += [float(step(sparse, optimizer)) for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0] and sparse.query.linear.layout != before
    dense = sd.densify(sparse)
    assert {type(getattr(dense, name)) for name in names} == {nnx.LinearGeneral}
    np.testing.assert_allclose(dense(x), sparse(x), rtol=1e-4, atol=1e-5)


def test_a_stack_of_scanned_attentions_is_replaced():
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def build(rngs):
        return nnx.LinearGeneral(32, (4, 8), rngs=rngs)

    stack, x = build(nnx.Rngs(0)), drawn_inputs(2, 32)
    flat = lambda x, layer: layer(x).reshape(2, 32)  # noqa: E731
    scan = nnx.scan(flat, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    sparse = sd.sparsify(stack, "magnitude", density=0.5, block=8)
    assert sparse.linear.values.shape == (3, 8, 8, 8)
    dense = sd.densify(sparse)
    assert dense.kernel.shape == (3, 32, 4, 8) and dense.bias.shape == (3, 4, 8)
    np.testing.assert_allclose(scan(x, sparse), scan(x, dense), atol=1e-5)


def test_dtypes_are_those_of_the_module():
    dtypes = {"dtype": jnp.bfloat16, "param_dtype": jnp.float16}
    module = nnx.LinearGeneral(32, (4, 8), **dtypes, rngs=nnx.Rngs(0))
    sparse = sd.sparsify(module, density=0.5, block=8)
    dense = sd.densify(sparse)
    assert sparse.linear.values.dtype == dense.kernel.dtype == dense.bias.dtype == jnp.float16
    assert sparse(jnp.ones((1, 32))).dtype == dense(jnp.ones((1, 32))).dtype == jnp.bfloat16


class Mixed(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.heads = nnx.Einsum("tha,hab->thb", (4, 8, 8), rngs=rngs)
        self.summed = nnx.Einsum("ab,bcd->ac", (8, 8, 8), rngs=rngs)
        self.batched = nnx.LinearGeneral(8, 8, batch_axis={0: 4}, rngs=rngs)
        self.lora = nnx.LoRALinear(8, 8, lora_rank=2, rngs=rngs)
        self.linear = nnx.Linear(8, 8, rngs=rngs)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("heads", r"heads: Its equation tha,hab->thb is no product with one matrix; legal: an"),
        ("summed", r"summed: Its equation ab,bcd->ac is no product"),
        ("batched", r"batched: It has batch_axis=\{0: 4\}.*; legal: no batch_axis"),
        ("lora", "lora: LoRALinear is a class of its own; legal: nnx.Linear, nnx.LinearGeneral"),
    ],
)
def test_a_selected_module_that_cannot_be_replaced_is_named(name, words):
    select = {"density": 1, "block": 8}
    with pytest.raises(sd.UserError, match=words + ".* Or leave it out with `where`"):
        sd.sparsify(Mixed(), where=lambda path, linear: path in ("linear", name), **select)
    sparse = sd.sparsify(Mixed(), where=lambda path, linear: path == "linear", **select)
    assert type(getattr(sparse, name)) is type(getattr(Mixed(), name))


def test_inputs_of_another_shape_are_refused_in_words():
    heads = sd.sparsify(einsum("BTNH,NHD->BTD"), density=1, block=8)
    for shape in ((4, 8, 8, 16), (8, 16, 8), (2, 4, 8, 16, 8)):
        with pytest.raises(sd.UserError, match=r"legal: \(16, 8\) along the axes of BTNH,NHD->BTD"):
            heads(jnp.ones(shape))
    module = nnx.LinearGeneral((4, 8), 16, axis=(-2, -1), rngs=nnx.Rngs(0))
    out = sd.sparsify(module, density=1, block=8)
    with pytest.raises(sd.UserError, match=r"shape \(8, 4\); legal: \(4, 8\) along .* \(-2, -1\)"):
        out(jnp.ones((8, 4)))


PUBLIC = {
    "nnx.Linear": lambda: nnx.Linear(32, 64, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)),
    "nnx.Linear without a bias": lambda: nnx.Linear(32, 64, use_bias=False, rngs=nnx.Rngs(0)),
    "nnx.LinearGeneral": lambda: nnx.LinearGeneral(
        (4, 8), (2, 16), axis=(-2, -1), rngs=nnx.Rngs(0)
    ),
    "nnx.LinearGeneral of one axis": lambda: nnx.LinearGeneral(32, 64, rngs=nnx.Rngs(0)),
    "nnx.Einsum": lambda: nnx.Einsum("BTD,NDH->BTNH", (4, 32, 8), (4, 8), rngs=nnx.Rngs(0)),
    "nnx.Einsum without a bias": lambda: nnx.Einsum("bi,ij->bj", (32, 64), rngs=nnx.Rngs(0)),
}


@pytest.mark.parametrize("evolving", some([False, True], False))
@pytest.mark.parametrize("name", PUBLIC)
def test_public_attributes_are_those_of_the_dense_module(name, evolving):
    dense = PUBLIC[name]()
    sparse = sd.sparsify(dense, density=0.5, block=8, evolving=evolving)
    for attribute, value in vars(dense).items():
        if attribute.startswith("_"):
            continue
        mine = getattr(sparse, attribute)
        if isinstance(value, nnx.Variable):
            assert (mine.shape, mine.dtype, mine.ndim) == (value.shape, value.dtype, value.ndim)
            np.testing.assert_array_equal(mine[...], getattr(sd.densify(sparse), attribute)[...])
            mine[...] = 2 * mine[...]
            np.testing.assert_array_equal(mine[...], getattr(sd.densify(sparse), attribute)[...])
        else:
            assert mine == value, attribute


EQUATIONS_OF_CALLS = ["BTD,NDH->BTNH", "BD,NDH->BNH", "...D,NDH->N...H", "TBD, NDH -> BNTH"]


@pytest.mark.parametrize("equation", EQUATIONS_OF_CALLS)
def test_an_equation_at_the_call_has_the_same_matrix(equation):
    dense = nnx.Einsum("BTD,NDH->BTNH", (4, 32, 8), rngs=nnx.Rngs(0))
    sparse = sd.sparsify(dense, density=1, block=8)
    x = drawn_inputs(*{"BD,NDH->BNH": (5, 32)}.get(equation, (5, 3, 32)))
    for args, options in (((equation,), {}), ((), {"einsum_str": equation})):
        np.testing.assert_allclose(sparse(x, *args, **options), dense(x, equation), atol=1e-5)
    for wrong, words in (("BTH,NDH->BTND", "sums over other axes"), ("BTD->BT", "is no equation")):
        with pytest.raises(sd.UserError, match=words):
            sparse(x, wrong)
