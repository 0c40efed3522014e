"""Weights that a training begins with: those of another run, GPT-2 or OPT, or an export.

What gets sparser on the way keeps its largest blocks (one-shot pruning by magnitude); what gets
denser keeps its function.  The optimizer begins anew.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sparse_dataflow.config.model import PROJECTIONS, ModelConfig
from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.evaluation import trained
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import huggingface
from sparse_dataflow.models.groups import layer_linear
from sparse_dataflow.optim.optimizers import make_optimizer
from sparse_dataflow.optim.train_state import TrainState
from sparse_dataflow.parallel.executor import SINGLE_DEVICE, Executor
from sparse_dataflow.training.run_files import read_config
from sparse_dataflow.training.transitions import change_model


class StartingPoint(NamedTuple):
    """A model whose weights another begins with.

    Attributes:
      model: its config.
      params: on the host; see `gpt`.
      tables: numpy layout tables.
      tokenizer: its tokenizer, which the new training keeps.
      about: JSON-able, for config.json: where it is from, and what it is.
    """

    model: ModelConfig
    params: dict
    tables: dict
    tokenizer: Tokenizer
    about: dict[str, Any]


def shape(folder: str | Path) -> ModelConfig:
    """The dense model of the shape that a run, or a Hugging Face directory, holds; reads no weights
    of a run.

    Raises:
      UserError: it holds none.
    """
    _refuse_missing(folder)
    if huggingface.is_directory(folder):
        model = read(str(folder)).model
    else:
        model = read_config(folder).model
    return dataclasses.replace(model, linears={}, density_by_depth=())


@functools.lru_cache(maxsize=1)
def read(folder: str) -> StartingPoint:
    """The newest checkpoint of a run, of its dense model where it has one, or a Hugging Face
    directory.

    Raises:
      UserError: there is none, or it is damaged.
    """
    _refuse_missing(folder)
    about: dict[str, Any] = {"path": str(Path(folder).expanduser().absolute())}
    if huggingface.is_directory(folder):
        found = huggingface.read(folder)
        about |= {"model": found.model.to_json(), "weights": found.digest}
        return StartingPoint(found.model, found.params, found.tables, found.tokenizer, about)
    names = read_config(folder).variants
    variant = "dense" if "dense" in names else names[0]
    run = trained.load(folder, variant)
    about |= {"model": run.model.to_json(), "variant": variant, "step": run.step}
    return StartingPoint(run.model, jax.device_get(run.params), run.tables, run.tokenizer, about)


def _refuse_missing(folder):
    if not (Path(folder).expanduser() / huggingface.CONFIG).exists():
        raise UserError(
            f"{folder} is neither a run folder nor a Hugging Face directory: it has no "
            f"{huggingface.CONFIG}. Nothing is downloaded; legal: a folder on this machine."
        )


def begun_state(
    start: StartingPoint,
    model: ModelConfig,
    training: TrainingConfig,
    executor: Executor = SINGLE_DEVICE,
) -> TrainState:
    """The state before the first step of `model`, with the weights of `start`.

    Raises:
      UserError: the two models differ in more than what is stored of their projections.
    """
    refuse_other_shape(start.model, model)
    step, key = jnp.zeros((), jnp.int32), jax.random.key(training.seed)
    params = jax.tree.map(jnp.array, start.params)
    state = change_model(TrainState(step, params, (), start.tables, key), start.model, model)
    moments = jax.jit(make_optimizer(model, training).init)(state.params)
    return executor.place(state._replace(moments=moments))


def refuse_other_shape(start: ModelConfig, model: ModelConfig) -> None:
    """Raises UserError, naming what differs, unless `model` can begin with weights of `start`."""
    free = ("linears", "density_by_depth", "remat", "compute_dtype", "seed")
    differences = [
        f"{field.name} is {getattr(start, field.name)} there and {getattr(model, field.name)} here"
        for field in dataclasses.fields(model)
        if field.name not in free and getattr(start, field.name) != getattr(model, field.name)
    ]
    for name in PROJECTIONS:
        before, after = start.linear(name), model.linear(name)
        if before.rank and after.rank != before.rank:
            differences.append(f"{name} has rank {before.rank} there and {after.rank} here")
        if before.kind == after.kind == "block_sparse":
            if before.hadamard != after.hadamard:
                differences.append(
                    f"{name} has --set sparsity.hadamard={before.hadamard} there and "
                    f"{after.hadamard} here"
                )
            if before.block != after.block:
                differences.append(f"{name} has blocks of {before.block} there, {after.block} here")
            if start.num_layers == model.num_layers:
                differences += _denser(start, model, name)
    if differences:
        raise UserError(
            f"The weights to begin with do not fit: {'; '.join(differences)}. Give the values there"
            ", or other weights."
        )


def _denser(start, model, name):
    """Words for the first layer of one projection that is denser in `model` than in `start`."""
    uniform = not start.density_by_depth and not model.density_by_depth
    for layer in range(model.num_layers):
        before, after = (layer_linear(each, name, layer).density for each in (start, model))
        if before < after:
            where = name if uniform else f"{name} of layer {layer + 1}"
            return [f"{where} has density {before:g} there and {after:g} here"]
    return []
