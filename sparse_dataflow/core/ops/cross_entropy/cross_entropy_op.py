"""Cross-entropy of a tied output layer, one chunk of tokens at a time, without the full logits.

The gradient is linear in the loss's cotangent.  So the forward pass computes dx and dE from each
chunk's logits, and the backward pass only scales them (arXiv 2411.09009; Liger's fused linear
cross-entropy, arXiv 2410.10989).

A vocabulary may be sharded over axes of `shard_map`: every device has equally many consecutive
rows; with `axis` None, one device has all.  Rows past the vocabulary's size are padding, which
makes the shards equal.

Distillation mixes it with the divergence from a teacher, in the same way.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_dataflow.core.config import remat
from sparse_dataflow.core.ops import derivatives, dispatch, matrix_product, platforms
from sparse_dataflow.core.ops.derivatives import wide

Axis = str | tuple[str, ...]
"""Axis of `shard_map`, or several, outermost first."""


def lookup(table: jax.Array, tokens: jax.Array, axis: Axis) -> jax.Array:
    """Look up tokens in the local rows; tokens of other devices give zeros, so sum over `axis`.

    Args:
      table: float [vocab / devices, d_model].
      tokens: int32 of any shape, indices into the whole vocabulary.
      axis: the sharded axis.

    Returns:
      [*tokens.shape, d_model].
    """
    rows = local_rows(tokens, len(table), axis)
    # Clipped rows keep the gather, and the scatter of its gradient, in bounds.  What they read is
    # masked, so their gradient is zero.
    is_local = (rows >= 0) & (rows < len(table))
    embedded = derivatives.lookup(table, jnp.clip(rows, 0, len(table) - 1))
    return jnp.where(is_local[..., None], embedded, 0)


def local_rows(tokens: jax.Array, local_vocab: int, axis: Axis | None) -> jax.Array:
    """Return the tokens' rows on this device; outside [0, local_vocab) on another device."""
    return tokens if axis is None else tokens - lax.axis_index(axis) * local_vocab


def mask_padding(logits: jax.Array, size: int | None, axis: Axis | None) -> jax.Array:
    """Set the logits of padding rows to -inf: float [tokens, vocab / devices].

    Args:
      logits: float [tokens, vocab / devices], of the local rows.
      size: vocabulary size; None if there are no padding rows.
      axis: the sharded axis, or None.
    """
    local_vocab = logits.shape[1]
    if size is None or local_vocab * (1 if axis is None else lax.axis_size(axis)) <= size:
        return logits
    # Ids count over all devices: only the last devices have padding.
    first = 0 if axis is None else lax.axis_index(axis) * local_vocab
    return jnp.where(first + jnp.arange(local_vocab) < size, logits, -jnp.inf)


def logsumexp(logits: jax.Array, axis: Axis | None) -> jax.Array:
    """Reduce over the whole vocabulary: float [tokens, vocab / devices] -> [tokens]."""
    if axis is None:
        return jax.nn.logsumexp(logits, axis=1)
    # The result does not depend on `top`, which only keeps exp in range.  So its gradient is zero,
    # and pmax, which has no derivative, is not differentiated.
    top = lax.stop_gradient(largest_logit(logits, axis))
    return jnp.log(lax.psum(jnp.sum(jnp.exp(logits - top[:, None]), axis=1), axis)) + top


def largest_logit(logits: jax.Array, axis: Axis | None) -> jax.Array:
    """Return the maximum over the whole vocabulary: [tokens, vocab / devices] -> [tokens]."""
    local_max = jnp.max(logits, axis=1)
    return local_max if axis is None else lax.pmax(local_max, axis)


def logits_at(logits: jax.Array, rows: jax.Array, axis: Axis | None) -> jax.Array:
    """Return the logit at each token's local row, which one device has: float [tokens]."""
    if axis is None:
        return jnp.take_along_axis(logits, rows[:, None], axis=1)[:, 0]
    # A row of another device hits nothing here, and the sum over devices has the one that did.
    hit = jnp.arange(logits.shape[1]) == rows[:, None]
    return lax.psum(jnp.sum(jnp.where(hit, logits, 0), axis=1), axis)


UNROLL_CHUNKS = 4
"""Most chunks that are unrolled on a CPU."""


