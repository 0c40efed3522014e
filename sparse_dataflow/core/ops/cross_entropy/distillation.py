"""Cross-entropy mixed with the divergence from a teacher, one chunk of tokens at a time.

As in `api`, the forward pass computes the gradients, and no pass stores the full logits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparse_dataflow.core.ops import derivatives
from sparse_dataflow.core.ops.cross_entropy.cross_entropy_op import (
    logits_of,
    loss_and_gradients,
    scaled,
)


class TeacherOutput(NamedTuple):
    """What a student learns from its teacher; constant in the differentiation.

    Attributes:
      x: float [..., teacher's d_model], its normalised hidden states of the student's tokens.
      embedding: float [vocab, teacher's d_model], its output layer.
      weight: float32 [], of the divergence, in [0, 1].
    """

    x: jax.Array
    embedding: jax.Array
    weight: jax.Array


def distillation_loss(
    x: jax.Array,
    embedding: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    teacher: TeacherOutput,
) -> jax.Array:
    """Return the sum over tokens of weights * ((1 - w) * loss + w * divergence), w of the teacher.

    `loss` is `cross_entropy_op.token_scores`; the divergence is KL(teacher || student) of the next
    token's distribution, in nats, at temperature 1 (arXiv 1503.02531).  Differentiable in x and
    embedding.

    Args:
      x: float [tokens, d_model], normalised hidden states.
      embedding: float [vocab, d_model], the output layer.
      targets: int32 [tokens].
      weights: float32 [tokens].
      teacher: of the same tokens and vocabulary; x is [tokens, teacher's d_model].

    Returns:
      A float32 scalar.
    """
    return _distillation_loss(None, x, embedding, targets, weights, teacher)


def _value(_, *operands):
    return _forward(_, *operands)[0]


def _forward(_, x, embedding, targets, weights, teacher):
    def chunk(x, targets, weights, teacher_x):
        log_student = jax.nn.log_softmax(logits_of(x, embedding))
        log_teacher = jax.nn.log_softmax(logits_of(teacher_x, teacher.embedding))
        soft = teacher.weight * jnp.exp(log_teacher)
        hard = jax.nn.one_hot(targets, len(embedding), dtype=soft.dtype)
        probabilities = (1 - teacher.weight) * hard + soft
        losses = jnp.sum(soft * log_teacher - probabilities * log_student, axis=1)
        # The probabilities of a token add up to 1.
        dlogits = (jnp.exp(log_student) - probabilities) * weights[:, None]
        return jnp.sum(losses * weights), dlogits

    return loss_and_gradients(chunk, embedding, x, targets, weights, teacher.x)


def _backward(_, gradients, cotangent):
    return *scaled(gradients, cotangent), None, None, None


_distillation_loss = derivatives.differentiable(_value, _backward, forward=_forward)
