"""Models for the tests of import and export, and a helper that changes saved weights."""

import dataclasses

import jax
import numpy as np
import small_models
from make_fixture import BYTES
from safetensors.numpy import load_file, save_file
from small_models import NEWER, arbitrary_params, tables_of

from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.interchange import huggingface
from sparse_dataflow.interchange.starting_point import StartingPoint, initial_state_from
from sparse_dataflow.runs.families import FAMILIES

DENSE, SPARSE, LOW_RANK = (
    dataclasses.replace(config, vocab_size=BYTES.vocab_size)
    for config in (small_models.DENSE, small_models.SPARSE, small_models.LOW_RANK)
)
SUPAR = dataclasses.replace(SPARSE, parametrization="supar")
DEPTH = dataclasses.replace(LOW_RANK, density_by_depth=(2.0, 1.0))
READABLE = {
    "dense": DENSE,
    "sparse": SPARSE,
    "rank": LOW_RANK.with_linears(dataclasses.replace(LOW_RANK.linear("mlp_in"), hadamard=0)),
    "hadamard": SPARSE.with_linears(dataclasses.replace(SPARSE.linear("qkv"), hadamard=16)),
    "density by depth": DEPTH,
    "supar": SUPAR,
    "rotary": dataclasses.replace(SPARSE, positions="rotary"),
    "yarn": dataclasses.replace(
        DENSE,
        positions="rotary",
        rotary_scaling="yarn",
        rotary_factor=3.0,
        rotary_length=64,
        rotary_high=32.0,
        rotary_share=0.75,
    ),
    "linear": dataclasses.replace(
        DENSE, positions="rotary", rotary_scaling="linear", rotary_factor=3.0
    ),
    "dynamic": dataclasses.replace(
        DENSE, positions="rotary", rotary_scaling="dynamic", rotary_factor=3.0
    ),
    "longrope": dataclasses.replace(
        DENSE,
        positions="rotary",
        rotary_scaling="longrope",
        rotary_factor=3.0,
        rotary_length=32,
        rotary_factors=(1.0, 1.0, 2.0, 4.0),
    ),
    "rmsnorm": dataclasses.replace(SPARSE, norm="rmsnorm"),
    "relu": dataclasses.replace(SPARSE, activation="relu"),
    "llama": dataclasses.replace(
        DENSE, **FAMILIES["llama"], num_kv_heads=2, rotary_factor=8.0, rotary_length=16, window=5
    ),
    "qwen2": dataclasses.replace(DENSE, **FAMILIES["qwen2"], norm_epsilon=1e-2),
    "qwen3": dataclasses.replace(
        DENSE, **FAMILIES["qwen3"], head_dim=16, num_kv_heads=1, rotary_base=50.0
    ).with_linears(LinearSpec("block_sparse", "random", 0.5, 8, rank=2)),
    "gemma2": dataclasses.replace(
        DENSE,
        **FAMILIES["llama"],
        window=5,
        layer_types="sliding+full",
        attention_cap=0.7,
        attention_scalar=11,
        post_norms=True,
        scaled_embeddings=True,
        logit_cap=2.0,
    ),
    "gemma3": dataclasses.replace(
        SPARSE,
        positions="rotary",
        norm="rmsnorm",
        window=3,
        layer_types="full+sliding",
        rotary_local_base=20.0,
        rotary_scaling="linear",
        rotary_factor=4.0,
        qk_norm=True,
        post_norms=True,
    ),
    **{
        name: dataclasses.replace(DENSE, **fields | {"vocab_size": DENSE.vocab_size})
        for name, fields in NEWER.items()
    },
    "norms of all heads": dataclasses.replace(
        SPARSE,
        num_kv_heads=2,
        qk_norm=True,
        qk_norm_scope="all_heads",
        residual="parallel",
        pre_norms=False,
        post_norms=True,
        parametrization="supar",
    ),
    "grouped qkv": dataclasses.replace(SPARSE, num_kv_heads=2, activation="gelu_exact", window=3),
    "all": dataclasses.replace(
        DEPTH, positions="rotary", norm="rmsnorm", activation="relu", parametrization="supar"
    ),
}
"""Models that the readers of the sparse form cover."""
TRAINING = TrainingConfig(steps=2, batch=2, sequence=8, learning_rate=1e-3)


def random_model(config, seed=0):
    """Returns (random nonzero parameters, layout tables)."""
    return arbitrary_params(config, seed, 0.3), tables_of(config)


def logits(config, params, tables, ids):
    run = jax.jit(lambda params, ids: whole.logits(config, weights_of(config, params, tables), ids))
    return np.asarray(run(params, ids))


def begun(old, new, seed=0):
    """Returns (parameters and tables of a random model, state of the new model at step 0)."""
    start = StartingPoint(old, merged(*random_model(old, seed)), BYTES, {})
    return start, initial_state_from(start, new, TRAINING)


def begun_with_equal_logits(old, new, ids):
    """Checks that a new model begins with the logits of the old one; returns its state."""
    start, state = begun(old, new)
    expected = logits(old, start.params, (), ids)
    actual = logits(new, state.params, state.rest, ids)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    assert int(state.step) == 0
    return state


def export(folder, form, config, seed=0):
    """Exports a random model and returns its (parameters, layout tables)."""
    params, tables = random_model(config, seed)
    huggingface.write(
        folder,
        form,
        config,
        merged(params, tables),
        BYTES,
        context=config.max_len,
        card="# A model\n",
    )
    return params, tables


def change_tensors(folder, change):
    """Applies `change` to the dict of the folder's tensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
