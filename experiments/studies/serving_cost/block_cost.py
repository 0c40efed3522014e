"""What blocks of weights cost in trained models of several widths; see `experiments.block_cost`."""

import functools
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.commands.measurement import provenance
from sparse_dataflow.core import sums
from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.checkpoint.named_arrays import flatten
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model import gpt
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.detect import cpu_name
from sparse_dataflow.pruning import rebuild, second_order
from sparse_dataflow.pruning.groups import Groups
from sparse_dataflow.pruning.layer_by_layer import HeldLayers
from sparse_dataflow.pruning.projection import Target
from sparse_dataflow.pruning.stored import InMemory, smaller_layer

from . import runs, study, text, training
from .arms import Arm
from .block_report import NARROW, place_of, report

TESTED = 4096
"""Held-out sequences of a loss."""
BATCHES = 8
RECOVERY_RATES = (0.1, 0.3, 1.0)
"""Learning rates of a recovery that are tried, relative to the dense training's."""
SETTINGS = (
    "sequences", "length", "learning_rate", "vector_rate", "layers", "vocabulary", "sequence",
    "corpus",
)  # fmt: skip
"""Options that all runs of a folder share."""


def dense_model(options, width: int) -> ModelConfig:
    """Returns the dense model of a width; its heads are about 14 features wide."""
    return study.model_of(options, width, 2 ** round(math.log2(width / 14)), 4 * width)


def recipe_of(options, width: int, share: float = 1.0) -> training.Recipe:
    """Returns how the model of a width is trained, at a share of its learning rate."""
    rate = share * options.learning_rate * math.sqrt(48 / width)
    batch = 32 * width // 48
    return training.Recipe("muon", rate, options.vector_rate, "linear", study.WARMUP, batch)


def steps_of(options, width: int) -> int:
    """Returns the steps of the training of a width."""
    model, batch = dense_model(options, width), recipe_of(options, width).batch
    return study.narrow_steps(model, options.length, batch)


def trained(options, width: int, corpus: text.Text) -> tuple[ModelConfig, dict]:
    """Returns the trained dense model of a width; trains it if the folder does not have it."""
    model, path = dense_model(options, width), Path(options.models) / f"width_{width}.npz"
    if not path.exists():
        recipe, steps = recipe_of(options, width), steps_of(options, width)
        _, params = training.train(model, Arm(), recipe, steps, 0, corpus)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, **flatten(jax.device_get(params)))
    shapes = jax.eval_shape(lambda: gpt.init(model, jax.random.key(0)))
    with np.load(path, allow_pickle=False) as arrays:
        leaves = [arrays[name] for name in flatten(shapes)]
    return model, jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def target_of(shape: tuple[int, int], block: str, density: float, rounds: int = 1) -> Target:
    """Returns what is left of a projection [in, out], chosen in some rounds.

    Raises:
      UserError: it has no such blocks or density.
    """
    groups = Groups.parse(block)
    if not groups.is_square:
        return Target(groups, groups.count(shape, density), rounds)
    degree = density * math.gcd(*groups.grid(shape))
    if degree != round(degree):
        raise UserError(f"Blocks of {groups} have no equal fan-in and fan-out at {density:g}.")
    return Target.balanced(shape, groups.rows, density, rounds)


class PrunedModel(NamedTuple):
    """A pruned model, before any recovery.

    Attributes:
      model: its config, with dense weights.
      params: of the model, zero where weights went.
      masks: like the params, of the weights that stay; a scalar 1 for what is dense.
    """

    model: ModelConfig
    params: dict
    masks: dict


def pruned_model(
    model: ModelConfig,
    params: dict,
    batches: Sequence,
    block: str,
    density: float,
    rounds: int = 1,
) -> PrunedModel:
    """Returns a model with a fraction of its weights, or the narrow one of as many."""
    if block == NARROW:
        narrow, targets = rebuild.narrow_targets(model, density, rounds)
        memory, layers = InMemory(narrow), HeldLayers(params)
        for layer in rebuild.rebuilt_layers(model, layers, batches, targets):
            memory.put(layer, smaller_layer(model, layer))
        params = memory.params(layers.ends())
        return PrunedModel(narrow, params, _all_stay(params))
    chosen = {
        name: target_of(model.projection_shape(name), block, density, rounds)
        for name in model.projections
    }
    targets = {name: functools.partial(_same, target) for name, target in chosen.items()}
    result = rebuild.rebuilt(model, params, batches, targets)
    masks = _all_stay(result.params)
    for name, each in result.masks.items():
        stay = [second_order.expanded(mask, chosen[name].groups) for mask in each]
        masks["blocks"][name]["kernel"] = jnp.asarray(np.stack(stay), jnp.float32)
    return PrunedModel(model, result.params, masks)


