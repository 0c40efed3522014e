"""Model configs: JSON, hashing, defaults of projections, illegal values, named sizes."""

import dataclasses
import functools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.config.model import PROJECTIONS, LinearSpec, ModelConfig
from sparse_dataflow.config.presets import SIZES
from sparse_dataflow.files.errors import UserError

TINY = ModelConfig(num_layers=2, d_model=32, num_heads=4, d_ff=64, vocab_size=40, max_len=12)

dense_or_sparse = st.builds(
    LinearSpec,
    kind=st.sampled_from(["dense", "block_sparse"]),
    pattern=st.sampled_from(["pixelfly", "cyclic"]),
    density=st.floats(0, 1, exclude_min=True),
    block=st.integers(1, 256),
    rank=st.integers(0, 64),
)
specs = dense_or_sparse | st.builds(
    LinearSpec, st.just("block_sparse"), hadamard=st.sampled_from([1, 2])
)


@st.composite
def configs(draw):
    heads = draw(st.integers(1, 64))
    make = functools.partial(
        ModelConfig,
        num_layers=draw(st.integers(1, 200)),
        d_model=heads * 2 * draw(st.integers(1, 100)),
        num_heads=heads,
        d_ff=draw(st.integers(1, 10**5)),
        vocab_size=draw(st.integers(1, 10**5)),
        max_len=draw(st.integers(1, 10**5)),
        norm=draw(st.sampled_from(["layernorm", "rmsnorm"])),
        positions=draw(st.sampled_from(["learned", "rotary"])),
        remat=draw(st.sampled_from(["none", "dots", "full"])),
        compute_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        parametrization=draw(st.sampled_from(["standard", "supar"])),
        seed=draw(st.integers(0, 2**31)),
    )
    linears = draw(st.dictionaries(st.sampled_from(PROJECTIONS), specs))
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
    assert set(TINY.with_linears(spec).sparse_projections) == set(PROJECTIONS)


def test_shapes_of_projections():
    shapes = {name: TINY.projection_shape(name) for name in PROJECTIONS}
    assert shapes == {
        "qkv": (32, 96),
        "attn_out": (32, 32),
        "mlp_in": (32, 64),
        "mlp_out": (64, 32),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 5}, "32 is not divisible by num_heads 5; legal head counts: 1, 2, 4, 8, 16"),
        ({"num_heads": 0}, "num_heads=0"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"vocab_size": -1}, "vocab_size=-1"),
        ({"norm": "batch"}, "norm=batch is unknown. Legal: layernorm, rmsnorm"),
        ({"positions": "alibi"}, "positions=alibi is unknown. Legal: learned, rotary"),
        ({"remat": "some"}, "remat=some is unknown. Legal: none, dots, full"),
        ({"compute_dtype": "int8"}, "compute_dtype=int8 is unknown. Legal: float32, bfloat16"),
        ({"parametrization": "mup"}, "parametrization=mup is unknown. Legal: standard, supar"),
        ({"linears": {"qvk": LinearSpec()}}, "projection 'qvk' is unknown; legal: qkv, attn_out"),
        (
            {"linears": {"mlp_in": LinearSpec("block_sparse", hadamard=64)}},
            "sparsity.hadamard=64 does not divide the 32 input features of mlp_in; .* up to 32",
        ),
        ({"positions": "rotary", "num_heads": 32}, "rotary positions need an even head width"),
    ],
)
def test_an_illegal_config_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(TINY, **change)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "sparse"}, "linear kind 'sparse' is unknown; legal: dense, block_sparse"),
        ({"density": 0.0}, r"density 0.0 is not in \(0, 1\]"),
        ({"density": 1.5}, r"density 1.5 is not in \(0, 1\]"),
        ({"density": float("nan")}, r"density nan is not in \(0, 1\]"),
        ({"block": 0}, "block 0 is not legal; legal: whole numbers from 1 to"),
        ({"hadamard": 8}, "hadamard 8 is not legal for a dense weight; legal: a power of 2"),
        ({"kind": "block_sparse", "hadamard": 24}, "hadamard 24 .* legal: a power of 2"),
        ({"rank": -1}, "rank -1 is not legal; legal: whole numbers from 0 to"),
    ],
)
def test_an_illegal_linear_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        LinearSpec(**fields)


@pytest.mark.parametrize("scale", SIZES)
def test_named_sizes_follow_the_architecture(scale):
    config = SIZES[scale]
    assert config.d_ff == 4 * config.d_model
    assert config.d_model // config.num_heads in (64, 96, 128, 160)
    assert config.linears == () and config.sparse_projections == ()
    sparse = config.with_linears(LinearSpec("block_sparse", density=1 / 8))
    assert ModelConfig.from_json(sparse.to_json()) == sparse
