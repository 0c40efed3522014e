"""Initial weights of a training: from another run, a Hugging Face directory or an export.

A projection that becomes sparser keeps the blocks whose loss the others make up for least, with
weights fitted to the dense outputs (`pruning.rebuild`), or its largest blocks, by the norm of their
weights or of their weights times activations. A projection that becomes denser computes the same
function; a larger model begins with it too (`growth`). The optimizer state is new.
"""

import dataclasses
import functools
import hashlib
import math
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.config import remat
from sparse_dataflow.core.config.attention_settings import EXPERT_TRAINING
from sparse_dataflow.core.config.layer_groups import layer_linear
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import MLP, PROJECTIONS
from sparse_dataflow.core.config.sparsity import SparsityConfig
from sparse_dataflow.core.config.training import CAUSAL, MASKED, TrainingConfig
from sparse_dataflow.core.executors.executor import SINGLE_DEVICE, Executor
from sparse_dataflow.core.layouts import model_layouts
from sparse_dataflow.core.layouts.model_layouts import expert_layout
from sparse_dataflow.core.model import adapters, gpt, partition, stacks
from sparse_dataflow.core.model.partition import trained_and_rest
from sparse_dataflow.core.optim.matrix_leaves import VOCABULARY
from sparse_dataflow.core.optim.optimizers import TrainState, make_optimizer
from sparse_dataflow.core.training import cost
from sparse_dataflow.core.training.transitions import change_model
from sparse_dataflow.core.weights.dense import Dense
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.evaluation import trained
from sparse_dataflow.evaluation.run_files import RunRecord, read_config
from sparse_dataflow.files import json_files, manifest
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import (
    extended_vocabulary,
    growth,
    hub_models,
    huggingface,
    pattern_pruning,
)
from sparse_dataflow.interchange.fetched_model import on_this_machine, origin
from sparse_dataflow.pruning import rebuild, run_start
from sparse_dataflow.runs import adapted_model
from sparse_dataflow.runs.run_config import (
    LONGEST_SEQUENCE,
    PRUNE_TO,
    SIZES,
    RunConfig,
    preset,
    supar,
)

SPARSE, DENSE = "sparse", "dense"


class StartingPoint(NamedTuple):
    """A model that provides initial weights.

    Attributes:
      params: parameter tree with layouts and masks, on the host; see `gpt`.
      tokenizer: tokenizer of the model; the new training uses it too.
      provenance: source, config and hash ("weights") of the model, as JSON values for run.json.
    """

    model: ModelConfig
    params: dict
    tokenizer: Tokenizer
    provenance: json_files.JsonObject

    @property
    def words(self) -> str:
        """Which model it is, such as "the sparse model of runs/A after step 100"."""
        source = self.provenance
        if "variant" not in source:
            return f"the model of {source['path']}"
        return f"the {source['variant']} model of {source['path']} after step {source['step']:,}"


def run_config(
    folder: str | Path,
    compute_dtype: str = "float32",
    larger: Mapping[str, Any] = types.MappingProxyType({}),
    variant: str = "",
    preferred: str = SPARSE,
) -> RunConfig:
    """Returns the config of a run that begins with the weights of a folder.

    The shape is that of the weights, the recipe that of the preset of nearest size. Block-sparse
    and masked weights bring their projections, pattern, block, densities, rank and transform. Those
    that have the blocks of a pattern of equal groups keep this pattern (`run.prune_to`).

    Args:
      folder: run folder or Hugging Face directory, or the address of one.
      compute_dtype: dtype of activations.
      larger: fields of GROWN in which the model is larger than the weights.
      variant: see `read`.
      preferred: see `read`.

    Raises:
      UserError: the folder has no model, or no `SparsityConfig` describes its weights.
    """
    start = read(str(folder), variant, preferred)
    model = start.model
    grouped = pattern_pruning.is_grouped(model, start.params)
    dense = dataclasses.replace(model, linears={}, density_by_depth=(), **larger)
    count = cost.parameter_count(dense)
    # Optimizer, rate and batch come from the preset of the nearest size, by the ratio: sizes are
    # spread over four orders of magnitude.
    sizes = {name: cost.parameter_count(size) for name, size in SIZES.items()}
    base = preset(min(sizes, key=lambda name: abs(math.log(sizes[name] / count))))
    base = supar(base) if model.supar else base
    shape = dataclasses.replace(
        dense, compute_dtype=compute_dtype, remat=remat.AUTO, bidirectional=False, seed=0
    )
    return dataclasses.replace(
        base,
        model=shape,
        sparsity=(
            _sparsity(model, shape.num_layers) if model.partial_projections else base.sparsity
        ),
        training=dataclasses.replace(
            base.training,
            sequence=min(shape.longest, LONGEST_SEQUENCE),
            objective=MASKED if model.bidirectional else CAUSAL,
        ),
        run=dataclasses.replace(
            base.run,
            init_from=str(folder),
            init_variant=variant,
            prune_to="pattern" if grouped else base.run.prune_to,
        ),
    )


