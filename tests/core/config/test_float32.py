"""Legal numbers are legal in the dtype that computes with them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.settings import settings
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.optim import factories
from sparse_dataflow.core.optim.optimizers import _moments
from sparse_dataflow.files.errors import UserError

FLOATS = [s for c in (TrainingConfig, ModelConfig) for s in settings(c) if s.type is float]


@pytest.mark.parametrize("setting", FLOATS, ids=lambda s: s.name)
@given(data=st.data())
def test_a_legal_number_is_legal_in_float32(setting, data):
    near = [10.0**power for power in range(-320, 39)]
    near += [
        bound * (1 + sign * 10.0**-p) for bound in (1, 1000) for sign in (1, -1) for p in range(17)
    ]
    value = data.draw(st.sampled_from(near) | st.floats(0, 1e39))
    if not setting.value_refusal(value) and setting.legal:
        assert setting.legal[1](float(in_programs(value)))


def in_programs(value):
    """Returns a number as compiled programs have it: subnormal numbers are 0."""
    narrow = np.float32(value)
    return narrow if abs(narrow) >= np.finfo(np.float32).tiny else np.float32(0)


@pytest.mark.parametrize("value", [1e-46, 1e-45, 1e-39, 1.17e-38, 1.18e-38, 0.3, 3.4e38])
def test_programs_have_no_subnormal_numbers(value):
    assert jnp.float32(value) * jnp.float32(1) == in_programs(value)


@given(
    b1=st.one_of(st.floats(0, 1 - 2**-18), st.sampled_from([0.99999, 0.999996])),
    b2=st.one_of(st.floats(0, 1 - 2**-18), st.sampled_from([0.9999, 0.999996])),
    epsilon=st.sampled_from([2.0**-63, 1e-15, 1e-8, 1e-3, 1.0]),
    gradient=st.floats(1e-12, 1e3),
)
def test_the_first_step_of_adamw_is_right_for_all_legal_numbers(b1, b2, epsilon, gradient):
    training = TrainingConfig(steps=4, b1=b1, b2=b2, epsilon=epsilon)
    transformation = _moments(None, training, None)
    params = {"x": jnp.zeros(3)}
    g = np.asarray([gradient, -gradient / 3, 0], np.float32)
    updates, _ = transformation.update({"x": jnp.asarray(g)}, transformation.init(params), params)
    by_hand = np.where(g == 0, 0, g / (np.abs(g.astype(np.float64)) + epsilon))
    np.testing.assert_allclose(updates["x"], by_hand, rtol=0.015)


@pytest.mark.parametrize(
    "changes",
    [
        {"b1": 1 - 1e-7}, {"b2": 0.9999999}, {"b2": 1 - 2**-19}, {"epsilon": 1e-30},
        {"epsilon": 1e-39}, {"learning_rate": 1e-44}, {"clip": 1e-40}, {"sparse_rate": 1e-300},
        {"vector_rate": 1e-45}, {"teacher_weight": 1e-50}, {"adapter_alpha": 1e-39},
        {"optimizer": "schedule_free", "b1": 1e-9}, {"optimizer": "schedule_free", "b1": 5e-4},
    ],
)  # fmt: skip
def test_a_number_that_float32_does_not_have_is_refused(changes):
    with pytest.raises(UserError, match="legal"):
        TrainingConfig(steps=4, **changes)


@pytest.mark.parametrize("b1", [0.001, 0.3, 0.999])
@pytest.mark.parametrize("b2", [0.0, 0.9, 0.9999])
def test_schedule_free_steps_and_averages_are_right(b1, b2):
    training = TrainingConfig(steps=4, optimizer="schedule_free", b1=b1, b2=b2)
    transformation = factories.transformation(training, 1e-2, 0.0)
    y = jnp.asarray([0.5, -0.25], jnp.float32)
    state = transformation.init(y)
    x = z = np.asarray([0.5, -0.25])
    v = np.zeros(2)
    for number, g in enumerate(([0.1, -0.2], [0.3, 0.1], [-0.2, 0.4]), 1):
        updates, state = transformation.update(jnp.asarray(g, jnp.float32), state, y)
        y = y + updates
        v = b2 * v + (1 - b2) * np.square(g)
        z = z - 1e-2 * np.asarray(g) / (np.sqrt(v / (1 - b2**number)) + training.epsilon)
        x = x + (z - x) / number
        np.testing.assert_allclose(y, b1 * x + (1 - b1) * z, rtol=1e-3)
        np.testing.assert_allclose(factories.averaged(training, state, y), x, rtol=1e-3)


def test_the_usual_numbers_stay_legal():
    for changes in ({"b2": 0.999}, {"b2": 0.9999}, {"epsilon": 1e-15}, {"b1": 0.0}, {"b2": 0.0}):
        assert dataclasses.replace(TrainingConfig(steps=1), **changes)
