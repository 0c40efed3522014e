"""The average-parameter law with terms of the model's shape, fitted to the runs of studies.

log L = log law(N, D) + terms of log2(layers) and log2(d_ff / d_model), fitted to dense runs.  A way
of pruning adds its excess over that, a mean over its runs of like shape, density and length.  See
`law` for the law of mean weights N and tokens D.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy import optimize

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.files.errors import UserError

from . import arms, law, runs, study
from .arms import Arm
from .options import NarrowOptions
from .runs import Cell

TEXT = ("vocabulary", "sequence", "batch", "corpus", "heads", "vector_rate")
"""Settings that all studies of a law share."""

LEAST_RESULTS = 2
"""Results that a way of pruning needs, so that their spread is known."""


PLACE_SCALES = np.array([0.5, 2.0, 1.0, 1.0])
"""Powers of two of density, tokens for each mean weight, d_ff / d_model and layers within which the
excess of a way of pruning is alike; a distance above 1 is too far."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The mean loss of a cell of a study.

    Attributes:
      arm: what was trained.
      model: its dense shape.
      density: stored fraction of the pruned projections at the end; 1 is dense.
      weights: stored weights of the projections, on average over the training.
      tokens: of the training.
      loss: held-out bits a symbol, on average over seeds.
      served_flops: forward FLOPs of a token.
      training_flops: of the whole training.
    """

    arm: Arm
    model: ModelConfig
    density: float
    weights: float
    tokens: float
    loss: float
    served_flops: float
    training_flops: float


@dataclasses.dataclass(frozen=True)
class Pruning:
    """A way of pruning that was measured.

    Attributes:
      arm: with the pruned projections, the schedule, the score and the block.
      results: of that way.
      excesses: float [results], logs of their losses over the law's.
    """

    arm: Arm
    results: Sequence[Result]
    excesses: np.ndarray

    def excess(self, model: ModelConfig, density: float, tokens_a_weight: float) -> float:
        """Returns the mean excess of the results near a shape, a density and a length.

        It is infinite where no result is near.
        """
        at = _place(model, density, tokens_a_weight)
        if np.square(self._places - at).sum(-1).min() > 1:
            return math.inf
        return _local_mean(at, self._places, self.excesses)

    @property
    def error(self) -> float:
        """Root mean square error of each excess as the others give it."""
        places, count = self._places, len(self.results)
        rest = [np.arange(count) != i for i in range(count)]
        errors = [
            _local_mean(places[i], places[others], self.excesses[others]) - self.excesses[i]
            for i, others in enumerate(rest)
        ]
        return float(np.sqrt(np.mean(np.square(errors))))

    @property
    def densities(self) -> tuple[float, float]:
        """The lowest and the highest stored fraction."""
        values = [result.density for result in self.results]
        return min(values), max(values)

    @property
    def _places(self):
        return np.array([_place(r.model, r.density, r.tokens / r.weights) for r in self.results])


def _place(model, density, tokens_a_weight):
    """Returns what the excess of a pruned model depends on, in units of its weight's decay."""
    logs = np.log2([density, tokens_a_weight, model.d_ff / model.d_model, model.num_layers])
    return logs / PLACE_SCALES


def _local_mean(at, places, values):
    """Returns the mean of values with Gaussian weights of their distances."""
    squares = np.square(places - at).sum(-1)
    weights = np.exp(squares.min() - squares)
    return float(weights @ values / weights.sum())


@dataclasses.dataclass(frozen=True)
class ShapeLaw:
    """The law with terms of the shape.

    Attributes:
      law: of mean weights and tokens.
      factors: of the powers of log2(layers) and log2(d_ff / d_model), about `centre`.
      centre: mean of both over the results.
    """

    law: law.Law
    factors: tuple[tuple[float, ...], tuple[float, ...]]
    centre: tuple[float, float]

    def loss(self, weights, tokens, models: Sequence[ModelConfig]) -> np.ndarray:
        """Returns float [n], the losses of trainings from float [n] weights and tokens."""
        terms = _terms(models, self.centre, self.factors) @ np.concatenate(self.factors)
        return self.law.loss(np.asarray(weights, float), np.asarray(tokens, float)) * np.exp(terms)


