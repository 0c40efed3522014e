"""Every family against a plain numpy forward pass in float64, over drawn configs."""

import dataclasses
import math
import re

import jax
import numpy as np
import pytest
from activation_formulas import FORMULAS
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples, some
from small_models import DENSE, MONARCH, arbitrary_params, as_dense, logits_of, tokens_of

from sparse_dataflow.core.config.activations import ACTIVATIONS
from sparse_dataflow.core.config.attention_settings import QK_NORM_SCOPES, RESIDUALS, SCALINGS
from sparse_dataflow.core.config.attention_settings import WHOLE_PAIRS as WHOLE
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.model import rotary
from sparse_dataflow.runs.families import FAMILIES

SCALES = ("embedding_scale", "residual_scale", "logit_divisor")


@st.composite
def arrangements(draw):
    """Draws the norms of a block, and how it joins attention and the MLP."""
    residual, norms = draw(st.sampled_from(RESIDUALS)), [(True, False), (True, True)]
    if residual != "parallel_shared_norm":
        norms.append((False, True))
    pre_norms, post_norms = draw(st.sampled_from(norms))
    scope = draw(st.sampled_from(["", *QK_NORM_SCOPES]))
    fields = {"residual": residual, "pre_norms": pre_norms, "post_norms": post_norms}
    return fields | {"qk_norm": bool(scope), "qk_norm_scope": scope or "head"}


@st.composite
def configs(draw):
    """Draws models with grouped queries, windows, gates, norms, biases and rotary scalings."""
    family = FAMILIES[draw(st.sampled_from(sorted(FAMILIES)))]
    head_dim, share = draw(st.sampled_from([0, 6, 12])), draw(st.sampled_from([1.0, 0.7, 0.4]))
    scaling = draw(st.sampled_from(SCALINGS))
    pairs = int((head_dim or 8) * share) // 2
    if scaling in WHOLE and int((head_dim or 8) * share) % 2:
        pairs, share = (head_dim or 8) // 2, 1.0
    factors = st.sampled_from([1.0, 1.7, 6.0])
    window, kinds = draw(st.sampled_from([0, 1, 3])), ("sliding", "sliding+full", "full+sliding")
    fused = draw(st.booleans())
    names = ("qkv",) if fused else ("q", "k", "v")
    biases = draw(st.sets(st.sampled_from([*names, "attn_out", "mlp_in", "mlp_out"])))
    return dataclasses.replace(
        DENSE,
        **{
            **family,
            "fused_qkv": fused,
            "biases": tuple(sorted(biases)),
            "num_kv_heads": draw(st.sampled_from([0, 1, 2])),
            "head_dim": head_dim,
            "window": window,
            "layer_types": draw(st.sampled_from(kinds)) if window else "sliding",
            "rotary_local_base": draw(st.sampled_from([0.0, 30.0])) if window else 0.0,
            "attention_cap": draw(st.sampled_from([0.0, 0.6])),
            "attention_scalar": draw(st.sampled_from([0, 5])),
            "logit_cap": draw(st.sampled_from([0.0, 3.0])),
            **draw(arrangements()),
            "scaled_embeddings": draw(st.booleans()),
            "output_bias": draw(st.booleans()),
            **{name: draw(st.sampled_from([1.0, 0.3])) for name in SCALES},
            "rotary_layers": draw(st.sampled_from(["rotated", "unrotated+rotated", "unrotated"])),
            "tied_embeddings": draw(st.booleans()),
            "activation": draw(st.sampled_from(sorted(ACTIVATIONS))),
            "norm_epsilon": draw(st.sampled_from([1e-6, 1e-2])),
            "rotary_base": draw(st.sampled_from([100.0, 5e5])),
            "rotary_factor": draw(st.sampled_from([1.0, 8.0])),
            "rotary_length": draw(st.sampled_from([16, 64])),
            "rotary_share": share,
            "rotary_scaling": scaling,
            "rotary_attention": draw(st.sampled_from([0.0, 1.3])),
            "rotary_factors": tuple(draw(factors) for _ in range(pairs))
            if scaling == "longrope"
            else (),
            "parametrization": draw(st.sampled_from(["standard", "supar"])),
        },
    )


@settings(max_examples=examples(24), deadline=None)
@given(configs(), st.integers(0, 9))
def test_logits_are_those_of_plain_numpy(config, seed):
    params, tokens = arbitrary_params(config, seed), tokens_of(config, 1, 9, seed)
    np.testing.assert_allclose(
        logits_of(config, params, tokens)[0],
        exact_logits(config, params, tokens[0]),
        rtol=2e-3,
        atol=2e-4,
    )


