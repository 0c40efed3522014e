"""The form in which weights are decoded: as rows on a CPU, else whole.

A kernel of CPUs reads rows, such as 1 input x 16 outputs: those of blocks or of a mask alone, or
all of a whole matrix.  This is decided here, when a model is prepared for decoding, and nowhere
else.
"""

import functools
import threading

import jax

from sparse_dataflow.chips.cpu import kernels
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import PRECISIONS
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.ops import dispatch, platforms
from sparse_dataflow.core.weights.block_sparse import BlockSparse
from sparse_dataflow.core.weights.dense import Dense, Quantised
from sparse_dataflow.core.weights.masked import Masked
from sparse_dataflow.core.weights.rows import all_rows, rows_of, rows_of_blocks
from sparse_dataflow.core.weights.weight import Linear, Thresholded
from sparse_dataflow.data import cache
from sparse_dataflow.evaluation.sampling_settings import AUTO, DENSE, FORMS, INT8, ROWS
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.processor import processor

KERNELS = "kernels"
"""Folder of compiled kernels in the cache folder."""


def check(config: ModelConfig, form: str) -> None:
    """Checks that a model generates and that a form exists, and that the weights of a model can be
    rows if it is "rows".

    Raises:
      UserError: otherwise.
    """
    config.refuse_bidirectional("Generation", "the command `evaluate`, and sd.logits")
    if form not in FORMS:
        raise UserError(f"The form {form!r} is unknown; legal: {', '.join(FORMS)}.")
    if form not in (ROWS, INT8):
        return
    if not dispatch.on(platforms.ROW_KERNEL):
        raise UserError(f"Rows run on CPUs, and this is {dispatch.platform()}; legal: {DENSE}.")
    if form == ROWS and not any(_width(config, name) for name in config.projections):
        raise UserError(
            "The model has no blocks and no masks of rows (--pattern=masked --block=1x16) of a "
            f"multiple of 8 outputs, so its weights cannot be {ROWS}; legal: {AUTO}, {DENSE}."
        )


def layer_in_form(config: ModelConfig, layer: dict, form: str, number: int) -> dict:
    """Returns the weights of a layer in a form.

    Args:
      layer: `layer_weights` in the compute dtype.
      number: of the layer, from 0, for messages.

    Raises:
      UserError: the form is "rows", and a mask is not of rows.
    """
    if not _as_rows(config, form):
        return layer

    def served(name, module):
        if isinstance(module, dict):
            return {key: served(key, value) for key, value in module.items()}
        if not isinstance(module, Linear):
            return module
        width = _width(config, name)
        skips_zeros = isinstance(module.weight, Thresholded)

        def as_rows(stored):
            if not _is_concrete(stored):
                return stored
            is_blocks = isinstance(stored, BlockSparse)
            if is_blocks and (skips_zeros or not width):
                return stored
            if width and (rows := (rows_of_blocks if is_blocks else rows_of)(stored, width)):
                return rows.in_int8() if form == INT8 else rows
            if is_blocks:
                return stored
            if width and form == ROWS:
                raise UserError(
                    f"The mask of {name} in layer {number} is not of rows of 1 x {width} that "
                    f"are fewer bytes than the whole weight; legal: {AUTO}, {DENSE}, {INT8}."
                )
            if isinstance(stored, Quantised):
                return all_rows(stored.kernel, stored.kernel_scale)
            return stored if skips_zeros else all_rows(stored.dense(), in_int8=form == INT8)

        return Linear(module.weight.map_stored(as_rows), module.bias)

    return served("", layer)


def ends_in_form(config: ModelConfig, embed: dict, head: dict, form: str) -> tuple[dict, dict]:
    """Returns the parameters of the embedding and the head, with the table of the output layer in a
    form."""
    section, name = (head, "output") if "output" in head else (embed, "tokens")
    table = section[name]
    if not _as_rows(config, form) or not _is_concrete(Dense(table)):
        return embed, head
    # [D, vocabulary]: tokens are the outputs of this weight.
    replaced = {**section, name: all_rows(table.T, in_int8=form == INT8)}
    return (embed, replaced) if section is head else (replaced, head)


def _as_rows(config, form):
    """Returns whether weights become rows: where they have a kernel, or where a form needs them."""
    if form == DENSE or not dispatch.on(platforms.ROW_KERNEL):
        return False
    refusal = _refusal()
    return form != AUTO or (config.compute_dtype in kernels.DTYPES and not refusal)


def _width(config, projection):
    spec = config.linear(projection)
    return spec.weight.row_width(spec)


def _is_concrete(stored):
    """Returns whether a weight is a matrix on one device, multiplied in the compute dtype."""
    if not isinstance(stored, (BlockSparse, Dense, Masked, Quantised)):
        return False
    if getattr(stored, "precision", PRECISIONS[0]) != PRECISIONS[0]:
        return False
    arrays = jax.tree.leaves(stored)
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        return False
    if arrays[0].ndim != (3 if isinstance(stored, BlockSparse) else 2):
        return False
    # Arrays of numpy have no devices, and count as on one.
    return all(len(getattr(array, "devices", lambda: "1")()) == 1 for array in arrays)


def start_compiling() -> None:
    """Compiles the kernels in the background, if they are not yet, while a model is read."""
    if dispatch.on(platforms.ROW_KERNEL):
        threading.Thread(target=_refusal, daemon=True).start()


def _refusal():
    """Compiles the kernels at their first use; returns why XLA's products run instead, after saying
    so, or ""."""
    with _lock:
        return _first_refusal()


_lock = threading.Lock()


@functools.cache
def _first_refusal():
    reason = dispatch.sharding_refusal()
    if not reason:
        try:
            folder = cache.resolved(cache.FOLDER)
            with cache.exclusive(folder, KERNELS):  # Claims the folder.
                reason = kernels.build(folder / KERNELS / processor())
        except UserError as error:
            reason = str(error)
    if reason:
        say(f"weights for decoding: products by XLA, because {reason}")
    return reason
