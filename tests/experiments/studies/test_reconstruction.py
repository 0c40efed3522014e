"""Cuts whose remaining weights make up for the weights that go, against numpy's least squares."""

import jax
import numpy as np
import pytest

from experiments.studies.serving_cost import arms, reconstruction
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.model import gpt

MODEL = ModelConfig(
    2, 16, 4, 32, vocab_size=40, max_len=8, norm="rmsnorm", activation="relu", biases=()
)


@pytest.fixture(autouse=True)
def undamped(monkeypatch):
    monkeypatch.setattr(reconstruction, "DAMPING", 1e-9)


def correlated(rng, tokens, features):
    return (rng.normal(size=(tokens, features)) @ rng.normal(size=(features,) * 2)).astype("f4")


def errors_without(inputs, outputs, block):
    """Squared error of numpy's least squares without each block of inputs."""
    errors = []
    for row in range(inputs.shape[1] // block):
        rest = np.delete(inputs, np.s_[row * block : (row + 1) * block], 1)
        weights = np.linalg.lstsq(rest, outputs, rcond=None)[0]
        errors.append(np.square(rest @ weights - outputs).sum())
    return errors


@pytest.mark.parametrize("seed", range(5))
def test_the_first_block_that_goes_costs_least(seed):
    rng = np.random.default_rng(seed)
    inputs, outputs = correlated(rng, 200, 20), rng.normal(size=(200, 4)).astype("f4")
    _, mask = reconstruction.least_squares(inputs, outputs, (4, 4), 4 / 5)
    absent = np.flatnonzero(mask.sum(1) == 0) // 4
    assert set(absent) == {np.argmin(errors_without(inputs, outputs, 4))}


def test_the_weights_that_stay_are_of_least_squares():
    rng = np.random.default_rng(0)
    inputs, outputs = correlated(rng, 300, 24), rng.normal(size=(300, 12)).astype("f4")
    weights, mask = reconstruction.least_squares(inputs, outputs, (4, 4), 0.5)
    assert mask.sum() == 0.5 * mask.size and not weights[mask == 0].any()
    for column in range(12):
        stays = mask[:, column] == 1
        expected = np.linalg.lstsq(inputs[:, stays], outputs[:, column], rcond=None)[0]
        np.testing.assert_allclose(weights[stays, column], expected, rtol=1e-3, atol=1e-4)


def test_blocks_whose_inputs_are_copies_go_without_an_error():
    rng = np.random.default_rng(0)
    half = correlated(rng, 300, 12)
    inputs, weights = np.concatenate([half, half], 1), rng.normal(size=(24, 8)).astype("f4")
    cut, mask = reconstruction.least_squares(inputs, inputs @ weights, (4, 4), 0.5)
    assert mask.mean() == 0.5
    np.testing.assert_allclose(inputs @ cut, inputs @ weights, rtol=1e-2, atol=2e-2)


def test_what_is_cut_stays_cut():
    rng = np.random.default_rng(0)
    inputs, outputs = correlated(rng, 300, 24), rng.normal(size=(300, 12)).astype("f4")
    weights, first = reconstruction.least_squares(inputs, outputs, (4, 4), 0.6)
    _, second = reconstruction.least_squares(inputs, inputs @ weights, (4, 4), 0.3, first)
    assert second.sum() < first.sum() and not second[first == 0].any()


def test_a_cut_model_is_nearer_to_the_dense_one_than_one_cut_by_activations():
    params = gpt.init(MODEL, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 40, (64, 8)).astype("i4")
    masks = jax.tree.map(np.ones_like, jax.tree.map(lambda leaf: np.float32(0), params))
    arm = arms.Arm(pruned=arms.ALL, keep="reconstruction")
    cut, stored = reconstruction.cut(MODEL, arm, params, masks, 0.5, tokens)
    masked = jax.tree.map(np.multiply, cut, stored)
    jax.tree.map(np.testing.assert_array_equal, cut, masked)
    assert {float(np.mean(stored["blocks"][name]["kernel"])) for name in arms.ALL} == {0.5}
    outputs = reconstruction.given(MODEL, params, tokens)["mlp_out"][-1]

    def error(params):
        return float(
            np.square(reconstruction.given(MODEL, params, tokens)["mlp_out"][-1] - outputs).mean()
        )

    plain = jax.tree.map(np.multiply, params, stored)
    assert error(cut) < 0.7 * error(plain)
