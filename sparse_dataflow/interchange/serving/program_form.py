"""Programs of a model for `jax.export`, with its weights: what jax alone can run.

prefill.bin and decode.bin are `jax.export.Exported`, of the functions `prefill` and `decode_token`
of `evaluation.kv_cache`, with flat lists of arrays for the weights and for the caches:

    prefill(arrays, tokens [b, t], lengths [b]) -> logits [b, vocab], caches of t tokens
    decode(arrays, caches of t tokens, tokens [b], positions [b]) -> logits [b, vocab], caches

b and t are symbolic.  config.json has their limits, and the names of the arrays in order, which
are those in the safetensors files.  Products run in XLA, so the programs run on every platform:
they are traced as on a CPU, whose choices need no kernel.
"""

import dataclasses
import functools
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import export

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.ops import dispatch
from sparse_dataflow.core.ops.block_sparse_matmul.xla_few_rows import FEW_ROWS
from sparse_dataflow.core.weights.kind import Weight
from sparse_dataflow.evaluation import decoded_form, kv_cache
from sparse_dataflow.files import extras
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import tensors
from sparse_dataflow.interchange.serving.readers import write_reader

FORMAT = "sparse_dataflow_program-1"
MODEL_TYPE = "sparse_dataflow_program"
PLATFORMS = ("cpu", "cuda", "tpu")
PREFILL, DECODE, READER = "prefill.bin", "decode.bin", "run_in_jax.py"


def write(
    folder: Path,
    model: ModelConfig,
    params: dict,
    context: int,
    more: Mapping[str, object],
    dtype: str = tensors.DTYPES[0],
) -> list[Path]:
    """Writes config.json, with `more` fields, the programs, the weights and `run_in_jax.py` into an
    existing folder; returns the weights' files.

    Args:
      dtype: of the weights and of the products, one of DTYPES.

    Raises:
      UserError: the package flatbuffers is not installed, or there is no such dtype.
    """
    if importlib.util.find_spec("flatbuffers") is None:
        command = extras.installation("flatbuffers")
        raise UserError(f"The program form needs the package flatbuffers: {command}.")
    tensors.as_dtype({}, dtype)  # Raises UserError for another name.
    model = dataclasses.replace(model, compute_dtype=dtype)
    with dispatch.tracing_for("cpu"):
        prepared = _without_masks(kv_cache.prepare(model, params, decoded_form.DENSE))
        programs = _programs(model, prepared, _longest(model, context))
    for name, program in programs.items():
        (folder / name).write_bytes(program.serialize())
    paths = jax.tree_util.tree_leaves_with_path(prepared)
    arrays = {jax.tree_util.keystr(p, simple=True, separator="."): leaf for p, leaf in paths}
    fields = {
        "model_type": MODEL_TYPE,
        "format": FORMAT,
        "model": model.to_json(),
        "context": context,
        **{name: value for name, value in more.items() if value is not None},
        "platforms": PLATFORMS,
        "most": {"prompts": FEW_ROWS, "tokens": _longest(model, context)},
        "arrays": list(arrays),
    }
    (folder / "config.json").write_text(json.dumps(fields, indent=1) + "\n")
    write_reader(folder, READER)
    return tensors.write(folder, jax.device_get(arrays), {"sparse_dataflow": FORMAT})


def _without_masks(weights):
    """Returns weights in which masked ones are dense, so that no token multiplies by the mask."""

    def is_masked(weight):
        return isinstance(weight, Weight) and weight.has_mask

    return jax.tree.map(lambda w: w.as_dense() if is_masked(w) else w, weights, is_leaf=is_masked)


def _longest(model, context):
    """Returns the most tokens of a text.  Rotary positions may be trained past max_len."""
    return max(model.longest, context)


def _programs(model, prepared, longest):
    """Returns the exported programs by the names of their files."""
    leaves, structure = jax.tree.flatten(prepared)

    def flat(logits, caches):
        return logits, jax.tree.leaves(caches)

    @jax.jit
    def prefill(arrays, tokens_BxT, lengths_B):
        operands = jax.tree.unflatten(structure, arrays), tokens_BxT, lengths_B
        return flat(*kv_cache.prefill(model, *operands, cache_tokens=tokens_BxT.shape[1]))

    @functools.partial(jax.jit, donate_argnames="caches")
    def decode(arrays, caches, tokens_B, positions_B):
        # Keys and values of each layer in turns.
        layers = tuple(map(kv_cache.LayerCache, caches[::2], caches[1::2]))
        weights = jax.tree.unflatten(structure, arrays)
        return flat(*kv_cache.decode_token(model, weights, layers, tokens_B, positions_B))

    def sizes():
        # A scope of its own for each program: constraints name only dimensions of its arguments.
        limits = [f"b <= {FEW_ROWS}", f"t <= {longest}"]
        return export.symbolic_shape("b, t", constraints=limits)

    shape = jax.ShapeDtypeStruct
    arrays = [shape(leaf.shape, leaf.dtype) for leaf in leaves]
    rows, length = sizes()
    prompts = shape((rows, length), jnp.int32), shape((rows,), jnp.int32)
    programs = {PREFILL: export.export(prefill, platforms=PLATFORMS)(arrays, *prompts)}
    rows, length = sizes()
    cache = shape((rows, model.kv_heads, length, model.head_width), model.compute_dtype)
    caches, ids = [cache] * (2 * model.num_layers), shape((rows,), jnp.int32)
    return {
        **programs,
        DECODE: export.export(decode, platforms=PLATFORMS)(arrays, caches, ids, ids),
    }
