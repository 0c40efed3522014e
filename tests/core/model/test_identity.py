"""A layer that begins as the identity adds nothing, and all of its weights learn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import some
from small_models import DENSE, EACH_KIND, LOW_RANK, MONARCH, arbitrary_params, tables_of

from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.model import gpt
from sparse_dataflow.core.model.identity import as_identity
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.core.model.projection import layer_weights
from sparse_dataflow.runs.families import FAMILIES

FACTORS = LinearSpec("low_rank", "low_rank", 0.5)
MODELS = {
    **{name: dataclasses.replace(DENSE, **fields) for name, fields in FAMILIES.items()},
    "layer norms after": dataclasses.replace(DENSE, post_norms=True),
    "blocks and low-rank terms": LOW_RANK,
    "each kind": EACH_KIND,
    "factors": DENSE.with_linears(FACTORS),
    "gated factors": dataclasses.replace(DENSE, gated_mlp=True).with_linears(FACTORS),
    "experts": dataclasses.replace(DENSE, experts=4, top_k=2, shared_expert=1, shared_gate=True),
    "gated experts of blocks": dataclasses.replace(
        DENSE, experts=4, top_k=2, gated_mlp=True
    ).with_linears(MONARCH),
}


@pytest.mark.parametrize(
    "name",
    some([*MODELS], "each kind", "gated experts of blocks"),
)
def test_a_layer_begins_as_the_identity_and_all_of_it_learns(name):
    config = dataclasses.replace(MODELS[name], num_layers=1)
    first = lambda tree: jax.tree.map(lambda leaf: leaf[0], tree)  # noqa: E731
    start = jax.tree.map(
        jnp.asarray, as_identity(config, first(arbitrary_params(config)["blocks"]))
    )
    layouts = first(tables_of(config)["blocks"] if tables_of(config) else {})
    x, dy = jax.random.normal(jax.random.key(0), (2, 2, 12, config.d_model))

    @jax.jit
    def outputs(params):
        return gpt.block(config, layer_weights(config, merged(params, layouts)), x)[0]

    np.testing.assert_array_equal(outputs(start), x)
    gradient = jax.jit(jax.grad(lambda params: jnp.sum(dy * outputs(params))))
    params = start
    for _ in range(2):
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient(params))
    pairs = zip(jax.tree_util.tree_leaves_with_path(start), jax.tree.leaves(params), strict=True)
    assert [jax.tree_util.keystr(path) for (path, a), b in pairs if np.array_equal(a, b)] == []
