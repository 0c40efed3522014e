"""Optimizers on the host, in place: the arithmetic of `optim`, AdamW and Muon in numpy.

Arrays are updated in pieces whose temporaries stay in a core's cache. numpy releases Python's lock
in each operation, so several threads update at once. XLA on the CPU backend would allocate its
results; copying them to the masters (slices of stacked arrays, mapped files) costs more than its
single pass saves.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.optim import by_weight, muon
from sparse_dataflow.hardware.detect import cpu_count

PIECE = 2**17 if cpu_count() <= 2 else 2**19
"""Elements per piece.  On few cores its float32 temporaries, 1 MiB with float32 moments and 2 MiB
with bfloat16, fit a core's second-level cache.  On many, threads wait for Python's lock between the
operations of short pieces: 16 cores updated 199 M parameters a second in pieces of 2**17 and 696 M
in pieces of 2**19."""

BFLOAT16 = "bfloat16"


class Rates(NamedTuple):
    """Scalars of one parameter's update.

    Attributes:
      number: index of the update, from 1.
      clip: factor on the gradient, at most 1.
      decay: decoupled weight decay; 0 for none.
      b1: see `TrainingConfig`, also for `b2` and `epsilon`.
    """

    number: int
    clip: float
    learning_rate: float
    decay: float
    b1: float = TrainingConfig.b1
    b2: float = TrainingConfig.b2
    epsilon: float = TrainingConfig.epsilon


class Leaf(NamedTuple):
    """A parameter and its moments: contiguous arrays of one shape.

    The parameter is float32; the moments are float32 or bfloat16. A matrix of Muon has no second
    moment; its first moment is Muon's momentum. Of an optimizer of `by_weight`, `mu` is the tuple
    of the state's arrays.
    """

    parameter: np.ndarray
    mu: Any
    nu: Any = None

    def piece(self, where: slice) -> "Leaf":
        """Returns flat views of a range of elements."""
        nu = None if self.nu is None else _flat(self.nu)[where]
        return Leaf(_flat(self.parameter)[where], _flat(self.mu)[where], nu)


def pieces(size: int, count: int = 1, unit: int = 1) -> Iterator[slice]:
    """Yields slices that cover `size` elements.

    Args:
      count: number of slices, about; all but the last have a multiple of PIECE elements.
      unit: elements of a matrix, which no slice divides.
    """
    # A whole number of matrices: Muon orthogonalizes a matrix, which two threads cannot share.
    least = unit * math.ceil(PIECE / unit)
    step = least * max(1, math.ceil(size / (least * count)))
    for start in range(0, size, step):
        yield slice(start, min(size, start + step))


def update(
    before: Leaf, gradient: np.ndarray, rates: Rates, after: Leaf, copy: np.ndarray | None = None
) -> None:
    """Runs one step of AdamW on some elements.

    Args:
      before: 1-D views of the old values.
      gradient: float32 or bfloat16, of the same length.
      rates: scalars of this step.
      after: 1-D views for the results, of the same dtypes; may be `before`.
      copy: also receives the parameter, rounded to its dtype, float32 or bfloat16.
    """
    wide = before.mu.dtype == np.float32
    b1, b2 = rates.b1, rates.b2
    # `g` and `t`, and wide copies of moments that are stored in 16 bits.
    scratch = np.empty((2 if wide else 4, min(PIECE, gradient.size)), np.float32)
    # Pieces that stay in the caches over all operations: of whole arrays each operation would read
    # and write the memory.
    for where in pieces(gradient.size, gradient.size):
        g, t, *moments = scratch[:, : where.stop - where.start]
        p, m, v = (array[where] for array in before)
        p_out, m_out, v_out = (array[where] for array in after)
        if not wide:
            m, v = (widen(array, out) for array, out in zip((m, v), moments))
            m_out, v_out = moments
        np.multiply(widen(gradient[where], g), np.float32(rates.clip), out=g)
        # m = b1 m + (1 - b1) g, and v = b2 v + (1 - b2) g^2 (Adam, arXiv 1412.6980, algorithm 1).
        np.multiply(m, np.float32(b1), out=m_out)
        np.multiply(g, np.float32(1 - b1), out=t)
        np.add(m_out, t, out=m_out)
        np.multiply(g, g, out=g)
        np.multiply(g, np.float32(1 - b2), out=g)
        np.multiply(v, np.float32(b2), out=v_out)
        np.add(v_out, g, out=v_out)
        # t = m / (1 - b1^n) / (sqrt(v / (1 - b2^n)) + epsilon).
        np.multiply(v_out, np.float32(1 / (1 - b2**rates.number)), out=t)
        np.sqrt(t, out=t)
        np.add(t, np.float32(rates.epsilon), out=t)
        np.divide(m_out, t, out=t)
        np.multiply(t, np.float32(1 / (1 - b1**rates.number)), out=t)
        # p = p - rate (t + decay p), the decoupled decay of arXiv 1711.05101.
        np.multiply(p, np.float32(rates.decay), out=g)
        np.add(t, g, out=t)
        np.multiply(t, np.float32(rates.learning_rate), out=t)
        np.subtract(p, t, out=p_out)
        if not wide:
            narrow(m_out, after.mu[where])
            narrow(v_out, after.nu[where])
        if copy is not None:
            narrow(p_out, copy[where])


def update_matrices(
    before: Leaf,
    gradient: np.ndarray,
    rates: Rates,
    after: Leaf,
    copy: np.ndarray | None = None,
    *,
    matrices: muon.Matrices,
    scale: float = 1.0,
) -> None:
    """Runs one step of Muon on some units of a weight; see `muon.Matrices`.

    Takes the arguments of `update`, and

    Args:
      matrices: of the weight.
      scale: of the updates; of the factors of a product, see `matrix_leaves.update_scales`.
    """
    # A few matrices at a time: temporaries of the whole stack would take its memory several times.
    for where in pieces(gradient.size, gradient.size, math.prod(matrices.unit)):
        g = widen(gradient[where]) * np.float32(rates.clip)
        mu = muon.with_gradient(widen(before.mu[where]), g)
        narrow(mu, after.mu[where])
        block = matrices.unit[-2:]
        momentum, stack = (matrices.join(a.reshape(-1, *block)) for a in (mu, g))
        step = _flat(matrices.split(muon.update(momentum, stack, rates.number)))
        if scale != 1:
            step *= np.float32(scale)
        step += np.float32(rates.decay) * before.parameter[where]
        step *= np.float32(rates.learning_rate)
        np.subtract(before.parameter[where], step, out=after.parameter[where])
        if copy is not None:
            narrow(after.parameter[where], copy[where])


def update_weights(
    before: Leaf,
    gradient: np.ndarray,
    rates: Rates,
    after: Leaf,
    copy: np.ndarray | None = None,
    *,
    training: TrainingConfig,
    axes: int,
    rows: slice | None = None,
) -> None:
    """Runs one step of an optimizer of `by_weight` on a parameter of any shape, by XLA on the CPU.

    Takes the arguments of `update`, and

    Args:
      training: names the optimizer.
      axes: `matrix_leaves.weight_axes` of the parameter.
      rows: of the parameter that change; None for all.
    """
    # The default device may be an accelerator, whose memory has no room for these states.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        program = _weights_program(training, axes, rates.decay)
        arrays = before.parameter, gradient.reshape(before.parameter.shape), before.mu
        results = program(*arrays, np.float32(rates.clip), np.float32(rates.learning_rate))
    parameter, state = jax.tree.map(np.asarray, results)
    # Rows of new tokens alone learn at first.
    # The optimizer has moved all rows; the old ones are put back.
    if rows is not None:
        new, parameter = parameter, before.parameter.copy()
        if parameter.ndim:
            parameter[rows] = new[rows]
    after.parameter[...] = parameter
    for to, array in zip(after.mu, state, strict=True):
        to[...] = array
    if copy is not None:
        narrow(_flat(parameter), copy)


@functools.cache
# Decay is part of the program, so there are two per optimizer and shape: with and without.
def _weights_program(training, axes, decay):
    @jax.jit
    def program(parameter, gradient, state, clip, rate):
        gradient = gradient.astype(jnp.float32) * clip
        step, state = by_weight.update_leaf(training, axes, gradient, state, parameter, rate, decay)
        return parameter + step, state

    return program


def square_sum(gradient: np.ndarray) -> float:
    """Returns the sum of squares of a float32 or bfloat16 array; pieces are summed in float64."""
    # Python's sum is float64: in float32 the small pieces of a large weight would be lost.
    flat, total = _flat(gradient), 0.0
    for where in pieces(flat.size, flat.size):
        piece = widen(flat[where])
        total += float(np.dot(piece, piece))
    return total


def widen(array: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Converts a 1-D float32 or bfloat16 array to float32, exactly.

    Returns a float32 array itself; else `out`, a new array if None.
    """
    if array.dtype.name != BFLOAT16:
        return array
    out = np.empty(array.shape, np.float32) if out is None else out
    # A bfloat16 is the upper half of a float32.
    np.left_shift(array.view(np.uint16), np.uint32(16), out=out.view(np.uint32))
    return out


def narrow(array: np.ndarray, out: np.ndarray) -> None:
    """Writes 1-D float32 to `out`, float32 or bfloat16, rounding to nearest even."""
    if out.dtype.name != BFLOAT16:
        out[:] = array
        return
    bits = array.view(np.uint32)
    # Half of the last kept bit less one, plus that bit: a tie carries only if the bit is odd.
    rounded = (bits >> 16) & 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    out.view(np.uint16)[:] = rounded
    if np.isnan(array.sum()):  # A NaN with all of its bits set would carry over to 0.
        out[np.isnan(array)] = np.nan


def _flat(array):
    return array.reshape(-1)
