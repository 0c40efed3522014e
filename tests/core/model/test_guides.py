"""Self-guided training: the guided layer, its start, its share, what is left of it, refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from flax import nnx

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.run import preset
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import mesh as meshes
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.executors.pipeline.pipelined import Pipelined
from sparse_dataflow.core.executors.pipeline.stages import divide
from sparse_dataflow.core.executors.relay.relay_executor import RelayExecutor
from sparse_dataflow.core.layouts.evolution import guide_share, phase_specs
from sparse_dataflow.core.model import adapters
from sparse_dataflow.core.model.projection import arrays, draw, linear, projection_layout
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.core.optim.optimizers import learning_rate_multipliers, map_moments
from sparse_dataflow.core.training import cost
from sparse_dataflow.core.training.phases import mean_flops_per_token, variants
from sparse_dataflow.core.training.step import initial_state, make_eval_step
from sparse_dataflow.core.training.transitions import change_model
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.planner import memory

SPARSE = LinearSpec("block_sparse", "monarch", density=0.25, block=4, rank=2, hadamard=8)
PLAIN = ModelConfig(2, 32, 2, 64, vocab_size=40, max_len=8).with_linears(SPARSE)
GUIDED = dataclasses.replace(PLAIN, guided=True)
TRAINING = TrainingConfig(steps=10, batch=4, sequence=8)
TOKENS = np.random.default_rng(1).integers(0, 40, (4, 9), np.int32)
WEIGHTS = np.full((4, 8), 1 / 32, np.float32)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_guided_layer_and_its_gradient_equal_the_mixed_weight_in_float64(share):
    config = dataclasses.replace(GUIDED, linears={"mlp_in": dataclasses.replace(SPARSE, rank=0)})
    layout = projection_layout(config, "mlp_in", layer=0)
    drawn = jax.eval_shape(lambda: draw(config, "mlp_in", gain=1.0, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=shape.shape) for name, shape in arrays(drawn).items()}
    params[adapters.SHARE] = np.float64(share)
    x, dy = rng.normal(size=(2, 5, 32)), rng.normal(size=(2, 5, 64))
    with jax.enable_x64(True):
        apply = lambda params, x: linear(config, "mlp_in", params, layout)(x)  # noqa: E731
        y, backward = jax.vjp(apply, params, x)
        gradients, dx = backward(jnp.asarray(dy))
    stored = np.zeros((32, 64))
    for row, col, values in zip(layout.rows, layout.cols, params["values"], strict=True):
        stored[4 * row : 4 * row + 4, 4 * col : 4 * col + 4] = values
    mix = np.kron(np.eye(4), scipy.linalg.hadamard(8) / 8**0.5)
    mixed = x @ mix
    weight = (1 - share) * stored + share * params["guide"]
    np.testing.assert_allclose(y, mixed @ weight + params["bias"], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(
        gradients["guide"], share * np.einsum("bti,bto->io", mixed, dy), rtol=1e-9, atol=1e-9
    )
    np.testing.assert_allclose(dx, dy @ weight.T @ mix.T, rtol=1e-9, atol=1e-9)


def test_a_guided_model_starts_as_the_plain_one_at_every_share_and_is_left_as_it():
    plain, state = initial_state(PLAIN, TRAINING), initial_state(GUIDED, TRAINING)
    jax.tree.map(
        np.testing.assert_array_equal,
        adapters.without_leaves(state.params, adapters.GUIDE),
        plain.params,
    )
    tables = plain.tables

    @jax.jit
    def loss(params, share):
        params = adapters.merged(params, adapters.guide_shares(params, share))
        return whole.loss(GUIDED, weights_of(params, tables), whole.Batch(TOKENS, WEIGHTS))

    expected = float(
        whole.loss(PLAIN, weights_of(plain.params, tables), whole.Batch(TOKENS, WEIGHTS))
    )
    for share in (0.0, 0.4, 1.0):
        assert float(loss(state.params, share)) == pytest.approx(expected, rel=1e-5)
    # Whatever the guides have learned, evaluation and the state after the drop have none of it.
    noise = lambda tree: jax.tree.map(lambda a: a + jnp.arange(a.size).reshape(a.shape) / 1e3, tree)  # noqa: E731
    state = state._replace(params=noise(state.params), moments=map_moments(noise, state.moments))
    assert float(loss(state.params, 1.0)) != pytest.approx(expected, rel=1e-3)
    left = change_model(state, GUIDED, PLAIN)
    arrays = lambda state: jax.tree.map(lambda a: (a.shape, a.dtype), state)  # noqa: E731
    assert arrays(left) == arrays(plain)
    evaluate = make_eval_step(GUIDED)(weights_of(state.params, tables), TOKENS, WEIGHTS)
    assert float(evaluate) == float(
        whole.loss(PLAIN, weights_of(left.params, tables), whole.Batch(TOKENS, WEIGHTS))
    )


def test_the_share_of_the_guides_falls_along_a_cosine_from_1_to_0():
    shares = [guide_share(step, 200) for step in range(200)]
    assert shares[0] == 1 and shares[100] == pytest.approx(0.5)
    assert shares[50] == pytest.approx((1 + 0.5**0.5) / 2)
    assert sorted(shares, reverse=True) == shares and 0 < shares[-1] < 1e-4


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_guides_count_as_dense_weights(optimizer):
    """In parameters, FLOPs, learning rates and Muon's products."""
    dense = dataclasses.replace(PLAIN, linears={})
    counts, flops, steps = (
        [function(model) for model in (PLAIN, GUIDED, dense)]
        for function in (
            memory.matrix_count,
            lambda model: cost.flops_per_token(model, 8).projections,
            cost.orthogonalization_flops,
        )
    )
    assert counts[1] == counts[0] + counts[2] and steps[1] == pytest.approx(steps[0] + steps[2])
    assert flops[1] == pytest.approx(flops[0] + flops[2])
    training = dataclasses.replace(TRAINING, optimizer=optimizer, sparse_rate=4.0)
    state = initial_state(GUIDED, training)
    assert memory.parameter_count(GUIDED) == sum(a.size for a in jax.tree.leaves(state.params))
    for model in (GUIDED, dataclasses.replace(GUIDED, parametrization="supar")):
        rates = learning_rate_multipliers(model, training, state.params)["blocks"]["mlp_out"]
        of_dense = dataclasses.replace(model, guided=False, linears={})
        shapes = jax.eval_shape(lambda of_dense=of_dense: initial_state(of_dense, training)).params
        expected = learning_rate_multipliers(of_dense, training, shapes)["blocks"]["mlp_out"]
        assert rates[adapters.GUIDE] == pytest.approx(expected["kernel"])


