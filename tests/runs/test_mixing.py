"""Models that their layouts cut into parts."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_dataflow.commands.job import build
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.layouts.model_layouts import layouts
from sparse_dataflow.core.layouts.patterns import PATTERNS
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.mixing import isolated_components
from sparse_dataflow.runs.run_config import preset
from sparse_dataflow.runs.variants import variants

SHAPE = ModelConfig(3, 64, 4, 128, vocab_size=40, max_len=8)


def model_of(pattern, density=1 / 8, block=8, base=SHAPE, projections=None, **more):
    spec = LinearSpec("block_sparse", pattern, density, block, **more)
    return base.with_linears(spec, projections or base.projections)


def features(model, stored, name, layer):
    """Returns int [inputs, outputs], 1 where a projection links two features."""
    if name not in stored:
        return np.ones(model.projection_shape(name), int)
    block = np.ones((model.linear(name).block,) * 2, int)
    return np.kron(stored[name][layer].mask.astype(int), block)


def reached(model):
    """Returns bool [d_model, d_model]: features that one leads to through the layers or back, by
    matrices of single features."""
    stored = layouts(model)
    meets = np.eye(model.d_model, dtype=int)
    group, width = model.num_heads // model.kv_heads, model.head_width
    queries = np.kron(np.eye(model.kv_heads, dtype=int), np.ones((group * width, 1), int))
    into = np.kron(np.eye(model.kv_heads, dtype=int), np.ones(((group + 2) * width, 1), int))
    for layer in range(model.num_layers):
        for pair in (("qkv", "attn_out"), ("mlp_in", "mlp_out")):
            reads, writes = (features(model, stored, name, layer) for name in pair)
            if pair[0] == "qkv":
                reads, writes = reads @ into, queries.T @ writes
            linked = reads + writes.T
            meets = meets + linked @ linked.T
    for _ in range(math.ceil(math.log2(model.d_model))):
        meets = (meets @ meets > 0).astype(int)
    return meets > 0


@settings(max_examples=40)
@given(
    pattern=st.sampled_from(sorted(set(PATTERNS) - {"runtime"})),
    degree=st.sampled_from([1, 2]),
    block=st.sampled_from([4, 8, 16]),
    heads=st.sampled_from([(8, 8), (4, 2), (2, 2)]),
    d_ff=st.sampled_from([128, 192]),
    seed=st.integers(0, 20),
    dense=st.sampled_from([(), (), ("mlp_out",), ("qkv",)]),
)
def test_parts_are_those_that_single_features_show(
    pattern, degree, block, heads, d_ff, seed, dense
):
    base = dataclasses.replace(
        SHAPE, num_layers=2, num_heads=heads[0], num_kv_heads=heads[1], d_ff=d_ff, seed=seed
    )
    names = tuple(name for name in base.projections if name not in dense)
    try:
        model = model_of(pattern, degree * block / 64, block, base, names)
        count = isolated_components(model)
    except UserError:
        return  # The pattern has no such layout.
    assert count == len(np.unique(reached(model), axis=0))


@pytest.mark.parametrize("pattern", ["pixelfly", "butterfly", "cyclic", "banded"])
@pytest.mark.parametrize("heads, count", [(8, 8), (2, 2), (4, 4)])
def test_one_block_for_each_output_cuts_a_square_model(pattern, heads, count):
    base = ModelConfig(12, 512, heads, 1536, vocab_size=40, max_len=8)
    assert isolated_components(model_of(pattern, block=64, base=base)) == count
    for mixing in ("monarch", "shuffle", "random"):
        assert isolated_components(model_of(mixing, block=64, base=base)) == 1


@pytest.mark.parametrize(
    "changes", [{"rank": 2}, {"hadamard": 64}, {"projections": ("mlp_in", "mlp_out")}]
)
def test_what_mixes_all_features_joins_the_parts(changes):
    assert isolated_components(model_of("cyclic")) > 1
    assert isolated_components(model_of("cyclic", **changes)) == 1
    assert isolated_components(SHAPE) == 1


@pytest.mark.parametrize(
    "changes, warned",
    [
        ({"sparsity__pattern": "cyclic"}, True),
        ({"sparsity__pattern": "banded"}, True),
        ({"sparsity__pattern": "cyclic", "sparsity__rank": 4}, False),
        ({"sparsity__pattern": "cyclic", "evolution__method": "set"}, False),
        ({"sparsity__pattern": "monarch"}, False),
    ],
)
def test_a_run_says_that_its_model_has_parts(changes, warned):
    config = preset("pico").change(
        sparsity__block=16, training__steps=1000, run__twin=True, **changes
    )
    sentences = list(build._isolated_features(variants(config)))
    assert [s.startswith("sparse: ") for s in sentences] == [True] * warned
    assert all("parts that meet in no layer" in s for s in sentences)
