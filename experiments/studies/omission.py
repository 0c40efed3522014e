"""The trainings of omit_features, all arms at the FLOPs of the full one."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.commands import measurement
from sparse_dataflow.commands.request import Request
from sparse_dataflow.core import sums
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.training.phases import Variant, refuse_unfit, run_flops
from sparse_dataflow.core.training.step import initial_state
from sparse_dataflow.files.output import markdown

from . import engine, study
from .study import Study

OWNER, FULL, FIRST = "omit_features", "full", "first"
VARIED = ("evolution.", "sparsity.")
"""What arms set, as `study.prepare` takes it."""


def study_omission(request: Request, options) -> int:
    """Trains every arm and seed; returns the exit status.

    Args:
      request: the config that arms change.
      options: of `experiments.omit_features`.

    Raises:
      UserError: before the first step where it can be known then.
    """
    folder = Path(options.out)
    fixed = {"training.steps": options.steps, "sparsity.projections": ()}
    base = study.prepare(request, VARIED, fixed)
    study.keep_settings(folder, base.config, OWNER)
    for arm in options.arms:
        variant = continued(base, arm, options, 0)
        refuse_unfit(variant.model, variant.evolution, variant.training.steps)

    def body(stop):
        runs = _known_runs(base, options, folder, stop)
        results = engine.train_all(folder, lambda _: runs)
        if results is not None:
            _write(base, [{**run.record, **results[run.name]} for run in runs], folder)
        return results is not None

    return engine.resumable(folder, body)


def _write(base, results, folder):
    result = {"settings": base.config.to_json(), "results": results}
    measurement.keep(str(folder), "omission", base.chip.name, [result])
    (folder / "omission.md").write_text(table(results))
    say(table(results))


def continued(base: Study, arm: str, options, seed: int) -> Variant:
    """Returns the training of an arm, with as many steps as the FLOPs of the full arm pay for."""
    first = _first(base, options, seed)
    training = dataclasses.replace(
        first.training,
        steps=options.more,
        learning_rate=options.rate * first.training.learning_rate,
        seed=options.seeds + seed,  # Another order of the data.
    )
    full = dataclasses.replace(first, training=training)
    if arm == FULL:
        return full
    evolution = EvolutionConfig("omit_features", omitted=options.omitted, features=arm)
    budget = run_flops(full.model, full.evolution, full.training)
    steps = options.more
    for _ in range(4):  # Measurements of activations do not grow with the steps.
        variant = dataclasses.replace(full, evolution=evolution).with_steps(steps)
        flops = run_flops(variant.model, evolution, variant.training)
        steps = round(steps * budget / flops)
    return variant


def _first(base, options, seed):
    """Returns the training that all arms of a seed continue; one model for all seeds."""
    variant = base.variant("dense")
    return dataclasses.replace(
        variant, training=dataclasses.replace(variant.training, seed=seed)
    ).with_steps(options.steps)


def _known_runs(base, options, folder, stop):
    """Returns the first training of each seed, and the arms that continue it."""

    def run(name, seed, variant, start=None):
        def train(where, compiled):
            data = base.data(variant)
            label = f"{name}, seed {seed}"
            return study.train(label, variant, data, where, stop, compiled=compiled, start=start)

        return engine.Run(f"{name}/seed_{seed}", train, {"arm": name, "seed": seed}, OWNER)

    runs = []
    for seed in range(options.seeds):
        first = _first(base, options, seed)

        def start(variant, first=first, seed=seed):
            tokenizer = base.tokenizer.content_hash
            weights = study.trained(first, tokenizer, folder / FIRST / f"seed_{seed}").params
            state = initial_state(variant.model, variant.training)
            return state._replace(params=jax.tree.map(jnp.asarray, weights))

        runs.append(run(FIRST, seed, first))
        for arm in options.arms:
            variant = continued(base, arm, options, seed)
            runs.append(run(arm, seed, variant, functools.partial(start, variant)))
    return runs


def table(results: list[dict]) -> str:
    """Returns a Markdown table of the arms, by their held-out bits per byte.

    The difference to full training is paired by seed, with its standard error.
    """
    arms: dict[str, list[dict]] = {}
    for result in results:
        arms.setdefault(result["arm"], []).append(result)

    def row(arm):
        mine = arms[arm]
        bits = {r["seed"]: r["bits_per_byte"] for r in mine}
        full = {r["seed"]: r["bits_per_byte"] for r in arms.get(FULL, ())}
        pairs = [bits[seed] / full[seed] - 1 for seed in bits if seed in full]
        to_full = "-"
        if arm not in (FIRST, FULL) and pairs:
            to_full = f"{np.mean(pairs):+.2%}{sums.error_text(pairs, '.2%')}"
        values = list(bits.values())
        return (
            arm,
            f"{np.mean(values):.4f}",
            sums.half_range_text(values),
            to_full,
            f"{np.mean([r['steps'] for r in mine]):.0f}",
            f"{np.mean([r['flops'] for r in mine]):.3g}",
        )

    heads = ["training", "bits per byte", "half the range", "to full", "steps", "FLOPs"]
    return markdown(heads, [row(arm) for arm in arms])