def token_scores(
    x: jax.Array,
    embedding: jax.Array,
    targets: jax.Array,
    axis: Axis | None = None,
    size: int | None = None,
    cap: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Return each target's negative log-likelihood in nats, and whether it is a likeliest token.

    Args:
      x: float [tokens, d_model], normalised hidden states.
      embedding: float [vocab, d_model], the tied output layer.
      targets: int32 [tokens].
      axis: axes of `shard_map` over which the embedding's rows are sharded, or None.
      size: vocabulary size, if the embedding has padding rows after it.
      cap: soft cap of the logits, see `capped`.

    Returns:
      (float32 [tokens], bool [tokens]).
    """

    def chunk(x, targets):
        logits = capped(logits_of(x, embedding), cap)
        # After the cap, which would turn -inf into the finite logit -cap.
        logits = mask_padding(logits, size, axis)
        rows = local_rows(targets, len(embedding), axis)
        target = logits_at(logits, rows, axis)
        largest = largest_logit(logits, axis)
        return logsumexp(logits, axis) - target, target >= largest

    _, results = over_chunks(
        lambda carry, chunk_arrays: (carry, chunk(*chunk_arrays)), (), (x, targets), len(embedding)
    )
    return results


def weighted_loss(
    x: jax.Array,
    embedding: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    axis: Axis | None = None,
    size: int | None = None,
    cap: float = 0.0,
) -> jax.Array:
    """Return the sum over tokens of weights * the losses of `token_scores`, a float32 scalar.

    `weights` is float32 [tokens].  Differentiable in x and embedding.  Over an axis, every device
    returns an equal share of the sum, and dx of its own rows: sum both over the devices.
    """
    return _weighted_loss((axis, size, cap), x, embedding, targets, weights)


def _value(options, x, embedding, targets, weights):
    losses, _ = token_scores(x, embedding, targets, *options)
    return _share(jnp.sum(losses * weights), options[0])


def _share(total, axis):
    # Every device has the whole sum already, and callers sum the shares of the devices.
    return total if axis is None else total / lax.axis_size(axis)


def _forward(options, x, embedding, targets, weights):
    axis, size, cap = options

    def chunk(x, targets, weights):
        within = capped(logits_of(x, embedding), cap)
        logits = mask_padding(within, size, axis)
        lse = logsumexp(logits, axis)
        rows = local_rows(targets, len(embedding), axis)
        loss = jnp.sum((lse - logits_at(logits, rows, axis)) * weights)
        # A target of another device has a row outside of this range, and hits nothing here.
        hit = jnp.arange(len(embedding)) == rows[:, None]
        # Softmax less one-hot: the gradient of logsumexp(logits) - logits[target].
        dlogits = (jnp.exp(logits - lse[:, None]) - hit) * weights[:, None]
        # The slope of the cap, from the logits before padding is masked.  With a logit of -inf, the
        # gradient of a padding row would be 0 * -inf = NaN.
        return loss, dlogits * (1 - jnp.square(within / cap)) if cap else dlogits

    loss, gradients = loss_and_gradients(chunk, embedding, x, targets, weights)
    return _share(loss, axis), gradients


def _backward(_, gradients, cotangent):
    return *scaled(gradients, cotangent), None, None


_weighted_loss = derivatives.differentiable(_value, _backward, forward=_forward)


def loss_and_gradients(
    chunk: Callable,
    embedding: jax.Array,
    x: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *more: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Return (loss, (dx, dembedding)), one chunk of tokens at a time.

    `chunk` maps a chunk's (x, targets, weights, *more) to its loss and the gradient of its logits.
    """
    dtype = wide(x.dtype)

    def step(total, arrays):
        loss, dembedding = total
        chunk_loss, dlogits = chunk(*arrays)
        # Both products get operands of the compute dtype; with float32 ones they would miss the
        # fast matrix units.  The sum over chunks stays in float32.
        dlogits = dlogits.astype(x.dtype)
        dembedding += matrix_product.dot(dlogits, arrays[0], 0, 0)
        return (loss + chunk_loss, dembedding), jnp.matmul(dlogits, embedding)

    # A scan needs the dtype of the sum from the start, and weights may be wider than losses.
    zero = jnp.zeros((), jnp.promote_types(dtype, weights.dtype))
    total = zero, jnp.zeros(embedding.shape, dtype)
    arrays = x, targets, weights, *more
    (loss, dembedding), dx = over_chunks(step, total, arrays, len(embedding))
    # What follows from dx waits, so that its arrays use the memory of this product again.
    return loss, derivatives.again(dx, dembedding.astype(embedding.dtype))


def scaled(gradients: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[jax.Array, ...]:
    """Return the gradients of a loss times its cotangent."""
    return tuple(gradient * cotangent.astype(gradient.dtype) for gradient in gradients)


def logits_of(x: jax.Array, embedding: jax.Array) -> jax.Array:
    """Return the logits x Eᵀ: [tokens, d_model], [vocab, d_model] -> [tokens, vocab]."""
    return lax.dot_general(
        x, embedding, (((1,), (1,)), ((), ())), preferred_element_type=wide(x.dtype)
    )


def capped(logits: jax.Array, cap: float) -> jax.Array:
    """Return cap * tanh(logits / cap), or the logits for a cap of 0."""
    return cap * jnp.tanh(logits / cap) if cap else logits


def over_chunks(
    step: Callable, carry: object, arrays: tuple[jax.Array, ...], vocabulary: int
) -> tuple[Any, Any]:
    """Scan `step(carry, chunk's arrays)` over chunks; return (carry, results of all tokens).

    A chunk has `chunk_tokens` of the vocabulary on this device.  Only a CPU unrolls (few) chunks:
    unrolled chunks may run concurrently, and a GPU's compiler then allocates one gradient of the
    whole embedding per chunk.
    """
    cached = dispatch.on(platforms.CACHED_CHUNKS)
    # A chunk's logits in float32 are then at most as large as the gradient of the embedding.
    cpu_tokens = max(remat.CPU_TOKENS, arrays[0].shape[-1])
    chunk = cpu_tokens if cached else int(remat.chunk_tokens(vocabulary))
    chunks = len(arrays[0]) // chunk
    max_unrolled = UNROLL_CHUNKS if cached else 1
    results_by_chunk, start = [], 0
    if chunks > max_unrolled:
        # The scan takes whole chunks, [chunks, chunk, ...]; the loop below the shorter last one.
        start = chunks * chunk
        stacked = tuple(a[:start].reshape(chunks, chunk, *a.shape[1:]) for a in arrays)
        carry, results = lax.scan(step, carry, stacked)
        results_by_chunk.append(jax.tree.map(lambda a: a.reshape(start, *a.shape[2:]), results))
    while start < len(arrays[0]):
        end = min(start + chunk, len(arrays[0]))
        carry, results = step(carry, tuple(a[start:end] for a in arrays))
        results_by_chunk.append(results)
        start = end
    return carry, jax.tree.map(lambda *results: jnp.concatenate(results), *results_by_chunk)


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
    axis: Axis | None = None,
    size: int | None = None,
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
      axis: axes of `shard_map` that shard the embedding's rows, not the teacher's; None for none.
      size: vocabulary size, if the embedding has padding rows after it.

    Returns:
      A float32 scalar.  Over an axis, devices return parts of the sum, and of dx.
    """
    rows = len(embedding) * (1 if axis is None else lax.axis_size(axis))
    output = teacher.embedding
    # The teacher's vocabulary may be shorter than the padded one; rows of zeros stand for ids that
    # nobody has.
    if rows > len(output):
        output = jnp.pad(output, [(0, rows - len(output)), (0, 0)])
    if axis is not None:
        first = lax.axis_index(axis) * len(embedding)
        output = lax.dynamic_slice_in_dim(output, first, len(embedding))
    teacher = teacher._replace(embedding=output)
    return _distillation_loss((axis, size), x, embedding, targets, weights, teacher)


def _distillation_value(options, *operands):
    return _distil(options, *operands)[0]


def _distil(options, x, embedding, targets, weights, teacher):
    axis, size = options

    def log_probabilities(logits):
        masked = mask_padding(logits, size, axis)
        if axis is None:
            result = jax.nn.log_softmax(masked)
        else:
            result = masked - logsumexp(masked, axis)[:, None]
        # A product with the probability 0 of padding must be 0.
        return result if masked is logits else jnp.maximum(result, jnp.finfo(result.dtype).min)

    def chunk(x, targets, weights, teacher_x):
        log_student = log_probabilities(logits_of(x, embedding))
        log_teacher = log_probabilities(logits_of(teacher_x, teacher.embedding))
        soft = teacher.weight * jnp.exp(log_teacher)
        rows = local_rows(targets, len(embedding), axis)
        hard = jax.nn.one_hot(rows, len(embedding), dtype=soft.dtype)
        probabilities = (1 - teacher.weight) * hard + soft
        # (1 - w) * loss + w * KL, with teacher t and student s, is the sum over the vocabulary of w
        # t log t - ((1 - w) onehot + w t) log s.  Rows of other devices have a one-hot of zeros.
        losses = jnp.sum(soft * log_teacher - probabilities * log_student, axis=1)
        # The probabilities of a token add up to 1.
        dlogits = (jnp.exp(log_student) - probabilities) * weights[:, None]
        return jnp.sum(losses * weights), dlogits

    return loss_and_gradients(chunk, embedding, x, targets, weights, teacher.x)


def _distillation_backward(_, gradients, cotangent):
    return *scaled(gradients, cotangent), None, None, None


_distillation_loss = derivatives.differentiable(
    _distillation_value, _distillation_backward, forward=_distil
)
