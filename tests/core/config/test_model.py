"""Model configs: JSON, hashing, defaults of projections, illegal values, named sizes."""

import dataclasses
import functools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import export
from small_models import DENSE as TINY

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.families import FAMILIES
from sparse_dataflow.runs.run_config import SIZES

dense_or_sparse = st.builds(
    LinearSpec,
    kind=st.sampled_from(["dense", "block_sparse"]),
    pattern=st.sampled_from(["pixelfly", "cyclic"]),
    density=st.floats(2**-20, 1),
    block=st.integers(1, 256),
    rank=st.integers(0, 64),
)
specs = dense_or_sparse | st.builds(
    LinearSpec, st.just("block_sparse"), hadamard=st.sampled_from([1, 2])
)


@st.composite
def configs(draw):
    heads = draw(st.integers(1, 64))
    family = FAMILIES[draw(st.sampled_from(sorted(FAMILIES)))]
    other = {
        "norm": draw(st.sampled_from(["layernorm", "rmsnorm"])),
        "positions": draw(st.sampled_from(["learned", "rotary"])),
        "num_kv_heads": draw(
            st.sampled_from([n for n in range(heads + 1) if heads % (n or 1) == 0])
        ),
        "head_dim": 2 * draw(st.integers(0, 100)),
        # Layers of two kinds need a window.
        "window": draw(st.integers(1 if "layer_types" in family else 0, 100)),
        "norm_epsilon": draw(st.floats(1e-12, 1)),
    }
    make = functools.partial(
        ModelConfig,
        num_layers=draw(st.integers(1, 200)),
        d_model=heads * 2 * draw(st.integers(1, 100)),
        num_heads=heads,
        d_ff=draw(st.integers(1, 10**5)),
        vocab_size=draw(st.integers(1, 10**5)),
        max_len=draw(st.integers(1, 10**5)),
        **{**family, **other},
        remat=draw(st.sampled_from(["none", "keep", "full"])),
        compute_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        parametrization=draw(st.sampled_from(["standard", "supar"])),
        seed=draw(st.integers(0, 2**31)),
    )
    linears = draw(st.dictionaries(st.sampled_from(make().projections), specs))
    try:
        return make(linears=linears)
    except UserError:  # More than MOST_BLOCKS.
        return make(linears={})


@given(configs())
def test_from_json_inverts_to_json(config):
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@given(configs(), configs())
def test_configs_hash_by_content(config, other):
    twin = dataclasses.replace(config)
    assert twin == config and hash(twin) == hash(config)
    assert (config == other) == (config.to_json() == other.to_json())


def test_the_order_of_linears_does_not_matter():
    spec, other = LinearSpec("block_sparse", density=0.5), LinearSpec(rank=3)
    mapping = dataclasses.replace(TINY, linears={"qkv": spec, "attn_out": other})
    pairs = dataclasses.replace(TINY, linears=(("attn_out", other), ("qkv", spec)))
    assert mapping == pairs and hash(mapping) == hash(pairs)


def test_projections_not_named_are_dense():
    spec = LinearSpec("block_sparse", density=0.5)
    config = TINY.with_linears(spec, ["mlp_in"]).with_linears(LinearSpec(rank=3), ["qkv"])
    assert config.linear("mlp_in") == spec
    assert config.linear("attn_out") == LinearSpec() and LinearSpec().kind == "dense"
    assert config.linear("qkv").rank == 3
    assert config.sparse_projections == ("mlp_in",)
    assert set(TINY.with_linears(spec).sparse_projections) == set(TINY.projections)


def test_shapes_of_projections():
    shapes = {name: TINY.projection_shape(name) for name in TINY.projections}
    assert shapes == {
        "qkv": (32, 96),
        "attn_out": (32, 32),
        "mlp_in": (32, 64),
        "mlp_out": (64, 32),
    }


def test_shapes_of_projections_with_grouped_queries_wide_heads_and_a_gate():
    model = dataclasses.replace(TINY, **FAMILIES["llama"], num_kv_heads=2, head_dim=12)
    assert {name: model.projection_shape(name) for name in model.projections} == {
        "q": (32, 48),
        "k": (32, 24),
        "v": (32, 24),
        "attn_out": (48, 32),
        "mlp_gate": (32, 64),
        "mlp_in": (32, 64),
        "mlp_out": (64, 32),
    }
    fused = dataclasses.replace(model, fused_qkv=True)
    assert fused.projection_shape("qkv") == (32, 48 + 24 + 24)