def _sparsity(model: ModelConfig, num_layers: int) -> SparsityConfig:
    """Returns the config that gives the specs of a block-sparse or masked model to so many
    layers."""
    by_depth = growth.by_layer(model.density_by_depth, num_layers)
    specs = {name: model.linear(name) for name in model.partial_projections}
    first = next(iter(specs.values()))

    def shared(spec):
        fields = ["pattern", "rank", "hadamard", *["span"] * first.weight.has_mask]
        inputs, outputs = spec.block_sides
        return {n: getattr(spec, n) for n in fields} | {"block": f"{inputs}x{outputs}"}

    common = shared(first)
    for name, spec in specs.items():
        others = shared(spec)
        if others != common:
            raise UserError(
                f"The initial weights store {name} with {others} and {next(iter(specs))} with "
                f"{common}; legal: the same for all projections."
            )
    by_name = {name: spec.density for name, spec in specs.items() if spec.density != first.density}
    budget = "uniform"
    if by_name:
        budget = ",".join(f"{name}:{density!r}" for name, density in by_name.items())
    if by_depth:
        budget = "depth:" + ",".join(f"{number!r}x" for number in by_depth)
    if by_name and by_depth:
        raise UserError(
            "The densities of the initial weights differ by projection and by depth; legal: by "
            "one of them."
        )
    names = tuple(specs) if set(specs) != set(model.projections) else PROJECTIONS
    return SparsityConfig(projections=names, density=first.density, budget=budget, **common)


def read_for(config: RunConfig) -> StartingPoint:
    """Reads the weights that a run begins with; see `read`."""
    return read(config.run.init_from, config.run.init_variant, config.variants[0])


# The defaults, the checks and the training of one start each read it.
@functools.lru_cache(maxsize=1)
def read(folder: str, variant: str = "", preferred: str = SPARSE) -> StartingPoint:
    """Reads a Hugging Face directory, or the newest checkpoint of a run.

    Args:
      folder: folder, address, or name on the hub.
      variant: model of a run; "" for the preferred one if the run has it, else its first.
      preferred: "sparse" or "dense".

    Raises:
      UserError: the folder has no model or is damaged, or has no such variant.
    """
    local = on_this_machine(folder)
    _refuse_missing(local, folder)
    provenance: json_files.JsonObject = {"path": origin(folder, local)}
    if huggingface.is_directory(local):
        if variant:
            raise UserError(
                f"run.init_variant={variant} names a model of a run, and {folder} is a Hugging "
                "Face directory, which has one; leave it out."
            )
        model, params, tokenizer, digest, architecture = huggingface.read(local)
        provenance |= {"model": model.to_json(), "weights": digest, "architecture": architecture}
        return StartingPoint(model, params, tokenizer, provenance)
    names = read_config(local).variants
    if variant and variant not in names:
        raise UserError(
            f"run.init_variant={variant}: the run {folder} has no such model; legal: "
            f"{', '.join(names)}."
        )
    chosen = variant or (preferred if preferred in names else names[0])
    return _run_start(folder, chosen, trained.NEWEST)


def _run_start(folder, variant, checkpoint):
    local = on_this_machine(folder, checkpoint)
    run = load_run(local, variant, checkpoint)
    run.model.refuse_additions(f"run.init_from={folder}", "the weights that they were trained on")
    run.model.require(
        "init_from",
        f"run.init_from={folder}",
        "its dense export, by sparse-dataflow export --form=dense",
    )
    checkpoint_folder = run.folder / variant / "checkpoints" / str(run.step)
    manifest_bytes = json_files.read_bytes(checkpoint_folder / manifest.NAME)
    provenance = {
        "path": origin(folder, local),
        "model": run.model.to_json(),
        "variant": variant,
        "step": run.step,
        # The manifest has the hash of every file.
        "weights": hashlib.sha256(manifest_bytes).hexdigest(),
    }
    return StartingPoint(run.model, jax.device_get(run.params), run.tokenizer, provenance)


