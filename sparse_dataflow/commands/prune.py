"""`sd.prune`: prunes a language model, a run, a Hugging Face directory or any nnx model."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flax import nnx

from sparse_dataflow.core.config.sparsity import GROUPED_PATTERNS
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.layers.prune import prune_linears
from sparse_dataflow.layers.replace import Where
from sparse_dataflow.pruning.groups import Groups
from sparse_dataflow.pruning.result import PrunedModel

NARROW = "narrow"


def prune(
    model: object,
    batches: object,
    *,
    density: float | None = None,
    block: int | str = 16,
    where: Where | None = None,
    rounds: int | None = None,
    pattern: str = "",
    call: Callable[[Any, object], object] | None = None,
    out: str | Path | None = None,
    dtype: str = "float32",
    tokens: int | None = None,
) -> PrunedModel:
    """Removes weights of a trained model, and fits the others to the outputs of the whole model.

    What goes is chosen by the error that the other weights cannot make up for (second order, as in
    SparseGPT), and what stays is a least-squares fit, one projection after the other, each on what
    the pruned ones before it give.  The damping of each fit is that of the least error on held-out
    tokens.  The model does not change.

    Square blocks become block-sparse weights, which store and compute less.  Other shapes become
    masked weights: `sd.save` stores less, and products are as fast as dense ones.  Of an nnx model
    they become zeros in its own linears.

    Args:
      model: an `sd.Model`; a run folder, Hugging Face directory or name on the hub, which is
        loaded; or any nnx model.
      batches: calibration data.  For a language model token arrays, int [batch, sequence], or
        texts.  For an nnx model what `call` takes.  Give several times as many tokens as a
        projection has inputs.
      density: fraction of each projection that stays, below 1; None for 0.5, and for N / M of N of
        M.
      block: what is removed together: 16 or "16x16" (squares), "1x16" (1 input x 16 outputs), 1
        (single weights), "2:4" (2 of 4 inputs stay), or "narrow" (heads and hidden features of a
        language model, which becomes a smaller dense one).
      where: (path, linear) -> whether to prune it; None for all.  For a language model it gets the
        name of a projection, such as "mlp_in", and its shape.
      rounds: in how many rounds weights go; None for 8.
      pattern: of square blocks of a language model, "monarch" or "shuffle", whose products are the
        fastest: features change places first, so that its blocks have the largest weights.  ""
        for the blocks that cost most to remove.
      call: (model, batch) applies an nnx model; None for `model(batch)`.
      out: folder to make with the pruned language model, as of `sd.save`; None for a model in
        memory.  Each layer is written when it is finished, so that of a Hugging Face directory one
        layer is in memory at a time.  The same call goes on after an interrupt.
      dtype: of the numbers in `out`: "float32", or "bfloat16", which rounds them.
      tokens: of texts, the most that are read; None for all.

    Returns:
      The pruned model.  With `out`, its model is the path of the folder, which `sd.load` reads.

    Raises:
      UserError: no projection is selected, a projection has no such density or shares its kernel,
        or activations are not finite; names the legal values.

    Examples:
        >>> model = sd.init(sd.preset("pico").dense(), jax.random.key(0))
        >>> tokens = np.arange(1024).reshape(16, 64) % 512
        >>> pruned = sd.prune(model, [tokens], density=0.5, block=32)
        >>> pruned.model.model.linear("mlp_in").density
        0.5
        >>> sorted(pruned.masks)
        ['attn_out', 'mlp_in', 'mlp_out', 'qkv']
    """
    if rounds is not None and rounds < 1:
        raise UserError(f"rounds={rounds}; legal: 1 or more, or None.")
    if density is not None and not 0 < density < 1:
        raise UserError(f"density={density:g}; legal: above 0 and below 1, where all weights stay.")
    if tokens is not None and tokens < 1:
        raise UserError(f"tokens={tokens}; legal: 1 or more, or None.")
    rounds = rounds or 0
    groups = None if block == NARROW else Groups.parse(block)
    if pattern and (pattern not in GROUPED_PATTERNS or groups is None or not groups.is_square):
        raise UserError(
            f"pattern={pattern!r} with block={block}; legal: {' and '.join(GROUPED_PATTERNS)}, of "
            "square blocks."
        )
    if isinstance(model, nnx.Module):
        if groups is None:
            raise UserError('block="narrow" is for language models; legal for nnx models: a shape.')
        if pattern:
            raise UserError("pattern is for language models; legal for nnx models: none.")
        if out is not None:
            raise UserError("out is for language models; legal for nnx models: None.")
        inputs = _listed(batches)
        apply = call or (lambda module, batch: module(batch))
        return prune_linears(model, inputs, groups, density, rounds, where, apply)
    if call is not None:
        raise UserError("call is for nnx models; legal for language models: None.")
    if out is None and dtype != "float32":
        raise UserError(f"dtype={dtype} without out; legal: float32, and dtype of `sd.save`.")
    # Reads tokenizers and checkpoints, which a model of nnx does not need.
    from sparse_dataflow.commands.prune_language_model import prune_language_model

    return prune_language_model(
        model, _listed(batches), groups, density, where, rounds, pattern, out, dtype, tokens
    )


def _listed(batches) -> list:
    """Returns the batches as a list."""
    single = hasattr(batches, "shape") or isinstance(batches, str | bytes | Mapping)
    if single or not isinstance(batches, Iterable):
        raise UserError("batches is not a list of batches; legal: a list with one or more.")
    if not (batches := list(batches)):
        raise UserError("batches is empty; legal: a list with one or more.")
    return batches
