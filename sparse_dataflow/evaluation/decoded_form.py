"""The form in which masked weights are decoded: as rows on a CPU, else whole.

A mask of rows, such as 1 input x 16 outputs, lets a CPU read the stored weights alone.  This is
decided here, when a model is prepared for decoding, and nowhere else.
"""

import functools

import jax

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import PRECISIONS
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.ops import dispatch, platforms
from sparse_dataflow.core.weights.masked import Masked
from sparse_dataflow.core.weights.rows import rows_of
from sparse_dataflow.core.weights.weight import Linear
from sparse_dataflow.data import cache
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.processor import processor

FORMS = AUTO, ROWS, DENSE = "auto", "rows", "dense"
"""Forms of masked weights: as rows where a CPU is faster with them, as rows, or whole."""

KERNELS = "kernels"
"""Folder of compiled kernels in the cache folder."""


def check(config: ModelConfig, form: str) -> None:
    """Checks that a form exists, and that the weights of a model can be rows if it is "rows".

    Raises:
      UserError: otherwise.
    """
    if form not in FORMS:
        raise UserError(f"The form {form!r} is unknown; legal: {', '.join(FORMS)}.")
    if form != ROWS:
        return
    if not dispatch.on(platforms.ROW_KERNEL):
        raise UserError(f"Rows run on CPUs, and this is {dispatch.platform()}; legal: {DENSE}.")
    if not any(_width(config, name) for name in config.projections):
        raise UserError(
            "The model has no masks of rows (--pattern=masked --block=1x16, or another "
            f"multiple of 8 outputs), so its weights cannot be {ROWS}; legal: {AUTO}, {DENSE}."
        )


def layer_in_form(config: ModelConfig, layer: dict, form: str, number: int) -> dict:
    """Returns the weights of a layer with masked weights in a form.

    Args:
      layer: `layer_weights` in the compute dtype.
      number: of the layer, from 0, for messages.

    Raises:
      UserError: the form is "rows", and a mask is not of rows.
    """
    if form == DENSE or not dispatch.on(platforms.ROW_KERNEL):
        return layer

    def served(name, module):
        if isinstance(module, dict):
            return {key: served(key, value) for key, value in module.items()}
        if not isinstance(module, Linear):
            return module
        width = _width(config, name)

        def as_rows(stored):
            if not width or not _is_concrete(stored):
                return stored
            if (rows := rows_of(stored, width, with_kernel=bool(_refusal()))) is None:
                if form == ROWS:
                    raise UserError(
                        f"The mask of {name} in layer {number} is not of rows of 1 x {width} that "
                        f"are fewer bytes than the whole weight; legal: {AUTO}, {DENSE}."
                    )
                return stored
            return rows

        return Linear(module.weight.map_stored(as_rows), module.bias)

    return served("", layer)


def _width(config, projection):
    spec = config.linear(projection)
    return spec.weight.row_width(spec)


def _is_concrete(stored):
    """Returns whether a weight is a matrix on one device, multiplied in the compute dtype."""
    if not isinstance(stored, Masked) or stored.precision != PRECISIONS[0]:
        return False
    arrays = stored.kernel, stored.mask
    if any(isinstance(array, jax.core.Tracer) or array.ndim != 2 for array in arrays):
        return False
    return all(len(getattr(array, "devices", lambda: "1")()) == 1 for array in arrays)


@functools.cache
def _refusal():
    """Compiles the product with rows at its first use; returns why XLA's runs instead, after saying
    so, or ""."""
    from sparse_dataflow.chips.cpu import row_matmul

    reason = dispatch.sharding_refusal()
    if not reason:
        try:
            folder = cache.resolved(cache.FOLDER)
            with cache.exclusive(folder, KERNELS):  # Claims the folder.
                reason = row_matmul.build(folder / KERNELS / processor())
        except UserError as error:
            reason = str(error)
    if reason:
        say(f"rows of weights: products by XLA, because {reason}")
    return reason