def _all_stay(params):
    return jax.tree.map(lambda leaf: jnp.ones((), jnp.float32), params)


def recovered_loss(
    options, dense: tuple[ModelConfig, object], pruned: PrunedModel, share: float,
    corpus: text.Text, sample: int,
) -> dict[str, float]:  # fmt: skip
    """Returns the loss after a recovery with the dense model as teacher, and its learning rate.

    The rate is the one of `RECOVERY_RATES` with the least loss on the tuning documents.

    Args:
      share: of the steps of the dense training.
    """
    width = dense[0].d_model
    steps = max(1, round(share * steps_of(options, width)))

    def losses(rate):
        recipe = recipe_of(options, width, rate)
        return training.recover(*pruned, dense, recipe, steps, sample, corpus)

    trials = {rate: losses(rate) for rate in RECOVERY_RATES}
    best = min(trials, key=lambda rate: trials[rate]["tuning"])
    return {"loss": trials[best]["held_out"], "rate": best}


def _same(target, layer):
    """Returns the target of every layer."""
    return target


def loss(model: ModelConfig, params: object, windows: np.ndarray) -> float:
    """Returns the mean loss on int32 [windows, length + 1], in bits a symbol."""
    groups = [each for each in np.array_split(windows, 8) if len(each)]
    losses = [
        whole.loss(
            model,
            weights_of(model, params),
            Batch.from_windows(jnp.asarray(each), jnp.ones(each[:, 1:].shape)),
        )
        for each in groups
    ]
    mean = sums.mean([float(loss) for loss in losses], [each[:, 1:].size for each in groups])
    return mean.value / math.log(2)


def measure_block_cost(options) -> int:
    """Trains and prunes what is left, then reports; see the experiment.

    Raises:
      UserError: a shape is no block, or the folder has runs of other settings.
    """
    for shape in (*options.shapes, options.held_out):
        Groups.parse(shape)
    folder, corpus = Path(options.out), text.read(options.corpus, options.vocabulary)
    lines = runs.read_lines(folder, {name: getattr(options, name) for name in SETTINGS})
    measured = {place_of(line) for line in lines}
    machine = cpu_name()
    tested = corpus.windows("held_out", options.sequence, TESTED)
    for width in options.widths:
        cells = itertools.product(
            range(options.samples), options.densities, (NARROW, *options.shapes), options.rounds
        )
        left = {
            (sample, density, shape, rounds): shares
            for sample, density, shape, rounds in cells
            if (shares := [
                share for share in options.recover
                if (width, shape, density, sample, share, rounds) not in measured
            ])
        }  # fmt: skip
        if not left:
            continue
        model, params = trained(options, width, corpus)
        dense = loss(model, params, tested)
        for (sample, density, shape, rounds), shares in left.items():
            rng = np.random.default_rng(sample)
            tokens = corpus.batches(rng, 1, options.sequences, options.sequence)[0, :, :-1]
            batches = np.array_split(tokens, BATCHES)
            try:
                pruned = pruned_model(model, params, batches, shape, density, rounds)
            except UserError as error:
                print(f"{runs.now()} width {width}, {shape} at {density:g}: none: {error}")
                continue
            for share in shares:
                if share:
                    result = recovered_loss(options, (model, params), pruned, share, corpus, sample)
                else:
                    result = {"loss": loss(pruned.model, pruned.params, tested)}
                line = {
                    "width": width, "shape": shape, "density": density, "sample": sample,
                    "recovery": share, "rounds": rounds, **result, "dense": dense,
                    **provenance(machine),
                }  # fmt: skip
                with (folder / runs.LINES).open("a") as file:
                    file.write(json.dumps(line) + "\n")
                lines.append(line)
                print(
                    f"{runs.now()} width {width}, {shape} at {density:g}, sample {sample}, "
                    f"rounds {rounds}, recovery {share:g}: {result['loss']:.4f}, dense {dense:.4f}",
                    flush=True,
                )  # fmt: skip
    report(folder, lines, options.held_out)
    return 0