def with_vocabulary(start: StartingPoint, tokenizer: Tokenizer) -> StartingPoint:
    """Returns the weights with rows for the tokens that a tokenizer adds to theirs.

    A new row, also of an output layer of its own, is the mean of the rows of the old tokens that
    the new one joins.

    Args:
      tokenizer: see `extended_vocabulary.extended`.
    """
    old = start.tokenizer
    moved = tokenizer.ids_from_original[np.asarray(old.original_ids or range(old.vocab_size))]
    parts = extended_vocabulary.parts(old, tokenizer)

    def extended(rows):
        rows = np.asarray(rows)
        # Rows of no token, in front of the new ones, begin as the mean of all.
        result = np.empty((tokenizer.vocab_size, *rows.shape[1:]), rows.dtype)
        result[:] = rows.mean(0)
        result[moved] = rows
        for number, joined in enumerate(parts, len(old.tokens)):
            result[number] = rows[joined].mean(0)
        return result

    embed, head = start.params["embed"], start.params["head"]
    embed = {**embed, "tokens": extended(embed["tokens"])}
    head = {**head, **{n: extended(head[n]) for n in VOCABULARY if n in head}}
    model = dataclasses.replace(start.model, vocab_size=tokenizer.vocab_size)
    params = {**start.params, "embed": embed, "head": head}
    return start._replace(model=model, params=params, tokenizer=tokenizer)


def load_run(
    folder: str | Path, variant: str = "", checkpoint: str = trained.NEWEST
) -> trained.Model:
    """Loads a model from a run folder as `trained.load`; that of adapters with its frozen base.

    Raises:
      UserError: as `trained.load`, or the base is missing or has changed since the run began.
    """
    run = trained.load(folder, variant, checkpoint)
    if not run.training.freezes:
        return run
    base = read_base(run.saved_record, run.folder)
    wide = dataclasses.replace(run.model, compute_dtype="float32")
    frozen = adapters.frozen(wide, base.params, run.training.adapter_scale)
    model, params = adapters.dequantised(run.model, partition.merged(run.params, frozen))
    return dataclasses.replace(run, model=model, params=stacks.map_arrays(jnp.asarray, params))


def read_base(record: RunRecord, folder: str | Path) -> StartingPoint:
    """Reads the weights that a run of adapters freezes.

    Args:
      folder: of the run, for errors.

    Raises:
      UserError: the base is missing or damaged, or has changed since the run began.
    """
    return read_again(record.init_from or {}, folder, "train adapters of")


def read_again(source: Mapping[str, object], folder: str | Path, verb: str) -> StartingPoint:
    """Reads the weights that a run began to use.

    Args:
      source: their `provenance` in the run's record.
      folder: of the run, for errors.
      verb: what the run does with them, for errors.

    Raises:
      UserError: they are missing or damaged, or have changed since the run began.
    """
    try:
        path, variant, step = str(source["path"]), source.get("variant"), source.get("step")
        if variant is None:
            base = read(path)
        else:
            base = _run_start(path, str(variant), str(step))
    except (KeyError, UserError) as error:
        raise UserError(
            f"{folder} began to {verb} weights that cannot be read: {error} Put those weights back "
            "as they were."
        ) from None
    if base.provenance["weights"] != source.get("weights"):
        raise UserError(
            f"The weights in {path} have changed since {folder} began to {verb} them "
            f"(sha256 {base.provenance['weights'][:12]} there, {str(source.get('weights'))[:12]} "
            "in its run.json). Put them back as they were, or start a new run."
        )
    return base


def _refuse_missing(local, place):
    if not (local / huggingface.CONFIG).exists():
        raise UserError(
            f"{place} is neither a run folder nor a Hugging Face directory: it has no "
            f"{huggingface.CONFIG}. Legal: a folder on this machine, an address such as "
            f"gs://BUCKET/MODEL, or {hub_models.LEGAL}."
        )


