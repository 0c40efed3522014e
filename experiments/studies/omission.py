"""The trainings of omit_features, all arms at the FLOPs of the full one."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.cluster.processes import stopped_status
from sparse_dataflow.cluster.signals import stop_on_signals
from sparse_dataflow.commands import measurement
from sparse_dataflow.commands.request import Request
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.training.phases import Variant, refuse_unfit, run_flops
from sparse_dataflow.core.training.step import initial_state
from sparse_dataflow.files.folders import FolderLock
from sparse_dataflow.files.output import markdown

from . import study
from .study import Study

OWNER, FULL, FIRST = "omit_features", "full", "first"
VARIED = ("evolution.", "sparsity.")
"""What arms set, as `study.prepare` takes it."""


def run(request: Request, options) -> int:
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
    with FolderLock(folder), stop_on_signals(say) as stop:
        results = _train_all(base, options, folder, stop)
    if results is None:
        say("stopped; the same command goes on")
        return stopped_status(stop())
    result = {"settings": base.config.to_json(), "results": results}
    measurement.keep(str(folder), "omission", base.chip.name, [result])
    (folder / "omission.md").write_text(table(results))
    say(table(results))
    return 0


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


def _train_all(base, options, folder, stop):
    """Trains what has no result; returns all results, or None if `stop()` ended it."""
    results: list[dict] = []
    compiled: dict = {}

    def trained(name, seed, variant, start=None):
        where = folder / name / f"seed_{seed}"
        result = study.read_result(where)
        if result is None:
            data = base.data(variant)
            label = f"{name}, seed {seed}"
            result = study.train(label, variant, data, where, stop, compiled=compiled, start=start)
        if result is not None:
            results.append({"arm": name, "seed": seed, **result})
        return result

    for seed in range(options.seeds):
        first = _first(base, options, seed)
        if trained(FIRST, seed, first) is None:
            return None
        tokenizer = base.tokenizer.content_hash
        weights = study.trained(first, tokenizer, folder / FIRST / f"seed_{seed}").params
        for arm in options.arms:
            variant = continued(base, arm, options, seed)

            def start(variant=variant, weights=weights):
                state = initial_state(variant.model, variant.training)
                return state._replace(params=jax.tree.map(jnp.asarray, weights))

            if trained(arm, seed, variant, start) is None:
                return None
    return results


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
            to_full = f"{np.mean(pairs):+.2%}"
            if len(pairs) > 1:
                to_full += f" ± {np.std(pairs, ddof=1) / len(pairs) ** 0.5:.2%}"
        values = list(bits.values())
        return (
            arm,
            f"{np.mean(values):.4f}",
            f"{(max(values) - min(values)) / 2:.4f}",
            to_full,
            f"{np.mean([r['steps'] for r in mine]):.0f}",
            f"{np.mean([r['flops'] for r in mine]):.3g}",
        )

    heads = ["training", "bits per byte", "half the range", "to full", "steps", "FLOPs"]
    return markdown(heads, [row(arm) for arm in arms])
