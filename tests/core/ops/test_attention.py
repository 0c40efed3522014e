"""Every implementation of causal attention against softmax written out in numpy's float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples, some

from sparse_dataflow.chips.tpu import splash
from sparse_dataflow.core.ops import dispatch
from sparse_dataflow.core.ops.attention import attention_op as api
from sparse_dataflow.core.ops.attention import attention_op as reference
from sparse_dataflow.core.ops.attention.attention_op import self_attention
from sparse_dataflow.files.errors import UserError

SUITE = {
    "reference": reference.plain_attention,
    "xla": functools.partial(self_attention, implementation="xla"),
    "splash": functools.partial(splash.self_attention, interpret=True),
}
every_implementation = pytest.mark.parametrize("name", SUITE)


def draw(shape, dtype, seed=0, kv_heads=0):
    rng = np.random.default_rng(seed)
    key_shape = (*shape[:2], kv_heads or shape[2], shape[3])
    shapes = (shape, key_shape, key_shape)
    return [rng.normal(size=shape).astype(jnp.dtype(dtype)) for shape in shapes]


def exact_attention(query, key, value, window=0, cap=0):
    """[batch, tokens, heads, head_dim] in float64: one query at a time, over what it may see."""
    query, key, value = (np.asarray(a, np.float64) for a in (query, key, value))
    key, value = (np.repeat(a, query.shape[2] // a.shape[2], axis=2) for a in (key, value))
    result = np.zeros_like(query)
    for t in range(query.shape[1]):
        first = max(0, t + 1 - window) if window else 0
        seen_key, seen_value = key[:, first : t + 1], value[:, first : t + 1]
        scores = np.einsum("bhd,bshd->bhs", query[:, t], seen_key) / math.sqrt(query.shape[-1])
        scores = cap * np.tanh(scores / cap) if cap else scores
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        result[:, t] = np.einsum("bhs,bshd->bhd", weights, seen_value)
    return result


@pytest.mark.parametrize("name", ["reference", "xla"])
@settings(max_examples=examples(10))
@given(
    st.tuples(
        st.integers(1, 3), st.integers(1, 20), st.integers(1, 4), st.sampled_from([1, 8, 16])
    ),
    st.sampled_from(["float32", "bfloat16"]),
    st.integers(0, 9),
)
def test_attention_is_a_causal_softmax(name, shape, dtype, seed):
    check_against_exact(name, shape, dtype, seed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("tokens", "width"), some([(128, 64), (256, 128), (384, 40)], 384))
def test_splash_attention_is_a_causal_softmax(tokens, width, dtype):
    check_against_exact("splash", (2, tokens, 2, width), dtype, seed=tokens)


@pytest.mark.parametrize("name", ["reference", "xla"])
@settings(max_examples=examples(10))
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 12), st.integers(0, 13))
def test_query_heads_share_keys_and_see_a_window(name, kv_heads, group, tokens, window):
    shape = (2, tokens, kv_heads * group, 8)
    check_against_exact(name, shape, "float32", tokens, kv_heads, window)


@pytest.mark.parametrize(("kv_heads", "window"), some([(1, 0), (2, 100), (4, 1), (4, 128)], 2))
def test_splash_attention_shares_keys_and_sees_a_window(kv_heads, window):
    check_against_exact("splash", (2, 256, 4, 64), "float32", 3, kv_heads, window)


@pytest.mark.parametrize(
    ("name", "window"),
    [("xla", 3), ("splash", 100), pytest.param("xla", 0, marks=pytest.mark.slow)],
)
def test_scores_have_a_soft_cap(name, window):
    shape = (2, 128, 4, 32) if name == "splash" else (2, 9, 4, 6)
    check_against_exact(name, shape, "float32", 3, 2, window, cap=0.8)


@pytest.mark.parametrize("name", ["xla", "splash"])
def test_the_soft_cap_has_the_gradients_of_the_reference(name):
    operands = draw((1, 128, 2, 8), "float32")

    def gradients(attend):
        loss = lambda *a: jnp.sum(jnp.sin(attend(*a, window=70, cap=0.5)))  # noqa: E731
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*operands)

    for actual, expected in zip(gradients(SUITE[name]), gradients(SUITE["reference"])):
        np.testing.assert_allclose(actual, expected, atol=1e-5)


def check_against_exact(name, shape, dtype, seed, kv_heads=0, window=0, cap=0.0):
    operands = draw(shape, dtype, seed, kv_heads)
    attended = jax.jit(functools.partial(SUITE[name], window=window, cap=cap))(*operands)
    assert attended.shape == shape and attended.dtype == dtype
    # Scores are rounded to the dtype; a softmax turns their absolute error into a relative one.
    tolerance = 30 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        np.asarray(attended, np.float64),
        exact_attention(*operands, window=window, cap=cap),
        atol=tolerance,
        rtol=tolerance,
    )


@every_implementation
def test_softmax_keeps_its_precision_over_many_equal_keys_in_bfloat16(name):
    """1,024 weights of 1/1024 sum to 1 in float32; summed in bfloat16 they stick at a quarter."""
    shape = (1, 1024, 1, 8)
    zeros, values = jnp.zeros(shape, jnp.bfloat16), jnp.ones(shape, jnp.bfloat16)
    attended = np.asarray(SUITE[name](zeros, zeros, values), np.float32)
    np.testing.assert_allclose(attended, 1, rtol=2**-7)


@pytest.mark.parametrize(
    ("name", "tokens", "argument"),
    [("reference", 5, 0), ("reference", 5, 1), ("reference", 5, 2), ("xla", 5, 0), ("xla", 5, 1),
     ("xla", 5, 2), ("splash", 128, 1),
     *(pytest.param("splash", 128, other, marks=pytest.mark.slow) for other in (0, 2))],
)  # fmt: skip
def test_gradients_match_finite_differences(name, tokens, argument):
    query, key, value = draw((2, tokens, 2, 4), "float64", seed=3)
    cotangent, direction = draw(query.shape, "float64", seed=4)[:2]
    operands = [query, key, value]

    def exact(step):
        moved = list(operands)
        moved[argument] = moved[argument] + step * direction
        return np.sum(exact_attention(*moved) * cotangent)

    narrow = [a.astype(np.float32) for a in operands]
    loss = lambda *a: jnp.sum(SUITE[name](*a) * cotangent.astype(np.float32))  # noqa: E731
    gradient = jax.jit(jax.grad(loss, argnums=argument))(*narrow)
    slope = (exact(1e-5) - exact(-1e-5)) / 2e-5
    assert np.sum(np.asarray(gradient, np.float64) * direction) == pytest.approx(slope, rel=1e-4)


def test_no_gradient_from_the_past_to_the_future():
    operands = draw((1, 6, 2, 4), "float32")
    per_query = lambda *a: self_attention(*a).sum((0, 2, 3))  # noqa: E731
    for jacobian in jax.jit(jax.jacrev(per_query, argnums=(1, 2)))(*operands):
        reach = np.abs(jacobian).sum((1, 3, 4))  # [query position, key position]
        assert np.all(reach[np.triu_indices(6, 1)] == 0)
        # The first query sees one key, so its weight is constantly 1.
        assert np.all(reach[np.tril_indices(6)][1:] > 0)


@pytest.fixture
def log(monkeypatch):
    """The lines that dispatch logs, at any verbosity; its cache of logged lines is empty."""
    lines = []
    monkeypatch.setattr(
        dispatch.logging, "info", lambda text, *arguments: lines.append(text % arguments)
    )
    dispatch.log_choice.cache_clear()
    return lines


@pytest.mark.parametrize(
    ("implementation", "message"),
    [
        ("flash", "'flash' cannot run: the name is unknown; legal: reference, xla, cudnn, splash"),
        ("cudnn", "runs on gpu, and this is cpu; legal here: reference, xla"),
        ("splash", "runs on tpu, and this is cpu; legal here: reference, xla"),
    ],
)
def test_a_named_implementation_that_cannot_run_is_refused_in_words(implementation, message):
    with pytest.raises(UserError, match=message):
        self_attention(*draw((1, 4, 1, 8), "float32"), implementation)


def test_operands_of_unequal_shape_are_refused_in_words():
    query, key, value = draw((1, 4, 1, 8), "float32")
    with pytest.raises(UserError, match=r"got float32 \[1, 4, 1, 8\], float32 \[1, 3, 1, 8\]"):
        self_attention(query, key[:, :3], value)
    with pytest.raises(UserError, match="fewer heads, of which the query's are a multiple"):
        self_attention(query, *(jnp.repeat(a, 2, axis=2) for a in (key, value)))
    with pytest.raises(UserError, match="window is -1; legal: 1 or more tokens"):
        self_attention(query, key, value, window=-1)
    with pytest.raises(UserError, match="one dtype"):
        self_attention(query, key, value.astype(np.float16))


@pytest.mark.parametrize(
    ("platform", "shape", "dtype", "chosen", "message"),
    [
        ("tpu", (1, 256, 2, 64), "bfloat16", "splash", ""),
        ("tpu", (1, 100, 2, 64), "bfloat16", "xla", "a multiple of 128 tokens, not 100"),
        ("tpu", (1, 256, 2, 512), "bfloat16", "xla", "a head_dim of at most 256, not 512"),
        ("tpu", (1, 256, 2, 64), "float16", "xla", "need bfloat16 or float32, not float16"),
        ("cpu", (1, 256, 2, 64), "bfloat16", "xla", ""),
    ],
)
def test_the_platforms_kernel_is_chosen_unless_it_refuses_which_is_logged_once(
    monkeypatch, log, platform, shape, dtype, chosen, message
):
    monkeypatch.setattr(dispatch, "platform", lambda: platform)
    monkeypatch.setattr(dispatch, "sharding_refusal", lambda: "")
    for _ in range(2):
        assert api._choose(*[jax.ShapeDtypeStruct(shape, dtype)] * 2) == chosen
    assert len(log) == 1 and f"implementation {chosen} on {platform}" in log[0]
    assert message in log[0]


def test_cudnns_own_refusal_becomes_the_reason(monkeypatch, log):
    """Without a GPU jax finds no cuDNN, or cuDNN refuses float32: XLA runs in both cases."""
    monkeypatch.setattr(dispatch, "platform", lambda: "gpu")
    assert api._choose(*[jax.ShapeDtypeStruct((1, 128, 2, 64), "float32")] * 2) == "xla"
    assert "cuDNN" in log[0] or "fp16" in log[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(2, 48, 4, 8), (1, 64, 6, 16), (3, 33, 2, 4)])
def test_a_gradient_on_a_cpu_saves_one_array_of_weights(shape, dtype):
    batch, tokens, heads, _ = shape
    query, key, value = draw(shape, dtype, kv_heads=heads // 2)
    _, pull = jax.vjp(functools.partial(self_attention, implementation="xla"), query, key, value)
    scores = [leaf for leaf in jax.tree.leaves(pull) if leaf.size >= batch * heads * tokens**2]
    assert [leaf.dtype for leaf in scores] == [dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [0, 1, 5])
def test_forward_and_reverse_mode_agree_on_a_cpu(dtype, window):
    attend = functools.partial(self_attention, implementation="xla", window=window)
    operands = draw((2, 12, 4, 8), dtype, kv_heads=2)
    moves = draw((2, 12, 4, 8), dtype, 1, kv_heads=2)
    y, moved = jax.jvp(attend, operands, moves)
    pulled = jax.vjp(attend, *operands)[1](y)
    dots = [
        sum(float(np.vdot(np.asarray(a, np.float64), np.asarray(b, np.float64))) for a, b in pairs)
        for pairs in ([(y, moved)], list(zip(pulled, moves)))
    ]
    assert dots[0] == pytest.approx(dots[1], rel=1e-4 if dtype == "float32" else 5e-2, abs=0.3)