@st.composite
def rotary_settings(draw, scaling):
    """Draws models with a rotary scaling; ramps end inside and outside of the frequencies."""
    width, share = draw(st.sampled_from([6, 16, 40])), draw(st.sampled_from([1.0, 0.7, 0.45]))
    if scaling in WHOLE and int(width * share) % 2:
        share = 0.5
    factors = draw(st.lists(st.sampled_from([1.0, 1.7]), min_size=20, max_size=20))
    pairs = int(width * share) // 2 if scaling == "longrope" else 0
    return dataclasses.replace(
        DENSE,
        **FAMILIES["llama"],
        head_dim=width,
        rotary_scaling=scaling,
        rotary_share=share,
        rotary_base=draw(st.sampled_from([100.0, 5e5])),
        rotary_factor=draw(st.sampled_from([1.0, 8.0])),
        rotary_length=draw(st.sampled_from([64, 8192])),
        rotary_low=draw(st.sampled_from([1.0, 3.0])),
        rotary_high=draw(st.sampled_from([4.0, 32.0])),
        rotary_attention=draw(st.sampled_from([0.0, 1.3])),
        rotary_factors=tuple(factors[:pairs]),
    )


@pytest.mark.parametrize("scaling", SCALINGS)
@settings(max_examples=50)
@given(st.data())
def test_rotations_are_those_of_plain_numpy(scaling, data):
    config = data.draw(rotary_settings(scaling))
    x = np.random.default_rng(0).normal(size=(48, config.head_width)).astype(np.float32)
    rotated = rotary.rotate(config, x[None, :, None])[0, :, 0]
    np.testing.assert_allclose(rotated, rotate(config, x, 0), rtol=1e-3, atol=1e-4)


def assert_equals_its_dense_model(config):
    params, tokens = arbitrary_params(config), tokens_of(config)
    np.testing.assert_allclose(
        logits_of(config, params, tokens),
        logits_of(*as_dense(config, params), tokens),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize(
    "projection",
    some(["q", "k", "v", "attn_out", "mlp_gate", "mlp_in", "mlp_out"], "k", "attn_out", "mlp_gate"),
)
def test_each_projection_of_a_gated_model_may_be_block_sparse_or_low_rank(projection):
    llama = dataclasses.replace(DENSE, **FAMILIES["llama"], num_kv_heads=2)
    config = llama.with_linears(dataclasses.replace(MONARCH, rank=2), [projection])
    assert_equals_its_dense_model(config)


@pytest.mark.parametrize("fields", [{}, {"activation": "gelu", "biases": ("mlp_in",)}])
def test_a_sparse_gated_mlp_equals_the_dense_one_of_its_weights(fields):
    """Also with the GELU and the bias that `sparse_mlp` would fuse without a gate."""
    config = dataclasses.replace(DENSE, **{**FAMILIES["qwen3"], **fields}).with_linears(MONARCH)
    assert_equals_its_dense_model(config)


@pytest.mark.parametrize("activation", some(sorted(ACTIVATIONS), "gelu"))
def test_a_sparse_plain_mlp_equals_the_dense_one_of_its_weights(activation):
    config = dataclasses.replace(DENSE, activation=activation, biases=("mlp_in",))
    assert_equals_its_dense_model(config.with_linears(MONARCH))


def test_a_gated_mlp_is_quantized_where_its_groups_could_run_by_themselves():
    """Two blocks of seven products each: q, k, v, attn_out and three of the MLP."""
    pytest.importorskip("qwix")
    groups = LinearSpec("block_sparse", "monarch", density=0.5, block=8)
    config = dataclasses.replace(DENSE, **FAMILIES["llama"], precision="int8").with_linears(groups)
    params, tokens = arbitrary_params(config, 0), tokens_of(config, 3, 16, 0)
    text = str(jax.make_jaxpr(lambda tokens: logits_of(config, params, tokens))(tokens))
    assert len(re.findall(r"i32\[[0-9,]*\] = dot_general", text)) == 14


def exact_logits(config, params, tokens):
    """Logits [tokens, vocabulary] of one sequence, in float64."""
    embed, head = params["embed"], params["head"]
    x = embed["tokens"].astype(np.float64)[tokens]
    x = x * (math.sqrt(config.d_model) if config.scaled_embeddings else 1) * config.embedding_scale
    if config.positions == "learned":
        x = x + embed["positions"][: len(tokens)]
    for i in range(config.num_layers):
        layer = {
            name: {leaf: np.float64(stacked[i]) for leaf, stacked in module.items()}
            for name, module in params["blocks"].items()
        }
        normed = lambda name, x, use, at=layer: norm(config, at[name], x) if use else x  # noqa: E731
        before, after, scale = config.pre_norms, config.post_norms, config.residual_scale
        y = attention(config, layer, normed("norm1", x, before), i)
        attended = scale * normed("norm1_out", y, after)
        read = x + attended if config.residual == "sequential" else x
        shared = config.residual == "parallel_shared_norm"
        y = mlp(config, layer, normed("norm1" if shared else "norm2", read, before))
        x = x + attended + scale * normed("norm2_out", y, after)
    x = norm(config, head["norm"], x) * (256 / config.d_model if config.supar else 1)
    logits = x @ np.float64(head.get("output", embed["tokens"])).T / config.logit_divisor
    return capped(config.logit_cap, logits + head.get("output_bias", 0))


def capped(cap, x):
    return cap * np.tanh(x / cap) if cap else x


def linear(module, x):
    return x @ module["kernel"] + module.get("bias", 0)


def norm(config, module, x):
    if config.norm == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + config.norm_epsilon)
    return x * module["scale"] + module.get("bias", 0)