def test_flops_of_a_run_count_the_guides_while_they_last():
    evolution = EvolutionConfig("self_guided", at=0.25)
    plain, guided = (cost.flops_per_token(model, 8).total for model in (PLAIN, GUIDED))
    expected = 0.25 * guided + 0.75 * plain
    assert mean_flops_per_token(PLAIN, evolution, 8) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"run__init_from": "folder"},
            "with evolution.method=self_guided, which copies",
        ),
        ({"evolution__plateau": 2}, "before their share is 0; legal with it: 0"),
        ({"sparsity__pattern": "low_rank"}, "self_guided with sparsity.pattern=low_rank"),
        ({"model__experts": 4}, "self_guided with model.experts=4 is not supported"),
        ({"sparsity__density": 1.0}, "self_guided cannot .* Legal: a density below 1"),
    ],
)
def test_what_has_no_guides_is_refused(changes, words):
    with pytest.raises(UserError, match=words):
        variants(
            preset("pico").change(
                evolution__method="self_guided", sparsity__block=16, training__steps=9, **changes
            )
        )


def test_executors_whose_steps_take_no_share_refuse_guides():
    model = phase_specs(PLAIN, EvolutionConfig("self_guided"))[0].model
    assert model == GUIDED
    mesh = meshes.make(meshes.parse("stage:1", 1), jax.devices()[:1])
    staged = Pipelined(mesh, division=divide(2, 1, 1))
    for executor in (staged, RelayExecutor()):
        with pytest.raises(UserError, match=r"self_guided .*; legal: a mesh without stages"):
            executor.check(model, TRAINING)
        executor.check(PLAIN, TRAINING)
