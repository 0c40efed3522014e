"""The residual stream and its norm against float64; the kernels against the same, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples
from simulated import simulated_tpu
from simulated_triton import simulated_triton

from sparse_dataflow.core.ops import dispatch
from sparse_dataflow.core.ops.residual_norm import residual_norm_op
from sparse_dataflow.core.ops.residual_norm.residual_norm_op import Norm, Operands, residual_norm
from sparse_dataflow.files.errors import UserError

NAMES = ("y", "bias", "scale", "shift")


def simulated(implementation):
    """Returns a context that interprets the kernels of an implementation."""
    return simulated_tpu() if implementation == "pallas_tpu" else simulated_triton()


def exact(norm, x, y=None, bias=None, scale=None, shift=None):
    """Returns (residual, normed) in float64, step by step from the definition."""
    residual = x + (0 if y is None else y + (0 if bias is None else bias))
    mean = residual.mean(-1, keepdims=True) if norm.centred else 0
    variance = ((residual - mean) ** 2).mean(-1, keepdims=True)
    return residual, (residual - mean) / np.sqrt(variance + norm.epsilon) * scale + (
        0 if shift is None else shift
    )


def exact_gradients(norm, dresidual, dnormed, **operands):
    """Returns the gradient of each operand in float64, by central differences along axes of the
    output of one direction each: the product with random directions."""
    rng, result = np.random.default_rng(3), {}
    for name, array in operands.items():
        direction, step = rng.normal(size=array.shape), 1e-6
        ends = [exact(norm, **{**operands, name: array + s * direction}) for s in (step, -step)]
        changes = [(high - low) / (2 * step) for high, low in zip(*ends)]
        result[name] = direction, (changes[0] * dresidual).sum() + (changes[1] * dnormed).sum()
    return result


def drawn(seed, rows, features, names, dtype="float32"):
    rng = np.random.default_rng(seed)
    shapes = {"x": (*rows, features), "y": (*rows, features)}
    arrays = {n: rng.normal(size=shapes.get(n, (features,))) for n in ("x", *NAMES)}
    arrays["scale"] += 1
    arrays = {n: jnp.asarray(a, dtype) for n, a in arrays.items() if n in ("x", "scale", *names)}
    cotangents = tuple(jnp.asarray(rng.normal(size=shapes["x"]), dtype) for _ in range(2))
    operands = Operands(*(arrays.get(n) for n in ("x", *NAMES)))
    return operands, cotangents, {n: np.asarray(a, np.float64) for n, a in arrays.items()}


def evaluated(norm, operands, cotangents, implementation):
    def run(operands, cotangents):
        outputs, pull = jax.vjp(lambda o: residual_norm(norm, o, implementation), operands)
        return outputs, pull(cotangents)[0]

    return jax.jit(run)(operands, cotangents)


CASES = dict(
    seed=st.integers(0, 99),
    rows=st.sampled_from([(1,), (7,), (2, 9), (2, 48), (256,)]),
    features=st.sampled_from([128, 384, 640]),
    names=st.sampled_from(
        [(), ("y",), ("y", "bias"), ("y", "bias", "shift"), ("shift",), ("y", "shift")]
    ),
    # Parts that fit the features, parts that do not, and parts that are no power of two.
    norm=st.sampled_from(
        [
            Norm(True, 1e-5),
            Norm(False, 1e-6),
            Norm(True, 1e-2),
            Norm(True, 1e-5, 4, 32),
            Norm(False, 1e-5, 2, 64),
            Norm(True, 1e-5, 3, 16),
            Norm(True, 1e-5, 8, 128),
        ]
    ),
)


@pytest.mark.parametrize("implementation", residual_norm_op.IMPLEMENTATIONS)
@settings(max_examples=examples(4), deadline=None)
@given(**CASES)
def test_values_and_gradients_are_those_of_float64(
    implementation, seed, rows, features, names, norm
):
    if implementation == "pallas_tpu":
        rows = (*rows, 32)
    operands, cotangents, wide = drawn(seed, rows, features, names)
    with simulated(implementation):
        outputs, gradients = evaluated(norm, operands, cotangents, implementation)
    for output, right in zip(outputs, exact(norm, **wide), strict=True):
        np.testing.assert_allclose(output, right, atol=3e-5, rtol=3e-5)
    directional = exact_gradients(norm, *(np.asarray(c, np.float64) for c in cotangents), **wide)
    for name, (direction, right) in directional.items():
        gradient = np.asarray(getattr(gradients, name), np.float64)
        scale = np.linalg.norm(direction) * np.linalg.norm(gradient)
        assert abs((gradient * direction).sum() - right) <= 2e-5 * scale + 1e-4, name


@pytest.mark.parametrize("implementation", ["pallas_triton", "pallas_tpu"])
@settings(max_examples=examples(3), deadline=None)
@given(**CASES)
def test_kernels_in_bfloat16_round_once(implementation, seed, rows, features, names, norm):
    if implementation == "pallas_tpu":
        rows = (*rows, 32)
    operands, cotangents, wide = drawn(seed, rows, features, names, "bfloat16")
    with simulated(implementation):
        outputs, gradients = evaluated(norm, operands, cotangents, implementation)
    residual, _ = exact(norm, **wide)
    np.testing.assert_allclose(outputs[0].astype(float), residual, rtol=2**-8, atol=1e-6)
    rounded = {"x": np.asarray(outputs[0], np.float64), "scale": wide["scale"]}
    rounded |= {"shift": wide["shift"]} if "shift" in wide else {}
    np.testing.assert_allclose(
        outputs[1].astype(float), exact(norm, **rounded)[1], rtol=2**-8, atol=1e-5
    )
    assert {g.dtype for g in jax.tree.leaves(gradients)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("norm", [Norm(True, 1e-5), Norm(True, 1e-5, 2, 64)])
def test_forward_mode_agrees_with_the_reference(norm):
    operands, _, _ = drawn(1, (64,), 256, NAMES)
    tangents, _, _ = drawn(2, (64,), 256, NAMES)
    results = []
    for implementation in residual_norm_op.IMPLEMENTATIONS:
        with simulated(implementation):
            results.append(
                jax.jvp(
                    lambda o, name=implementation: residual_norm(norm, o, name),
                    (operands,),
                    (tangents,),
                )
            )
    for right, *others in zip(*map(jax.tree.leaves, results), strict=True):
        for other in others:
            np.testing.assert_allclose(other, right, atol=1e-4)


@pytest.mark.parametrize(
    ("features", "dtype", "words"),
    [(96, "float32", "96 features"), (20 * 128, "float16", "float16"), (8192 * 4 + 128, "float32",
     "features")],
)  # fmt: skip
def test_other_shapes_and_dtypes_are_refused_with_the_legal_ones(features, dtype, words):
    operands, _, _ = drawn(0, (4,), features, (), dtype)
    with simulated_triton():
        assert residual_norm_op.fused(Norm(True, 1e-5), operands) is None
        with pytest.raises(UserError, match=words):
            residual_norm(Norm(True, 1e-5), operands, "pallas_triton")


@pytest.mark.parametrize(
    ("rows", "features", "dtype", "words"),
    [(32, 96, "float32", "multiples of 128"), (32, 128, "float16", "float16"),
     (48, 128, "float32", "48 rows"), (64, 128 * 200, "float32", "64 rows")],
)  # fmt: skip
def test_a_tpu_refuses_other_shapes_with_the_legal_ones(rows, features, dtype, words):
    operands, _, _ = drawn(0, (rows,), features, (), dtype)
    with simulated_tpu():
        assert residual_norm_op.fused(Norm(True, 1e-5), operands) is None
        with pytest.raises(UserError, match=words):
            residual_norm(Norm(True, 1e-5), operands, "pallas_tpu")


def test_without_an_op_its_kernels_are_not_chosen():
    operands, _, _ = drawn(0, (4,), 128, ())
    with simulated_triton():
        assert residual_norm_op.fused(Norm(True, 1e-5), operands) is not None
        with dispatch.without("bias_activation", "residual_norm"):
            assert residual_norm_op.fused(Norm(True, 1e-5), operands) is None
        assert residual_norm_op.fused(Norm(True, 1e-5), operands) is not None
