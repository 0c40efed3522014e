"""Activation-aware pruning keeps the blocks of largest |W| times the norm of their inputs."""

import dataclasses

import jax
import numpy as np
import pytest
from marks import some
from models import DENSE, SPARSE, random_model

from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.layouts.evolution import largest_blocks
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange.calibration import input_norms
from sparse_dataflow.interchange.starting_point import StartingPoint, initial_state_from
from sparse_dataflow.runs.families import FAMILIES
from sparse_dataflow.runs.run_config import preset

TRAINING = TrainingConfig(steps=2, batch=2, sequence=8, learning_rate=1e-3)
NO_TOKENIZER = Tokenizer(tuple(chr(300 + n) for n in range(256)), (), 257)
BATCHES = [np.random.default_rng(n).integers(0, 260, (2, 12), np.int32) for n in range(3)]
LLAMA = dataclasses.replace(DENSE, **FAMILIES["llama"], num_kv_heads=2)


def start_of(config):
    params, tables = random_model(config)
    # Some features of every input are much larger, as in trained models.
    loud = np.where(np.arange(config.d_model) % 8 < 2, 8.0, 0.25).astype(np.float32)
    for name in ("norm1", "norm2"):
        params["blocks"][name]["scale"] = params["blocks"][name]["scale"] * np.roll(loud, 4)
    return StartingPoint(config, merged(params, tables), NO_TOKENIZER, {})


@pytest.mark.parametrize(
    "config", some({"gpt": (DENSE,), "llama": (LLAMA,), "sparse": (SPARSE,)}, "llama", "sparse")
)
def test_norms_are_those_of_the_inputs(config):
    start = start_of(config)
    norms = input_norms(config, start.weights, BATCHES, {})
    first = next(stacks.weights(config, start.weights))
    block = gpt.bind_block(config, jax.tree.map(np.asarray, first))
    inputs = [block.norm1(gpt.embed(config, start.params["embed"], tokens)) for tokens in BATCHES]
    expected = np.sqrt(sum(np.square(x).sum((0, 1)) for x in inputs))
    for name in ("qkv",) if config.fused_qkv else ("q", "k", "v"):
        np.testing.assert_allclose(norms[name][0], expected, rtol=1e-5)
    for name in config.projections:
        assert norms[name].shape == (config.num_layers, config.projection_shape(name)[0])


@pytest.mark.parametrize(
    "before", some({"gpt": DENSE, "llama": LLAMA, "sparse": SPARSE}, "llama", "sparse")
)
@pytest.mark.parametrize("mixed", some([0, 4], 4))
def test_the_blocks_of_largest_score_are_stored(before, mixed):
    if before is SPARSE and mixed:
        pytest.skip("a Hadamard transform is not added to a sparse weight")
    names = [name for name in before.projections if name not in ("k", "v")]
    after = before.with_linears(
        LinearSpec("block_sparse", "random", 0.25, 8, hadamard=mixed), names
    )
    start = start_of(before)
    state = initial_state_from(start, after, TRAINING, calibration=BATCHES, prune_by="activations")
    plain = initial_state_from(start, after, TRAINING)
    layouts, by_weight = (stacks.layouts_of(after, s.rest) for s in (state, plain))
    norms = input_norms(before, start.weights, BATCHES, dict.fromkeys(layouts, mixed))
    old = stacks.layouts_of(before, start.params)
    changed = 0
    for name, chosen in layouts.items():
        module = start.params["blocks"][name]
        for layer, layout in enumerate(chosen):
            if name in old:
                kernel = old[name][layer].to_dense(module["values"][layer])
            else:
                kernel = np.asarray(module["kernel"][layer])
            if mixed:
                signs = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
                kernel = np.kron(np.eye(len(kernel) // 4), signs / 2) @ kernel
            scaled = kernel * norms[name][layer][:, None]
            ins, outs = layout.mask.shape
            scores = np.sqrt(np.square(scaled.reshape(ins, 8, outs, 8)).sum((1, 3)))
            degree = round(0.25 * np.gcd(ins, outs))
            stored = old[name][layer].mask if name in old else None
            best = largest_blocks(scores, 8, degree, stored)
            np.testing.assert_allclose(scores[layout.mask].sum(), scores[best.mask].sum(), 1e-4)
            changed += (layout.mask != by_weight[name][layer].mask).any()
    assert changed


def test_a_weight_that_reads_loud_inputs_is_pruned_with_less_error():
    """The attribute that the score stands for: the outputs change less than by magnitude."""
    start = start_of(LLAMA)
    after = LLAMA.with_linears(LinearSpec("block_sparse", "random", 0.5, 4), ("mlp_in",))
    exact = whole.logits(LLAMA, weights_of(start.params, {}), BATCHES[0])
    errors = []
    for prune_by in ("activations", "weights"):
        state = initial_state_from(start, after, TRAINING, calibration=BATCHES, prune_by=prune_by)
        tables = jax.tree.map(np.asarray, state.rest)
        errors.append(
            np.linalg.norm(
                whole.logits(after, weights_of(state.params, tables), BATCHES[0]) - exact
            )
        )
    assert errors[0] < errors[1]


def test_a_shape_that_no_layout_divides_is_named_with_the_legal_values():
    """Two blocks of keys have only densities 1/2 and 1."""
    after = LLAMA.with_linears(LinearSpec("block_sparse", "random", 0.25, 8))
    with pytest.raises(UserError, match=r"^k: Density 0.25 has no .* legal: multiples of 1/2.*den"):
        initial_state_from(start_of(LLAMA), after, TRAINING)
    after = LLAMA.with_linears(LinearSpec("block_sparse", "random", 0.5, 5))
    with pytest.raises(UserError, match=r"^q: Block 5 does not divide a 32 x 32 .* legal blocks"):
        initial_state_from(start_of(LLAMA), after, TRAINING)


def test_activations_without_weights_are_refused():
    with pytest.raises(UserError, match=r"run.prune_by=activations .* legal with run.init_from"):
        preset("pico").change(run__prune_by="activations")