def mlp(config, layer, x):
    activation = FORMULAS[config.activation]
    hidden = linear(layer["mlp_in"], x)
    if config.gated_mlp:
        hidden = hidden * activation(linear(layer["mlp_gate"], x))
    else:
        hidden = activation(hidden)
    return linear(layer["mlp_out"], hidden)


def attention(config, layer, x, number):
    """One query head at a time, with the keys and values of its group."""
    types = config.layer_types.split("+")
    sliding = types[number % len(types)] == "sliding"
    local = config.rotary_local_base if sliding else 0
    rotated = config.rotary_layers.split("+")
    rotates = config.positions == "rotary" and rotated[number % len(rotated)] == "rotated"
    group, width = config.num_heads // config.kv_heads, config.head_width
    queries, keys, values = separated(config, layer, x)
    attended = []
    for head in range(config.num_heads):
        q, k, v = queries[:, head], keys[:, head // group], values[:, head // group]
        if rotates:
            q, k = rotate(config, q, local), rotate(config, k, local)
        scores = q @ k.T * math.sqrt(64 / width if config.supar else 1)
        scores = capped(config.attention_cap, scores / math.sqrt(config.attention_scalar or width))
        at = np.arange(len(x))
        distance = at[:, None] - at
        seen = (distance >= 0) & (distance < ((config.window if sliding else 0) or len(x)))
        weights = np.exp(np.where(seen, scores, -np.inf))
        attended.append(weights / weights.sum(-1, keepdims=True) @ v)
    return linear(layer["attn_out"], np.concatenate(attended, -1))


def separated(config, layer, x):
    """Normalised queries, keys, and values, [tokens, heads, width]."""
    tokens, kv_heads, width = len(x), config.kv_heads, config.head_width
    if config.fused_qkv:
        features = linear(layer["qkv"], x).reshape(tokens, kv_heads, -1, width)
        parts = [features[:, :, :-2].reshape(tokens, -1, width), features[:, :, -2]]
        parts.append(features[:, :, -1])
    else:
        parts = [linear(layer[name], x).reshape(tokens, -1, width) for name in "qkv"]
    for i, name in enumerate("qk" if config.qk_norm else ""):
        if config.qk_norm_scope == "head":
            parts[i] = norm(config, layer[f"{name}_norm"], parts[i])
        elif config.qk_norm_scope == "all_heads":
            whole = norm(config, layer[f"{name}_norms"], parts[i].reshape(tokens, -1))
            parts[i] = whole.reshape(parts[i].shape)
        else:
            scales = layer[f"{name}_norms"]["scale"]
            heads = [
                norm(config, {"scale": scale}, parts[i][:, j]) for j, scale in enumerate(scales)
            ]
            parts[i] = np.stack(heads, 1)
    return parts


def rotate(config, x, local):
    """As complex numbers, with the scalings as `transformers` states them."""
    width = int(x.shape[-1] * config.rotary_share)
    half = math.ceil(width / 2)
    frequency = (local or config.rotary_base) ** -(2 * np.arange(half) / width)
    factor, length, scale = config.rotary_factor, config.rotary_length, 1.0
    if local:
        pass
    elif config.rotary_scaling == "linear":
        frequency = frequency / factor
    elif config.rotary_scaling == "longrope":
        frequency = frequency / np.array(config.rotary_factors)
        scale = config.rotary_attention or math.sqrt(1 + math.log(factor) / math.log(length))
    elif config.rotary_scaling == "yarn":
        index = [
            half * math.log(length / (2 * math.pi * turns)) / math.log(config.rotary_base)
            for turns in (config.rotary_high, config.rotary_low)
        ]
        low, high = max(math.floor(index[0]), 0), min(math.ceil(index[1]), 2 * half - 1)
        ramp = np.clip((np.arange(half) - low) / (high - low or 0.001), 0, 1)
        frequency = frequency / factor * ramp + frequency * (1 - ramp)
        scale = config.rotary_attention or 0.1 * math.log(factor) + 1
    elif config.rotary_scaling == "llama3" and factor > 1:
        wavelength = 2 * np.pi / frequency
        low, high = config.rotary_low, config.rotary_high
        smooth = (length / wavelength - low) / (high - low)
        between = (1 - smooth) * frequency / factor + smooth * frequency
        frequency = np.where(
            wavelength > length / low,
            frequency / factor,
            np.where(wavelength < length / high, frequency, between),
        )
    turns = scale * np.exp(1j * np.arange(len(x))[:, None] * frequency)
    turned = (x[:, :half] + 1j * x[:, half : 2 * half]) * turns
    return np.concatenate([turned.real, turned.imag, x[:, 2 * half :]], -1)