def test_a_fields_default_is_gpt3_in_configs_of_earlier_versions():
    earlier = ("num_layers", "d_model", "num_heads", "d_ff", "vocab_size", "max_len", "linears")
    fields = {name: TINY.to_json()[name] for name in earlier}
    assert ModelConfig.from_json(fields) == TINY
    assert (TINY.kv_heads, TINY.head_width, TINY.projections) == (
        4,
        8,
        ("qkv", "attn_out", "mlp_in", "mlp_out"),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 5}, "32 is not divisible by num_heads 5; legal head counts: 1, 2, 4, 8, 16"),
        ({"num_heads": 0}, "num_heads=0"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"vocab_size": -1}, "vocab_size=-1"),
        ({"norm": "batch"}, "norm=batch is unknown. Legal: layernorm, rmsnorm"),
        ({"positions": "alibi"}, "positions=alibi is unknown. Legal: learned, rotary"),
        ({"remat": "some"}, "remat=some is unknown. Legal: none, keep, full"),
        ({"compute_dtype": "int8"}, "compute_dtype=int8 is unknown. Legal: float32, bfloat16"),
        ({"parametrization": "mup"}, "parametrization=mup is unknown. Legal: standard, supar"),
        ({"linears": {"qvk": LinearSpec()}}, "projection 'qvk' is unknown; legal: qkv, attn_out"),
        (
            {"linears": {"mlp_in": LinearSpec("block_sparse", hadamard=64)}},
            "sparsity.hadamard=64 does not divide the 32 input features of mlp_in; .* up to 32",
        ),
        (
            {"linears": {"mlp_in": LinearSpec("masked", "masked", block=8, hadamard=64)}},
            "sparsity.hadamard=64 does not divide the 32 input features of mlp_in; .* up to 32",
        ),
        (
            {"linears": {"mlp_in": LinearSpec("masked", "masked", block=64)}},
            "features are not whole blocks of 64 x 64",
        ),
        (
            {"positions": "rotary", "num_heads": 32},
            "an even number of rotated features, and",
        ),
        (
            {"positions": "rotary", "head_dim": 7},
            "an even number of rotated features, and",
        ),
        ({"num_kv_heads": 3}, "num_kv_heads 3 does not divide num_heads 4; legal: 1, 2, 4"),
        ({"window": -1}, "window=-1 is not legal: it must be from 0"),
        ({"attention_blocks": "windows:2"}, "has 'windows:2'; legal: each of window, global"),
        (
            {"attention_blocks": "window:2", "window": 4},
            "window=4 with model.attention_blocks=window:2, .* legal with it: 0",
        ),
        (
            {"layer_types": "full"},
            "needs a window or attention_blocks; legal without them: sliding",
        ),
        ({"norm_epsilon": 0.0}, "norm_epsilon=0.0 is not legal: it must be above 0"),
        ({"rotary_low": 4.0}, "rotary_low 4 is not below rotary_high 4; legal: above 0, below 4"),
        ({"biases": ("q", "mlp_in")}, "model.biases names q, .* legal: qkv, attn_out, mlp_in"),
        ({"linears": {"mlp_gate": LinearSpec()}}, "projection 'mlp_gate' is unknown; legal: qkv"),
        ({"activation": "swish"}, "activation=swish is unknown. Legal: gelu, gelu_exact, relu"),
    ],
)
def test_an_illegal_config_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(TINY, **change)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "sparse"}, "LinearSpec.kind=sparse is unknown. Legal: block_sparse, "),
        ({"density": 0.0}, r"LinearSpec.density=0.0 is not legal: it must be in \(0, 1\]"),
        ({"density": 1.5}, r"LinearSpec.density=1.5 is not legal: it must be in \(0, 1\]"),
        (
            {"density": float("nan")},
            "LinearSpec.density=nan is not legal: it must be a finite number",
        ),
        ({"block": 0}, "LinearSpec.block=0 is not legal: it must be from 1 to"),
        ({"hadamard": 8}, "hadamard=8 does not go with dense weights; legal: block-sparse"),
        ({"kind": "block_sparse", "hadamard": 24}, "hadamard 24 .*legal: 0 or a power of 2"),
        ({"rank": -1}, "LinearSpec.rank=-1 is not legal: it must be from 0 to"),
    ],
)
def test_an_illegal_linear_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        LinearSpec(**fields)


def test_numbers_of_numpy_become_those_of_python():
    spec = LinearSpec("block_sparse", density=np.float32(0.5), block=np.int64(16), rank=np.int32(2))
    assert spec == LinearSpec("block_sparse", density=0.5, block=16, rank=2)
    assert [type(value) for value in (spec.density, spec.block, spec.rank)] == [float, int, int]
    assert dataclasses.replace(TINY, seed=np.int64(3)).seed == 3
    for seed in (True, 1.0, -1):
        with pytest.raises(UserError, match="not legal: it must be"):
            dataclasses.replace(TINY, seed=seed)


@pytest.mark.parametrize("scale", SIZES)
def test_named_sizes_follow_the_architecture(scale):
    config = SIZES[scale]
    assert config.d_ff == 4 * config.d_model or config.gated_mlp
    assert config.head_width in (64, 96, 128, 160)
    assert config.linears == () and config.sparse_projections == ()
    sparse = config.with_linears(LinearSpec("block_sparse", density=1 / 8))
    assert ModelConfig.from_json(sparse.to_json()) == sparse


@pytest.mark.parametrize("fields", [{"positions": "rotary", "max_len": 2}, {"max_len": 16}])
def test_a_context_of_an_exported_program_is_a_symbol(fields):
    [tokens] = export.symbolic_shape("t", constraints=["t <= 16"])
    dataclasses.replace(TINY, **fields).check_context(tokens)
