"""Attention to the blocks of a layout against a softmax over all keys under a mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples, some

from sparse_dataflow.chips.tpu import splash
from sparse_dataflow.core.config.attention_rules import AttentionBlocks
from sparse_dataflow.core.executors.context import zigzag
from sparse_dataflow.core.layouts.attention_blocks import attention_layout
from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.core.ops.attention import attention_op as api
from sparse_dataflow.core.ops.attention import dot_product
from sparse_dataflow.core.ops.attention.block_attention import block_attention
from sparse_dataflow.files.errors import UserError

BLOCKS = AttentionBlocks((("window", 2), ("global", 1), ("random", 1)), 128)


def drawn_layout(tokens, block, seed, density=0.4):
    """A layout of any blocks, each query's own among them."""
    count = -(-tokens // block)
    mask = np.triu(np.random.default_rng(seed).random((count, count)) < density)
    return BlockLayout.from_mask(mask | np.eye(count, dtype=bool), block)


def drawn(tokens, heads, kv_heads, width=8, rows=2, dtype="float32"):
    rng = np.random.default_rng(tokens)
    shapes = [(rows, tokens, count, width) for count in (heads, kv_heads, kv_heads)]
    return [rng.normal(size=shape).astype(jnp.dtype(dtype)) for shape in shapes]


def masked_softmax(query, key, value, layout, documents=None, cap=0.0):
    """The scores of all pairs in float32 or wider, then the mask, pair by pair."""
    key, value = (jnp.repeat(a, query.shape[2] // a.shape[2], axis=2) for a in (key, value))
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("bthk,bshk->bhts", query, key, preferred_element_type=wide)
    scores /= np.sqrt(query.shape[-1])
    scores = cap * jnp.tanh(scores / cap) if cap else scores
    tokens = np.arange(query.shape[1])
    blocks = tokens // layout.block
    seen = (tokens[:, None] >= tokens) & layout.mask[blocks[None], blocks[:, None]]
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshk->bthk", weights, value.astype(wide)).astype(query.dtype)


def with_gradients(attend, operands):
    def loss(*operands):
        result = attend(*operands).astype(jnp.float32)
        return jnp.sum(result * jnp.sin(jnp.arange(result.size)).reshape(result.shape))

    return attend(*operands), *jax.grad(loss, argnums=(0, 1, 2))(*operands)


def assert_close(ours, exact, tolerance=3e-6):
    for mine, right in zip(ours, exact, strict=True):
        mine, right = (np.asarray(a, np.float32) for a in (mine, right))
        scale = max(1, np.abs(right).max())
        np.testing.assert_allclose(mine / scale, right / scale, atol=tolerance)


@settings(max_examples=examples(30))
@given(
    tokens=st.integers(1, 40),
    block=st.integers(1, 12),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    cap=st.sampled_from([0.0, 0.7]),
    count=st.integers(0, 4),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 99),
)
def test_output_and_gradients_are_those_of_a_masked_softmax(
    tokens, block, kv_heads, group, cap, count, dtype, seed
):
    operands = drawn(tokens, kv_heads * group, kv_heads, dtype=dtype)
    rng = np.random.default_rng(seed)
    documents = np.sort(rng.integers(0, count, (2, tokens)).astype(np.int32)) if count else None
    layout = drawn_layout(tokens, block, seed)
    attend = lambda *a: block_attention(*a, layout, documents, cap)  # noqa: E731
    exact = lambda *a: masked_softmax(*a, layout, documents, cap)  # noqa: E731
    ours = jax.jit(functools.partial(with_gradients, attend))(operands)
    tolerance = 4e-6 if dtype == "float32" else 4e-2
    right = jax.jit(functools.partial(with_gradients, exact))(operands)
    assert_close(ours, right, tolerance)


@pytest.mark.parametrize("name", ["reference", "xla"])
def test_an_implementation_takes_a_layout_or_its_rules(name):
    operands = drawn(300, 4, 2)
    layout = attention_layout(BLOCKS._replace(block=32), 300)
    exact = masked_softmax(*operands, layout)
    longer = attention_layout(BLOCKS._replace(block=32), 900)
    for blocks in (layout, longer, BLOCKS._replace(block=32)):
        np.testing.assert_allclose(
            api.self_attention(*operands, name, blocks=blocks), exact, atol=3e-6
        )


def test_a_layout_of_all_blocks_is_causal_attention():
    operands = drawn(40, 2, 2)
    everything = BlockLayout.from_mask(np.triu(np.ones((5, 5), bool)), 8)
    ours = api.self_attention(*operands, blocks=everything)
    assert np.array_equal(ours, api.self_attention(*operands))


@pytest.mark.parametrize(("block", "kv_heads"), some([(128, 2), (256, 1), (128, 4)], 256))
def test_splash_attention_skips_the_blocks_that_a_layout_lacks(block, kv_heads):
    operands = drawn(1024, 4, kv_heads, width=32, rows=1)
    layout = drawn_layout(1024, block, 3)
    attend = functools.partial(splash.self_attention, layout=layout, interpret=True)
    exact = functools.partial(masked_softmax, layout=layout)
    ours = jax.jit(functools.partial(with_gradients, attend))(operands)
    assert_close(ours, with_gradients(exact, operands), 4e-6)


@pytest.mark.parametrize("name", ["xla", "splash"])
def test_shards_of_a_sequence_see_the_blocks_of_the_whole(name, monkeypatch):
    monkeypatch.setattr(dot_product, "DENSE_TOKENS", 128)
    tokens, shards = 1024, 2
    query, key, value = drawn(tokens, 4, 2, width=32, rows=1)
    layout, order = attention_layout(BLOCKS, tokens), zigzag(tokens, shards)

    def attend(query, key, value):
        def shard(i):
            operands = query[:, order[i]], key, value, order, jnp.int32(i)
            if name == "xla":
                return api.shard_attention(*operands, blocks=BLOCKS)
            return splash.shard_attention(*operands, layout=layout, interpret=True)

        rows = jnp.concatenate([shard(i) for i in range(shards)], axis=1)
        return rows[:, np.argsort(order.reshape(-1))]

    exact = functools.partial(masked_softmax, layout=layout)
    operands = query, key, value
    ours = jax.jit(functools.partial(with_gradients, attend))(operands)
    assert_close(ours, with_gradients(exact, operands), 4e-6)


@pytest.mark.parametrize(
    ("blocks", "how", "message"),
    [
        (BLOCKS, {"window": 5}, "legal with blocks: window=0, bidirectional=False"),
        (BLOCKS, {"bidirectional": True}, "legal with blocks: window=0"),
        (drawn_layout(24, 8, 0), {}, "legal for 5 blocks of tokens"),
        (BlockLayout.from_mask(np.ones((5, 5), bool), 8), {}, "and none after it"),
        (BlockLayout.from_mask(np.triu(np.ones((5, 5), bool), 1), 8), {}, "with its own block"),
    ],
)
def test_what_is_no_layout_of_causal_attention_is_refused(blocks, how, message):
    with pytest.raises(UserError, match=message):
        api.self_attention(*drawn(40, 2, 2), blocks=blocks, **how)


def test_scores_of_blocks_that_are_not_read_never_exist():
    tokens, heads = 4096, 4
    shape = jax.ShapeDtypeStruct((1, tokens, heads, 16), jnp.float32)
    loss = lambda *a: api.self_attention(*a, blocks=BLOCKS).sum()  # noqa: E731
    program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*[shape] * 3).compile()
    array = tokens * heads * 16 * 4
    assert program.memory_analysis().temp_size_in_bytes < 12 * array < heads * tokens**2 * 4 / 4


@pytest.mark.parametrize(
    ("platform", "block", "chosen"),
    [("tpu", 128, "splash"), ("tpu", 64, "xla"), ("gpu", 128, "xla"), ("cpu", 64, "xla")],
)
def test_each_platform_has_an_implementation(monkeypatch, platform, block, chosen):
    monkeypatch.setattr(api.dispatch, "platform", lambda: platform)
    monkeypatch.setattr(api.dispatch, "sharding_refusal", lambda: "")
    operand = jax.ShapeDtypeStruct((1, 1024, 2, 64), "bfloat16")
    layout = attention_layout(BLOCKS._replace(block=block), 1024)
    assert api._choose(operand, operand, 0, 0.0, None, False, layout) == chosen