def initial_state_from(
    start: StartingPoint,
    model: ModelConfig,
    training: TrainingConfig,
    executor: Executor = SINGLE_DEVICE,
    calibration: Sequence[np.ndarray] = (),
    prune_by: str = "weights",
    prune_to: str = PRUNE_TO[0],
) -> TrainState:
    """Returns the training state at step 0 of `model`, with the weights of `start`.

    Args:
      model: config of the new model.
      training: gives the optimizer and the seed.
      executor: places the state.
      calibration: int32 [B, T] token batches, which `prune_by` "rebuild" reads.
      prune_by: as in `RunSettings`.  Weights with a low-rank term, and models with block-sparse
        experts, are pruned by "weights" in place of "rebuild".
      prune_to: as in `RunSettings`.

    Raises:
      UserError: the weights of `start` do not fit `model`.
    """
    step, key = jnp.zeros((), jnp.int32), jax.random.key(training.seed)
    larger, params = growth.grown(start.model, start.params, model, key)
    start = start._replace(model=larger, params=params)
    _refuse_mismatch(start.model, model)
    model_layouts.check_layouts(model)
    rebuilding = prune_by == "rebuild" and rebuild.prunes(start.model, model)
    rebuilding = rebuilding and rebuild.is_possible(start.model)
    params, rest = trained_and_rest(start.model, stacks.map_arrays(jnp.array, start.params))
    state = TrainState(step, params, (), key, rest)
    if prune_to == "pattern" and model.sparse_projections:
        pattern_pruning.refuse(start.model, start.params, model)
        refit = functools.partial(_refitted, batches=calibration) if rebuilding else None
        state = pattern_pruning.to_pattern(state, start.model, model, refit)
    elif rebuilding:
        dense, params, layouts = run_start.to_blocks(start.model, start.params, model, calibration)
        state = state._replace(params=jax.tree.map(jnp.array, params), rest=())
        state = change_model(state, dense, model, given=layouts)
    else:
        state = change_model(state, start.model, model)
    moments = jax.jit(make_optimizer(model, training).init)(state.params)
    return executor.place(state._replace(moments=moments), model)


def _refitted(old, params, new, layouts, batches):
    """Returns dense params that are fitted on the blocks of layouts."""
    return run_start.to_blocks(old, params, new, batches, layouts)[1]


def adapter_state_from(
    start: StartingPoint,
    model: ModelConfig,
    training: TrainingConfig,
    executor: Executor = SINGLE_DEVICE,
) -> TrainState:
    """Returns the training state at step 0 of adapters on the weights of `start`.

    Args:
      start: the weights, which are frozen.
      training: gives the adapters, the optimizer and the seed.
      executor: places the state.

    Raises:
      UserError: the weights of `start` are not those of `model` without its adapters.
    """
    refuse_other_base(start, model)
    params = jax.jit(lambda key: trained_and_rest(model, gpt.init(model, key), 1.0)[0])(
        jax.random.key(training.seed)
    )
    if model.prompt_vectors:  # They begin as embeddings of random tokens (arXiv 2104.08691).
        rng = np.random.default_rng(training.seed)
        rows = rng.integers(0, model.vocab_size, model.prompt_vectors)
        vectors = jnp.asarray(start.params["embed"]["tokens"], jnp.float32)[rows]
        params = {**params, "embed": {adapters.PROMPT: vectors}}
    step, key = jnp.zeros((), jnp.int32), jax.random.key(training.seed)
    moments = jax.jit(make_optimizer(model, training).init)(params)
    base = frozen_base(start, model, training)
    return executor.place(TrainState(step, params, moments, key, base), model)


def frozen_base(start: StartingPoint, model: ModelConfig, training: TrainingConfig) -> dict:
    """Returns `TrainState.rest` of adapters on the weights of `start`, canonical."""
    frozen = adapters.frozen(model, start.params, training.adapter_scale)
    return stacks.map_arrays(jnp.array, frozen)


def refuse_other_base(start: StartingPoint, model: ModelConfig) -> None:
    """Raises UserError unless `model` is the model of `start` with adapters."""
    base = adapted_model.without_adapters(model)
    _refuse_mismatch(start.model, base)
    for name in base.projections:
        for layer in range(base.num_layers):
            before, after = (layer_linear(m, name, layer) for m in (start.model, base))
            stored = [(spec.weight, spec.density, spec.block) for spec in (before, after)]
            if stored[0] != stored[1]:
                raise UserError(
                    f"Adapters freeze the weights of run.init_from as they are, and {name} is "
                    f"{_stored_words(before)} there and {_stored_words(after)} in this run; legal: "
                    "sparse-dataflow gpt13b_dense for dense weights, sparse-dataflow train with "
                    "its settings for block-sparse ones."
                )


