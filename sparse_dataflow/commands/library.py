"""Presets, and a language model without the trainer: draw it, call it, train and save it."""

import importlib.metadata
import shutil
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.data.tokenizer import Tokenizer, byte_tokenizer
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files import console
from sparse_dataflow.files.addresses import local_path
from sparse_dataflow.files.errors import UserError, redact
from sparse_dataflow.interchange import hub_models, huggingface, peft, starting_point
from sparse_dataflow.interchange.model_card import model_card, short_card
from sparse_dataflow.interchange.tensors import DTYPES
from sparse_dataflow.runs import run_config as run
from sparse_dataflow.runs.run_config import RunConfig
from sparse_dataflow.runs.variants import variant


def preset(scale: str | Path, *, compute_dtype: str = "float32") -> RunConfig:
    """Returns the run of a named scale with its recipe, or the run that begins with other weights.

    A named scale is block-sparse at density 1/8; laptop scales also train the dense twin.  A folder
    gives the shape, and the named scale of nearest size the recipe.  Block-sparse weights also
    bring their layout settings.

    Args:
      scale: name of a scale, such as "3m"; or run folder, Hugging Face directory or name of a model
        on the hub, whose weights and tokenizer the run begins with.
      compute_dtype: dtype of activations; bfloat16 suits accelerators.

    Raises:
      UserError: no such scale or folder; names the scales.

    Examples:
        >>> sd.preset("13b").model.d_model
        5120
        >>> model = sd.init(sd.preset("pico").change(sparsity__block=16), jax.random.key(0))
        >>> folder = sd.save(model, os.path.join(tempfile.mkdtemp(), "model"))
        >>> sd.preset(folder).change(training__steps=10).sparsity.block
        16
    """
    if scale in run.SIZES:
        return run.preset(str(scale), compute_dtype=compute_dtype)
    if Path(scale).expanduser().is_dir() or hub_models.hub_name(scale):
        return starting_point.run_config(scale, compute_dtype)
    return run.preset(str(scale), compute_dtype=compute_dtype)


def init(config: RunConfig, key: jax.Array, tokenizer: Tokenizer | None = None) -> Model:
    """Draws a model: the sparse one, or the dense one of a config without sparse projections.

    A `Model` is a pytree whose leaves are its parameters, so it works with `jax.grad`, `jax.jit`,
    optax and orbax.  Its layouts are static: programs are specialised to them.

    Args:
      config: shape and sparsity; settings of `sd.train` are not read.
      key: random key of the parameters.
      tokenizer: gives the vocabulary; None for one token a byte, and `config.model.vocab_size`.

    Raises:
      UserError: the model or its layouts are impossible, or `config.evolution` changes them in
        training.

    Examples:
        >>> config = sd.preset("pico").change(sparsity__block=16)
        >>> model = sd.init(config, jax.random.key(0))
        >>> tokens = model.tokenizer.encode("def main():")[None]
        >>> gradients = jax.grad(sd.loss)(model, tokens)
        >>> type(gradients).__name__, gradients.params["embed"]["tokens"].shape
        ('Model', (512, 128))
    """
    if config.evolution.method != "static":
        raise UserError(
            f"evolution.method={config.evolution.method} changes the model in sd.train; legal for "
            "sd.init: static."
        )
    # Old keys are arrays of two words, new ones scalars of a type of their own.  A stack of keys
    # would draw a stack of models without an error.
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if key.shape != (() if typed else (2,)):
        raise UserError(f"key is {key.dtype} of shape {key.shape}; legal: jax.random.key(SEED).")
    tokenizer = tokenizer or byte_tokenizer(config.model.vocab_size)
    chosen = variant(config, config.variants[0], tokenizer.vocab_size)
    params = jax.jit(gpt.init, static_argnums=0)(chosen.model, key)
    layouts = stacks.stored_layouts(chosen.model)
    return Model(
        folder=Path(),
        variant=chosen.name,
        model=chosen.model,
        params=merged(params, layouts),
        tokenizer=tokenizer,
        step=0,
        training=chosen.training,
        record=None,
        facts={},
    )


def logits(model: Model, tokens: ArrayLike | Sequence) -> jax.Array:
    """Returns the scores of every next token; of a masked model those of every token.

    Args:
      model: see `sd.init` and `sd.load`.
      tokens: int [batch, sequence] token ids.

    Returns:
      float32 [batch, sequence, vocab_size].

    Raises:
      UserError: the tokens have another shape or dtype, or are longer than the learned positions.

    Examples:
        >>> model = sd.init(sd.preset("pico").change(sparsity__block=16), jax.random.key(0))
        >>> sd.logits(model, np.zeros((2, 8), np.int32)).shape
        (2, 8, 512)
    """
    weights = weights_of(model.model, model.params)
    return whole.logits(model.model, weights, _checked(tokens, 1))