@dataclasses.dataclass(frozen=True)
class Studies:
    """What studies measured, and the law of it.

    Attributes:
      options: settings of the first study.
      dense: results that the law is fitted to.
      law: of all of them.
      errors: float [dense], each result predicted without it, over the measured one, minus 1.
      prunings: ways of pruning.
    """

    options: NarrowOptions
    dense: Sequence[Result]
    law: ShapeLaw
    errors: np.ndarray
    prunings: Sequence[Pruning]

    @property
    def error(self) -> float:
        """Root mean square of `errors`."""
        return float(np.sqrt(np.mean(np.square(self.errors))))

    def span(self, name: str) -> tuple[float, float]:
        """Returns the smallest and the largest value of a field of the dense results."""
        values = [getattr(result, name) for result in self.dense]
        return min(values), max(values)


def read(folders: Sequence[Path], optimizer: str) -> Studies:
    """Returns the results of folders of `experiments.serving_cost`, with the law of them.

    Raises:
      UserError: a folder is no study, or of another text; too few dense results for the law.
    """
    results: list[Result] = []
    first: NarrowOptions | None = None
    for folder in folders:
        options, lines = runs.load(folder)
        first = first or options
        for name in TEXT:
            if getattr(options, name) != getattr(first, name):
                raise UserError(
                    f"{folder} has --{name}={getattr(options, name)} and {folders[0]} "
                    f"{getattr(first, name)}; legal: studies of the same text."
                )
        results += _results(options, lines, optimizer)
    where = ", ".join(map(str, folders))
    if first is None:
        raise UserError("--studies names no folder; legal: folders of experiments.serving_cost.")
    dense = [r for r in results if not r.arm.pruned and not r.arm.experts]
    try:
        fitted = fit(dense)
        errors = np.array([_left_out(dense, number, fitted) for number in range(len(dense))])
    except ValueError as error:
        raise UserError(
            f"The {len(dense)} dense results with {optimizer} in {where} determine no law: {error}."
        ) from None
    return Studies(first, dense, fitted, errors, _prunings(results, dense, fitted))


def fit(dense: Sequence[Result], near: ShapeLaw | None = None) -> ShapeLaw:
    """Returns the law of dense results.

    A shape of three values has a linear and a square term, one of two a linear term.

    Args:
      dense: the results.
      near: a law of almost the same results, where the fit starts and whose terms it has.

    Raises:
      ValueError: the results do not determine the constants.
    """
    logs = np.array([_logs(r.model) for r in dense]).reshape(-1, 2)
    if near is None:
        orders = [max(0, min(2, len(set(column)) - 1)) for column in logs.T.round(6).tolist()]
        factors = (0.0,) * orders[0], (0.0,) * orders[1]
        centre = (float(logs[:, 0].mean()), float(logs[:, 1].mean())) if len(logs) else (0.0, 0.0)
    else:
        factors, centre = near.factors, near.centre
    count = sum(map(len, factors))
    if len(dense) < 5 + count:
        raise ValueError(f"five constants and {count} of the shape need as many results")
    weights, tokens, losses = (
        np.array([getattr(r, name) for r in dense]) for name in ("weights", "tokens", "loss")
    )
    terms = _terms([r.model for r in dense], centre, factors)
    start = near.law if near else law.fit(weights, tokens, losses)
    # The constants of `law.Law` in its order, the factors last.
    logarithms = [math.log(max(v, 1e-300)) for v in (start.irreducible, start.a, start.b)]
    irreducible, a, b = np.clip(logarithms, *law.LOG_BOUNDS)
    point = [irreducible, a, start.alpha, b, start.beta, *factors[0], *factors[1]]

    def residuals(point):
        predicted = law.Law(*_constants(point)).loss(weights, tokens)
        return np.log(predicted) + terms @ point[5:] - np.log(losses)

    solved = optimize.least_squares(residuals, point, x_scale="jac", max_nfev=1000).x
    split = 5 + len(factors[0])
    fitted = tuple(map(float, solved[5:split])), tuple(map(float, solved[split:]))
    return ShapeLaw(law.Law(*_constants(solved)), fitted, centre)


