"""Block-sparse y = xW of other libraries, as programs to be timed beside ours.

Only the forward product: no other library has all three.  Packages that are not installed are left
out.
"""

import importlib.util
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from ..benchmark import Program
from .programs import Case, Operands


def available(case: Case, operands: Operands) -> Iterator[tuple[str, Callable[[], Program]]]:
    """(name, maker of its program) of every peer that is installed; a maker may raise."""
    yield "jax_bcsr", lambda: _jax_bcsr(case, operands)
    if importlib.util.find_spec("torch") is None:
        return
    yield "torch_dense", lambda: _torch(case, operands, _dense_product)
    yield "torch_bsr", lambda: _torch(case, operands, _bsr_product)
    import torch

    # On a CPU torch has no Triton product, whether or not Triton is installed.
    if torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
        yield "torch_triton_bsr", lambda: _torch(case, operands, _triton_product)


def _jax_bcsr(case, operands):
    """Scalars in rows, as `jax.experimental.sparse` has no product for larger blocks."""
    from jax.experimental import sparse

    weight = _masked(case, operands).T
    rows, cols = np.nonzero(np.asarray(weight.astype(jnp.float32)))
    starts = np.searchsorted(rows, np.arange(len(weight) + 1)).astype(np.int32)
    stored = (weight[rows, cols], jnp.asarray(cols, jnp.int32), jnp.asarray(starts))
    matrix = sparse.BCSR(stored, shape=weight.shape)
    program = jax.jit(lambda matrix, x: (matrix @ x.T).T)
    return _timed(lambda: program(matrix, operands.x))


def _torch(case, operands, product):
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, case.dtype)
    copy = lambda a: torch.tensor(  # noqa: E731
        np.asarray(a.astype(jnp.float32)), dtype=dtype, device=device
    )
    run = product(copy(operands.x), copy(_masked(case, operands)), case.layout.block)

    def start():
        with torch.no_grad():
            return Pending(run(), torch.cuda.synchronize if device == "cuda" else None)

    return _timed(start)


def _dense_product(x, weight, block):
    return lambda: x @ weight


def _bsr_product(x, weight, block):
    import torch

    stored = weight.T.contiguous().to_sparse_bsr((block, block))
    return lambda: torch.nn.functional.linear(x, stored)


def _triton_product(x, weight, block):
    from torch.sparse._triton_ops import bsr_dense_mm

    stored, columns = weight.T.contiguous().to_sparse_bsr((block, block)), x.T.contiguous()
    return lambda: bsr_dense_mm(stored, columns)


class Pending:
    """A result of torch that jax.block_until_ready can wait for."""

    def __init__(self, result, wait):
        self.result, self._wait = result, wait

    def block_until_ready(self):
        """As that of a jax array."""
        if self._wait is not None:
            self._wait()
        return self

    def __float__(self) -> float:
        return float(self.result)


def _masked(case, operands):
    """The dense W with zeros where no block is stored."""
    block = case.layout.block
    mask = np.repeat(np.repeat(case.layout.mask, block, axis=0), block, axis=1)
    return jnp.where(mask, operands.weight, 0)


def _timed(run):
    start = time.perf_counter()
    jax.block_until_ready(run())
    return Program(run, time.perf_counter() - start)