def loss(model: Model, tokens: ArrayLike | Sequence) -> jax.Array:
    """Returns the mean negative log-likelihood of the next tokens: float32 [], in nats.

    Args:
      model: see `sd.init` and `sd.load`; differentiate with respect to it.
      tokens: int [batch, sequence + 1] token ids; all but the last are inputs, all but the first
        are targets.

    Raises:
      UserError: the tokens have another shape or dtype, or are longer than the learned positions.

    Examples:
        >>> model = sd.init(sd.preset("pico").change(sparsity__block=16), jax.random.key(0))
        >>> loss = jax.jit(sd.loss)(model, np.zeros((2, 9), np.int32))
        >>> loss.shape, bool(5 < loss < 8)
        ((), True)
    """
    model.model.refuse_bidirectional("sd.loss", "sd.logits, of each token from all others")
    batch = Batch.from_windows(_checked(tokens, 2)).weighted()
    return whole.loss(model.model, weights_of(model.model, model.params), batch)


def save(
    model: Model,
    folder: str | Path,
    form: str = "sparse",
    architecture: str = huggingface.AUTO,
    dtype: str = DTYPES[0],
) -> Path:
    """Writes a model, with its tokenizer, as a Hugging Face directory.

    `sd.load` reads the sparse and the dense form.  The sparse form has the stored blocks and the
    layouts, with a reader in PyTorch.  Of a masked weight it has the entries under the mask, and
    one bit a block.  `transformers` loads the dense form.  The program form has compiled programs
    that jax runs without this package.  Optimizer state is not saved.

    Args:
      model: what `sd.init`, `sd.load` or `sd.train(...).model()` returned, or your own loop made.
      folder: folder to make; it must not exist.
      form: "sparse"; "dense", where blocks that are not stored are zeros; "program", which writes
        and reads text in jax, and is not trained further; "gguf", a file of dense weights that
        llama.cpp runs; or "adapter", the adapters of a run
        alone, for PEFT.  The dense form has adapters merged into its weights, the sparse form and
        programs have them as low-rank terms.
      architecture: of the dense and the GGUF form: a name in `interchange.architectures`, such as
        "llama", or "auto" for that of the weights that a run began with, else the first that
        represents the model.
      dtype: of the numbers: "float32", or "bfloat16", which rounds them; of the GGUF form also
        "float16" and "q8_0".

    Returns:
      The path of the folder.

    Raises:
      UserError: the architecture or PEFT cannot represent the model, or the folder exists or
        cannot be written; nothing half-written is left.

    Examples:
        >>> model = sd.init(sd.preset("pico").change(sparsity__block=16), jax.random.key(0))
        >>> folder = sd.save(model, os.path.join(tempfile.mkdtemp(), "model"))
        >>> sd.load(folder).model == model.model
        True
    """
    model.model.refuse_bidirectional(
        f"A reader of the {form} form", "the run folder, which sd.load and run.init_from read"
    )
    model.model.refuse_additions(
        f"The {form} form", "the run folder, which sd.load, generate and evaluate read"
    )
    if form == "adapter":
        peft.refuse_other(model)
        if dtype != DTYPES[0]:
            raise UserError(f"dtype={dtype} with form=adapter; legal: {DTYPES[0]}.")
    versions = {name: importlib.metadata.version(name) for name in ("jax", "safetensors")}
    versions = {"sparse_dataflow": console.version(), **versions}
    if model.record is not None:
        card = redact(model_card(model, form, versions))
        architecture = huggingface.preferred(architecture, model.record, model.model)
    else:
        reader = f"`sparse_dataflow.load` of version {versions['sparse_dataflow']}"
        readers = {
            "dense": f"{reader} and transformers read",
            "program": "`python run_in_jax.py PROMPT` runs",
            "gguf": f"{reader} and llama.cpp read",
        }
        sentence = f"{readers.get(form, f'{reader} reads')} this model."
        card = short_card(Path(folder).name, sentence, model.model)
    # An adapter has no weights of the base, so it is no Hugging Face model and is written apart.
    if form == "adapter":
        folder = local_path("folder", folder)
        with huggingface.new_folder(folder) as partial:
            for path in peft.write(partial, model):
                shutil.copymode(partial / peft.CONFIG, path)
            (partial / huggingface.CARD).write_text(card, encoding="utf-8")
        return folder
    return huggingface.write(
        folder,
        form,
        model.model,
        jax.device_get(model.params),
        model.tokenizer,
        context=model.context,
        card=card,
        architecture=architecture,
        dtype=dtype,
    )


def _checked(tokens, shortest):
    """Returns int32 tokens [batch, sequence] of at least `shortest` each."""
    try:
        tokens = jnp.asarray(tokens)
    except (OverflowError, TypeError, ValueError):
        raise UserError("tokens are no array; legal: integers [batch, sequence].") from None
    if not jnp.issubdtype(tokens.dtype, jnp.integer) or tokens.ndim != 2:
        raise UserError(
            f"tokens are {tokens.dtype} of shape {tokens.shape}; legal: integers [batch, sequence]."
        )
    if tokens.shape[0] < 1 or tokens.shape[1] < shortest:
        raise UserError(
            f"tokens have shape {tokens.shape}; legal: a row or more of at least {shortest}."
        )
    return tokens.astype(jnp.int32)