def _constants(point):
    irreducible, a, alpha, b, beta = point[:5]
    return tuple(map(float, (np.exp(irreducible), np.exp(a), alpha, np.exp(b), beta)))


def _logs(model):
    return np.log2(model.num_layers), np.log2(model.d_ff / model.d_model)


def _terms(models, centre, factors):
    """Returns float [models, factors], the powers of the shape that the factors multiply."""
    columns = [
        [(log - middle) ** (power + 1) for log, middle, powers in zip(_logs(m), centre, factors)
         for power in range(len(powers))]
        for m in models
    ]  # fmt: skip
    return np.array(columns, float).reshape(len(models), sum(map(len, factors)))


def _left_out(dense, number, fitted):
    result = dense[number]
    predicted = fit([*dense[:number], *dense[number + 1 :]], fitted).loss(
        [result.weights], [result.tokens], [result.model]
    )
    return float(predicted[0] / result.loss - 1)


def _results(options, lines, optimizer):
    """Yields a result for each cell of the optimizer with linear decay."""
    narrow = study.narrow_model(options)
    cells = dict.fromkeys(
        Cell(*(line[field.name] for field in dataclasses.fields(Cell))) for line in lines
    )
    for cell in cells:
        if cell.optimizer != optimizer or cell.schedule != "linear":
            continue
        arm = arms.ARMS[cell.arm]
        measured = list(runs.measured(lines, cell).values())
        if not measured:
            continue
        yield Result(
            arm,
            arms.shape(narrow, arm),
            arms.served_density(narrow, arm),
            measured[0]["mean_weights"],
            measured[0]["tokens"],
            float(np.mean([line["held_out"] for line in measured])),
            measured[0]["served_flops"],
            measured[0]["flops"],
        )


def _prunings(results, dense, fitted):
    """Returns the ways of pruning in blocks among the results of shapes like the dense ones."""
    by_way: dict[Arm, list[Result]] = {}
    logs = np.array([_logs(result.model) for result in dense])
    for result in results:
        arm, at = result.arm, np.array(_logs(result.model))
        inside = np.all((logs.min(0) <= at) & (at <= logs.max(0))) and not arm.experts
        if inside and arm.pruned and arm.block > 1 and arm.keep != "random" and not arm.teacher:
            # The shape and the target are no part of the way.
            way = dataclasses.replace(
                arm, width=1.0, hidden=1.0, heads=1.0, heads_width=0.0, equal="flops"
            )
            by_way.setdefault(way, []).append(result)
    return [
        _pruning(way, members, fitted)
        for way, members in by_way.items()
        if len(members) >= LEAST_RESULTS
    ]


def _pruning(way: Arm, members: Sequence[Result], fitted: ShapeLaw) -> Pruning:
    predicted = fitted.loss(
        [r.weights for r in members], [r.tokens for r in members], [r.model for r in members]
    )
    return Pruning(way, members, np.log([r.loss for r in members]) - np.log(predicted))


def names(pruning: Pruning) -> Mapping[str, str]:
    """Returns words for a way of pruning."""
    arm = pruning.arm
    return {
        "projections": "all" if set(arm.pruned) == set(arms.ALL) else ", ".join(arm.pruned),
        "cut": f"{arm.start:.0%} to {arm.end:.0%} in {arm.stages} stages",
        "blocks": f"{arm.block}, by {arm.keep}",
    }
