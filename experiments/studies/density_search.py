"""The sensitivities of density_search, and the trainings that check its choices."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sparse_dataflow.commands import measurement
from sparse_dataflow.commands.preflight.executor_plan import plan_of
from sparse_dataflow.commands.request import Request
from sparse_dataflow.core import sums
from sparse_dataflow.core.executors.executor import SINGLE_DEVICE
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.training import cost
from sparse_dataflow.core.training.phases import Variant
from sparse_dataflow.core.training.programs import EvalBatches, TrainingData
from sparse_dataflow.core.training.step import make_eval_step
from sparse_dataflow.evaluation.activation_sparsity import with_thresholds
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files import folders
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.output import markdown
from sparse_dataflow.hardware import chips
from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.planner.efficiency import for_family
from sparse_dataflow.planner.step_time import step_time
from sparse_dataflow.pruning.layer_by_layer import HeldLayers, as_params, pruned_layers
from sparse_dataflow.pruning.projection import Target, prune
from sparse_dataflow.runs.allocation import has_layout

from . import engine, memory_check, study
from .density_choice import EQUAL, FIRST, Choice, Rises, compared, profiles, ranked
from .study import HELD_OUT, TUNING, Study

OWNER = "density_search"
VARIED = (
    *("evolution.", "sparsity.density", "sparsity.budget", "sparsity.rank", "sparsity.hadamard"),
    "sparsity.span",
)
"""What choices set, as `study.prepare` takes it, and what pruning alone does not have."""

MOST_THIRDS = 3
WINDOWS, BATCHES = 512, 8
"""Tuning windows of a measurement, and training batches that weights are fitted to."""

WITHIN = 0.01
"""Distance to the best of the trained choices up to which the first one counts as found."""


def search_densities(request: Request, options: Any) -> int:
    """Measures and chooses, and trains what --train says; returns the exit status.

    Raises:
      UserError: before the first step where it can be known then.
    """
    folder = Path(options.out)
    folders.refuse_foreign(folder, OWNER)
    this_chip = options.hardware == "this"
    chip = chips.lookup(options.hardware) if options.hardware and not this_chip else None
    base = study.prepare(request, VARIED, {"training.steps": options.train_steps}, tuned=True)
    base.config.model.refuse_experts("A choice of densities", "equal densities")
    space = Space(base, options, base.chip if this_chip else chip)
    dense = base.variant("dense").with_steps(options.steps)
    memory_check.refuse_too_large(base.config, [dense], base.chip.memory_bytes)
    study.keep_settings(folder, base.config, OWNER)
    body = functools.partial(_search, base, space, dense, options, folder)
    return engine.resumable(folder, body)


def _search(base, space, dense, options, folder, stop) -> bool:
    """Returns whether everything was measured and trained before `stop()`."""
    where = folder / f"dense_{options.steps}"
    data = base.split_data(dense, TUNING, WINDOWS)
    if not study.read_result(where) and not study.train("dense", dense, data, where, stop):
        return False
    measure = Measurement(base, dense, data, where)
    rises = measure.all_pruned(space, stop)
    if rises is None:
        return False
    chosen = {d: compared(space.ranked(rises, d), d) for d in options.budgets}
    pages = [rises_table(rises, "density"), *(choices_table(d, c) for d, c in chosen.items())]
    result: dict[str, object] = {
        "settings": base.config.to_json(),
        "rises": _records(rises),
        "choices": {
            density: {name: {**vars(c), "budget": c.budget} for name, c in each.items()}
            for density, each in chosen.items()
        },
    }
    if options.zeros:
        held_out = base.split_data(dense, HELD_OUT, WINDOWS).validation
        zeros, table, result["zero_choices"] = measure.zeros(options, held_out)
        result["zeros"] = _records(zeros)
        pages += [rises_table(zeros, "density of the inputs"), table]
    _keep(folder, base, result, pages)
    if options.train:
        runs = _known_runs(base, chosen, options.train, stop)
        results = engine.train_all(folder, lambda _: runs)
        if results is None:
            return False
        trained = [{**run.record, **results[run.name]} for run in runs]
        _keep(folder, base, result | {"trained": trained}, [*pages, trained_table(trained)])
    return True


def _records(rises):
    return [{"projection": n, "part": part, "rises": each} for (n, part), each in rises.items()]


def _keep(folder, base, result, pages):
    measurement.keep(str(folder), OWNER, base.chip.name, [result])
    text = "\n\n".join(pages) + "\n"
    (folder / f"{OWNER}.md").write_text(text)
    say(text)


class Space:
    """The densities to choose from, and what they cost.

    Attributes:
      densities: ascending, those of the budgets too.
      costs: projection -> density -> forward FLOPs of a token, or seconds of a step on a chip.
      thirds: layers of each part of the depth.
      block: side of a block.
    """

    def __init__(self, base: Study, options: Any, chip: Chip | None):
        """Prices each density.

        Args:
          options: of `experiments.density_search`.
          chip: whose seconds by the planner are the cost; None for FLOPs.

        Raises:
          UserError: a projection has no layout of a density, there are too many choices, or the
            chip has no known rates.
        """
        self.densities = sorted({*options.densities, *options.budgets})
        self.costs: dict[str, dict[float, float]] = {}
        for density in self.densities:
            variant = base.variant("sparse", sparsity__density=density)
            for name, price in _prices(variant, chip).items():
                self.costs.setdefault(name, {})[density] = price
        self._model = variant.model
        if not self.costs:
            raise UserError(
                f"--pattern={base.config.sparsity.pattern} stores no blocks; legal: one that does."
            )
        self.block = self._model.linear(next(iter(self.costs))).block
        layers = self._model.num_layers
        count = max(n for n in range(1, MOST_THIRDS + 1) if layers % n == 0)
        self.thirds = [range(p * layers // count, (p + 1) * layers // count) for p in range(count)]
        self._depths = profiles(count, options.depth)
        self._legal = functools.cache(
            lambda name, density: (
                self.densities[0] <= density and has_layout(self._model, name, density)
            )
        )
        for density in options.budgets:
            self.ranked({key: {} for key in self.keys}, density)

    @property
    def keys(self) -> list[tuple[str, int]]:
        """Each projection in each part of the depth."""
        return list(itertools.product(self.costs, range(len(self.thirds))))

    def ranked(self, rises: Rises, density: float) -> list[Choice]:
        """Returns the choices that cost what equal density costs, the best first."""
        budget = sum(prices[density] for prices in self.costs.values())
        return ranked(rises, self.costs, budget, self._depths, self._legal)


def _prices(variant: Variant, chip: Chip | None) -> dict[str, float]:
    """Returns the cost of each block-sparse projection."""
    model, training = variant.model, variant.training
    prices: Mapping[str, Any] = cost.flops_per_token(
        model, training.sequence, training=False
    ).sections
    if chip:
        plan = plan_of(model, training, SINGLE_DEVICE, "none", chip)
        plan = dataclasses.replace(plan, optimizer="adamw")  # Not of the projections.
        prices = step_time(model, training.sequence, plan, chip, for_family(chip.family)).terms
    return {
        name: float(prices[name]) for name in model.projections if name in model.sparse_projections
    }


class Measurement:
    """Rises of the loss of a trained dense model, in nats a token, on tuning documents."""

    def __init__(self, base: Study, dense: Variant, data: TrainingData, where: Path):
        """Loads the model.

        Args:
          dense: that was trained in `where`.
          data: its batches, evaluated on tuning documents.
        """
        teacher = study.trained(dense, base.tokenizer.content_hash, where)
        self.model = Model(
            where, "dense", teacher.model, teacher.params, base.tokenizer,
            dense.training.steps, dense.training, None, {},
        )  # fmt: skip
        self._batches = [data.train[step].tokens for step in range(BATCHES)]
        self._eval = jax.jit(make_eval_step(teacher.model))
        self._windows = data.validation
        self._whole = self.loss(teacher.params, data.validation)
        self._folder = where / "rises"
        self._folder.mkdir(exist_ok=True)
        self._saved = study.read_result(self._folder) or {}

    def _once(self, key: str, loss: Callable[[], float]) -> float:
        """Returns the rise to a loss, measured once for the folder."""
        if key not in self._saved:
            self._saved[key] = loss() - self._whole
            study.keep_result(self._folder, self._saved)
        return self._saved[key]

    def loss(self, params: object, windows: EvalBatches) -> float:
        """Returns the loss of parameters, in nats a token."""
        params = jax.device_put(params)
        total = sum(self._eval(params, (), batch)["loss"].number() for batch in windows)
        return total / windows.total_tokens

    def all_pruned(self, space: Space, stop: Any) -> dict[tuple[str, int], dict] | None:
        """Returns the rises with each projection in each part of the depth pruned alone.

        Args:
          stop: () -> whether to end, and return None.
        """
        rises = {}
        for name, third in space.keys:
            if stop():
                return None
            rises[name, third] = {
                density: self._once(
                    f"{name}, part {third + 1}, density {density:g}",
                    functools.partial(self.pruned, name, space.thirds[third], density, space.block),
                )
                for density in space.densities
                if density < 1
            }
            values = ", ".join(f"{d:g} {rise:+.4f}" for d, rise in rises[name, third].items())
            say(f"{name}, part {third + 1} of {len(space.thirds)}: {values}")
        return rises

    def pruned(self, name: str, layers: range, density: float, block: int) -> float:
        """Returns the loss with a projection of some layers alone at a density."""
        config = self.model.model
        target = Target.balanced(config.projection_shape(name), block, density, 1)

        def kernel(site):
            if site.layer not in layers:
                return site.kernel
            return prune(site.fit, site.held_out, site.kernel, target).kernel

        weights = HeldLayers(self.model.params)
        pairs = pruned_layers(config, weights, self._batches, (name,), kernel)
        blocks = as_params((layer for _, layer in pairs), config.num_layers)
        return self.loss({**self.model.params, "blocks": blocks}, self._windows)

    def zeros(self, options: Any, held_out: EvalBatches) -> tuple[dict, str, list[dict]]:
        """Chooses the share of zeros of each projection's inputs.

        Returns:
          The rises by the density of the inputs, a table of the choices, and their records.
        """
        config, params = self.model.model, self.model.params
        flops = cost.flops_per_token(config, self.model.context, training=False).sections
        inputs = sorted({1.0, *(1 - share for share in (*options.zeros, *options.zero_budgets))})
        costs = {name: {d: flops[name] * d for d in inputs} for name in config.projections}
        rises = {
            (name, 0): {
                density: self._once(
                    f"{name}, zeros {1 - density:g}",
                    functools.partial(self._zeroed, {name: 1 - density}, self._windows),
                )
                for density in inputs
                if density < 1
            }
            for name in config.projections
        }
        whole, records = self.loss(params, held_out), []
        for share in options.zero_budgets:
            budget = sum(prices[1 - share] for prices in costs.values())
            choices = compared(ranked(rises, costs, budget), 1 - share)
            for name in (name for name in (FIRST, EQUAL) if name in choices):
                shares = {n: 1 - density for n, density in choices[name].densities.items()}
                rise = self._zeroed(shares, held_out) - whole
                record = {"zeros": share, "choice": name, "shares": shares}
                records.append(record | {"predicted": choices[name].rise, "held_out": rise})
        rows = [
            (r["zeros"], r["choice"], *(f"{share:.3g}" for share in r["shares"].values()),
             f"{r['predicted']:+.4f}", f"{r['held_out']:+.4f}")
            for r in records
        ]  # fmt: skip
        head = ("zeros", "choice", *config.projections, "predicted rise", "rise on held-out text")
        return rises, markdown(head, rows), records

    def _zeroed(self, shares, windows):
        """Returns the loss with shares of the inputs of projections as zeros."""
        tokens = np.concatenate([batch.ravel() for batch in self._batches])
        return self.loss(with_thresholds(self.model, tokens, shares).params, windows)


def _known_runs(base, chosen, seeds, stop) -> list[engine.Run]:
    """Returns the runs of the choices of each budget."""
    runs = []
    for seed, (density, choices) in itertools.product(range(seeds), chosen.items()):
        for name, choice in choices.items():
            changes = {"sparsity__density": density, "sparsity__budget": choice.budget}
            variant = base.variant("sparse", training__seed=seed, **changes)
            # A choice that another measurement makes has a training of its own.
            folder = f"{choice.budget.replace(':', '_')}/seed_{seed}"
            record = {"density": density, "choice": name, "seed": seed}
            train = functools.partial(_trained, base, variant, record, stop)
            runs.append(engine.Run(folder, train, record))
    return runs


def _trained(base, variant, record, stop, where, compiled):
    data = base.split_data(variant, HELD_OUT, WINDOWS)
    label = "density {density:g}, {choice}, seed {seed}".format(**record)
    return study.train(label, variant, data, where, stop, compiled=compiled, keep_weights=False)


def rises_table(rises: Rises, label: str) -> str:
    """Returns a Markdown table of the rises by density.

    Args:
      label: what the densities are of.
    """
    densities = sorted(next(iter(rises.values())))
    rows = [
        (name, part + 1, *(f"{each[density]:+.4f}" for density in densities))
        for (name, part), each in rises.items()
    ]
    table = markdown(("alone", "part", *(f"{density:.3g}" for density in densities)), rows)
    return f"Rise of the loss by {label}, nats a token:\n\n{table}"


def choices_table(density: float, choices: Mapping[str, Choice]) -> str:
    """Returns a Markdown table of the choices of a budget, and the settings of the first."""
    first = choices[FIRST]
    rows = [
        (name, *(f"{d:.4g}" for d in c.densities.values()), ", ".join(f"{m:g}" for m in c.depth),
         f"{c.cost:.3f}", f"{c.rise:+.4f}")
        for name, c in choices.items()
    ]  # fmt: skip
    head = ("choice", *first.densities, "depth", "cost", "predicted rise")
    return (
        f"Density {density:g}:\n\n{markdown(head, rows)}\n\nThe first one is "
        f"`--density={density:g} --set sparsity.budget={first.budget}`."
    )


def trained_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Returns a Markdown table of trained choices, and how far the first is behind the best.

    The difference to equal density is paired by seed, with its standard error.
    """
    rows, lines = [], []
    for density in dict.fromkeys(r["density"] for r in results):
        bits: dict[str, dict[int, float]] = {}
        for r in (r for r in results if r["density"] == density):
            bits.setdefault(r["choice"], {})[r["seed"]] = r["bits_per_byte"]
        means = {name: float(np.mean([*each.values()])) for name, each in bits.items()}
        for name, each in bits.items():
            rows.append(
                (f"{density:g}", name, f"{means[name]:.4f}", len(each),
                 _difference(each, bits[EQUAL]) if name != EQUAL and EQUAL in bits else "")
            )  # fmt: skip
        behind = means[FIRST] / min(means.values()) - 1
        verdict = "within" if behind <= WITHIN else "not within"
        lines.append(
            f"Density {density:g}: the first choice is {behind:.2%} behind the best of these, "
            f"{verdict} {WITHIN:.0%}."
        )
    head = ("density", "choice", "bits per byte", "seeds", "to equal density")
    return "\n\n".join([markdown(head, rows), *lines])


def _difference(bits, equal):
    paired = [bits[seed] / equal[seed] - 1 for seed in bits]
    return f"{np.mean(paired):+.2%}{sums.error_text(paired, '.2%')}"