def _stored_words(spec):
    words = spec.weight.words.removesuffix(" weights")
    if not spec.weight.stores_blocks:
        return f"{words} at density {spec.density:g}" if spec.weight.is_partial else words
    mixed = f", hadamard {spec.hadamard}" if spec.hadamard else ""
    return f"block-sparse at density {spec.density:g} (block {spec.block}, {spec.pattern}{mixed})"


def refuse_other_model(start: ModelConfig, model: ModelConfig) -> None:
    """Refuses weights that `initial_state_from` would refuse, before any work.

    Raises:
      UserError: names each difference that stops `model` from using weights of `start`.
    """
    _refuse_mismatch(growth.grown_config(start, model), model)


def _refuse_mismatch(start: ModelConfig, model: ModelConfig) -> None:
    """Raises UserError with each difference that stops `model` from using weights of `start`."""
    may_differ = ("linears", "density_by_depth", "remat", "compute_dtype", "precision", "seed",
                  *EXPERT_TRAINING)  # fmt: skip
    differences = [
        _difference(field.name, getattr(start, field.name), getattr(model, field.name))
        for field in dataclasses.fields(model)
        if field.name not in may_differ and getattr(start, field.name) != getattr(model, field.name)
    ]
    for name in model.projections:
        before, after = start.linear(name), model.linear(name)
        if start.experts and model.experts and name in MLP:
            differences += _other_experts(start, model, name)
            continue
        if before.rank and after.rank != before.rank:
            differences.append(_difference(f"{name}: rank", before.rank, after.rank))
        if before.weight.has_mask != after.weight.has_mask and Dense not in (
            before.weight,
            after.weight,
        ):
            differences.append(_difference(name, before.weight.words, after.weight.words))
        if before.weight.is_partial and after.weight.is_partial:
            if before.hadamard != after.hadamard:
                setting = f"{name}: --set sparsity.hadamard"
                differences.append(_difference(setting, before.hadamard, after.hadamard))
        if before.weight.stores_blocks and after.weight.stores_blocks:
            if before.block != after.block:
                differences.append(_difference(f"{name}: block size", before.block, after.block))
            # A line of the stored layout may fill its tables, and narrower ones cannot hold it.
            if before.max_fan_out > after.max_fan_out and before.density == after.density:
                setting = f"{name}: evolution.max_fan_out"
                differences.append(_difference(setting, before.max_fan_out, after.max_fan_out))
        if before.weight.has_mask and after.weight.has_mask:
            sides = ["x".join(map(str, spec.block_sides)) for spec in (before, after)]
            for setting, *values in (("block", *sides), ("span", before.span, after.span)):
                if values[0] != values[1]:
                    differences.append(_difference(f"{name}: sparsity.{setting}", *values))
        if before.weight.is_partial and after.weight is before.weight:
            if start.num_layers == model.num_layers:
                differences += _first_denser_layer(start, model, name)
    if differences:
        raise UserError(
            f"The initial weights do not fit this run: {'; '.join(differences)}. Use the values of "
            "the initial weights, or other weights."
        )


def _other_experts(start, model, name):
    """Returns a list with the difference of the experts' storage, which no conversion changes."""
    before, after = start.linear(name), model.linear(name)
    stored = [(spec.weight, spec.density, spec.block, spec.hadamard) for spec in (before, after)]
    if before.weight is after.weight is Dense:
        return []
    if stored[0] == stored[1]:
        old, new = (expert_layout(config, name).mask for config in (start, model))
        if np.array_equal(old, new):
            return []
    return [_difference(f"{name} of the experts", _stored_words(before), _stored_words(after))]


def _difference(setting, before, after):
    if setting == "bidirectional":
        setting = "training.objective"
        before, after = (MASKED if value else CAUSAL for value in (before, after))
    return f"{setting} is {before} in the initial weights and {after} in this run"


def _first_denser_layer(start, model, name):
    """Returns a list with the first layer whose projection is denser in `model`, or an empty
    list."""
    uniform = not start.density_by_depth and not model.density_by_depth
    for layer in range(model.num_layers):
        before, after = (layer_linear(m, name, layer).density for m in (start, model))
        if before < after:
            place = name if uniform else f"{name} of layer {layer + 1}"
            return [_difference(f"{place}: density", f"{before:g}", f"{after:g}")]
    return []
