"""The loss of a student against its definition, in value and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import some

from sparse_dataflow.core.config.remat import CPU_TOKENS
from sparse_dataflow.core.ops.cross_entropy.cross_entropy_op import TeacherOutput, distillation_loss

TOKENS, WIDTH, VOCABULARY = CPU_TOKENS + 5, 6, 11


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    x, embedding = rng.normal(size=(TOKENS, WIDTH)), rng.normal(size=(VOCABULARY, WIDTH))
    teacher = rng.normal(size=(TOKENS, 4)), 2 * rng.normal(size=(VOCABULARY, 4))
    return x, embedding, rng.integers(0, VOCABULARY, TOKENS), rng.uniform(size=TOKENS), teacher


def log_softmax(logits):
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


@pytest.mark.parametrize("weight", some([0.0, 0.3, 1.0], 0.3))
def test_the_loss_and_its_gradients_equal_numpy_in_float64(weight):
    x, embedding, targets, weights, (teacher_x, teacher_embedding) = arrays()
    student = log_softmax(x @ embedding.T)
    teacher = log_softmax(teacher_x @ teacher_embedding.T)
    divergence = (np.exp(teacher) * (teacher - student)).sum(1)
    losses = -student[np.arange(TOKENS), targets]
    expected = (weights * ((1 - weight) * losses + weight * divergence)).sum()
    wanted = (1 - weight) * np.eye(VOCABULARY)[targets] + weight * np.exp(teacher)
    dlogits = weights[:, None] * (np.exp(student) - wanted)
    with jax.enable_x64(True):
        output = TeacherOutput(
            jnp.asarray(teacher_x), jnp.asarray(teacher_embedding), jnp.float64(weight)
        )
        value, gradients = jax.value_and_grad(distillation_loss, (0, 1))(
            jnp.asarray(x), jnp.asarray(embedding), targets, jnp.asarray(weights), output
        )
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    np.testing.assert_allclose(gradients[0], dlogits @ embedding, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(gradients[1], dlogits.T @ x, rtol=1e-9, atol=1e-12)
