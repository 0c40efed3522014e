"""Scaling law of sparse models: loss as a function of parameters, sparsity and tokens.

    L(S, N, D) = (a_S (1 - S)^b_S + c_S) N^-b_N + (a_D / D)^b_D + c

N is the number of stored parameters, S the fraction of zeros in the dense model of the same shape,
D the number of training tokens, and L the loss in nats per token (arXiv 2309.08520, equation 1).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy import optimize

from sparse_dataflow.files.errors import UserError

CONSTANTS = ("a_s", "b_s", "c_s", "b_n", "a_d", "b_d", "c")
COLUMNS = ("parameters", "sparsity", "tokens", "loss")


@dataclasses.dataclass(frozen=True)
class Runs:
    """Training runs to fit, as columns.

    Attributes:
      parameters: float [runs], stored parameters, above 0.
      sparsity: float [runs], in [0, 1).
      tokens: float [runs], training tokens, above 0.
      loss: float [runs], held-out loss in nats per token, above 0.

    Raises:
      UserError: the columns differ in length, or a value is not legal.
    """

    parameters: np.ndarray
    sparsity: np.ndarray
    tokens: np.ndarray
    loss: np.ndarray

    def __post_init__(self):
        for name in COLUMNS:
            object.__setattr__(self, name, np.asarray(getattr(self, name), np.float64))
        lengths = {getattr(self, name).shape for name in COLUMNS}
        if len(lengths) > 1 or self.loss.ndim != 1:
            raise UserError(f"Columns have the shapes {sorted(lengths)}; legal: one length.")
        legal = {
            "parameters": ("above 0", self.parameters > 0),
            "sparsity": ("in [0, 1)", (self.sparsity >= 0) & (self.sparsity < 1)),
            "tokens": ("above 0", self.tokens > 0),
            "loss": ("above 0", self.loss > 0),
        }
        for name, (words, good) in legal.items():
            bad = np.flatnonzero(~(good & np.isfinite(getattr(self, name))))
            if bad.size:
                value = getattr(self, name)[bad[0]]
                raise UserError(f"Run {bad[0] + 1} has {name} {value:g}; legal: {words}.")

    def __len__(self):
        return len(self.loss)

    def take(self, index: np.ndarray) -> "Runs":
        """Returns the runs at integer positions, or where a bool mask is True."""
        return Runs(*(getattr(self, name)[index] for name in COLUMNS))


@dataclasses.dataclass(frozen=True)
class ScalingLaw:
    """Constants of the law, with N in units of `unit_parameters` and D in units of `unit_tokens`.

    The units keep the constants near 1, so the fit is well conditioned.  `constants_in_units_of_1`
    converts them to the form that papers print.
    """

    a_s: float
    b_s: float
    c_s: float
    b_n: float
    a_d: float
    b_d: float
    c: float
    unit_parameters: float = 1.0
    unit_tokens: float = 1.0

    def loss(self, parameters, sparsity, tokens) -> np.ndarray:
        """Returns the loss in nats per token; the arguments broadcast."""
        size = np.asarray(parameters, np.float64) / self.unit_parameters
        data = np.asarray(tokens, np.float64) / self.unit_tokens
        stored = 1.0 - np.asarray(sparsity, np.float64)
        capacity = (self.a_s * stored**self.b_s + self.c_s) * size**-self.b_n
        return capacity + (self.a_d / data) ** self.b_d + self.c

    def constants_in_units_of_1(self) -> dict[str, float]:
        """Returns the seven constants for N in parameters and D in tokens."""
        scale = self.unit_parameters**self.b_n
        constants = {name: getattr(self, name) for name in CONSTANTS}
        constants |= {"a_s": self.a_s * scale, "c_s": self.c_s * scale}
        return constants | {"a_d": self.a_d * self.unit_tokens}

    def dense_equivalent(self, sparsity: float) -> float:
        """Returns the ratio of the parameters of a dense model of equal loss to the stored
        parameters: the "gain" of arXiv 2309.08520, section 3.1."""
        capacity = (self.a_s * (1 - sparsity) ** self.b_s + self.c_s) / (self.a_s + self.c_s)
        return float(capacity ** (-1 / self.b_n))


HUBER = 1e-3
"""Huber delta, in log loss (arXiv 2203.15556, appendix D.2)."""


def fit(runs: Runs, starts: int = 24, seed: int = 0) -> ScalingLaw:
    """Fits the law by least Huber loss in log L, from several starting points.

    Args:
      runs: at least 8, with at least two values each of parameters, sparsity and tokens.
      starts: number of random starting points; the best result is returned.
      seed: random seed of the starting points.

    Raises:
      UserError: there are too few runs, or a column is constant.
    """
    refuse_undetermined(runs)
    units = np.median(runs.parameters), np.median(runs.tokens)
    rng = np.random.default_rng(seed)
    fits = [_descend(runs, units, _start(runs, rng)) for _ in range(starts)]
    return _law(min(fits, key=lambda result: result.cost).x, units)


def refuse_undetermined(runs: Runs) -> None:
    """Refuses runs that do not determine the constants, whatever their losses.

    Raises:
      UserError: there are too few runs, or a column is constant.
    """
    if len(runs) < len(CONSTANTS) + 1:
        raise UserError(
            f"{len(runs)} runs cannot fit {len(CONSTANTS)} constants; legal: 8 or more."
        )
    for name in ("parameters", "sparsity", "tokens"):
        if np.ptp(getattr(runs, name)) == 0:
            raise UserError(f"All runs have equal {name}; the law needs at least two values.")


def _start(runs, rng):
    """Draws logs of plausible constants: the terms of the law sum to the median loss."""
    share = rng.dirichlet(np.ones(4)) * np.median(runs.loss) + 1e-6
    b_s, b_n, b_d = rng.uniform([0.2, 0.1, 0.1], [2.0, 0.8, 0.8])
    return np.log([share[0], b_s, share[1], b_n, share[2] ** (1 / b_d), b_d, share[3]])


def _descend(runs, units, start):
    def residuals(logs):
        predicted = _law(logs, units).loss(runs.parameters, runs.sparsity, runs.tokens)
        return np.log(predicted) - np.log(runs.loss)

    bounds = (
        np.log([1e-6, 1e-2, 1e-6, 1e-2, 1e-6, 1e-2, 1e-6]),
        np.log([1e3, 8, 1e3, 4, 1e3, 4, 1e2]),
    )
    return optimize.least_squares(
        residuals, np.clip(start, *bounds), bounds=bounds, loss="huber", f_scale=HUBER, max_nfev=400
    )


def _law(logs, units):
    return ScalingLaw(*np.exp(logs).tolist(), *map(float, units))


def bootstrap(runs: Runs, rounds: int = 200, seed: int = 0) -> list[ScalingLaw]:
    """Returns `rounds` laws, fitted to bootstrap samples of the runs.

    Samples in which a column is constant are redrawn.

    Raises:
      UserError: see `fit`.
    """
    best = fit(runs, seed=seed)
    units = best.unit_parameters, best.unit_tokens
    start = np.log([getattr(best, name) for name in CONSTANTS])
    rng = np.random.default_rng(seed)
    laws: list[ScalingLaw] = []
    while len(laws) < rounds:
        sample = runs.take(rng.integers(len(runs), size=len(runs)))
        if all(np.ptp(getattr(sample, name)) for name in ("parameters", "sparsity", "tokens")):
            laws.append(_law(_descend(sample, units, start).x, units))
    return laws


def noise(runs: Runs) -> float | None:
    """Returns the pooled standard deviation of log loss among runs that differ only by seed.

    None if no two runs have equal parameters, sparsity and tokens.
    """
    settings = np.column_stack([runs.parameters, runs.sparsity, runs.tokens])
    _, setting, counts = np.unique(settings, axis=0, return_inverse=True, return_counts=True)
    setting = setting.reshape(-1)
    freedom = len(runs) - len(counts)
    if not freedom:
        return None
    logs = np.log(runs.loss)
    means = np.bincount(setting, logs) / counts
    return float(np.sqrt(np.sum((logs - means[setting]) ** 2) / freedom))


def interval(samples: Sequence[float], level: float = 0.9) -> tuple[float, float]:
    """Returns the central interval that contains the fraction `level` of the samples."""
    tail = 50 * (1 - level)
    low, high = np.percentile(samples, [tail, 100 - tail])
    return float(low), float(high)


def best_for_budget(
    law: ScalingLaw,
    flops: float,
    sparsity: float,
    flops_per_parameter_token: float,
    tokens: np.ndarray,
) -> tuple[float, float, float]:
    """Returns (loss, parameters, tokens) of the best training run at one sparsity and budget.

    Args:
      law: scaling law.
      flops: training FLOPs of the budget.
      sparsity: of the model, in [0, 1).
      flops_per_parameter_token: FLOPs per stored parameter and token: 6 if only stored blocks are
        computed, 6 / (1 - sparsity) if zeros are too, more if blocks run slower than dense.
      tokens: float [n], candidate numbers of tokens; the budget determines the parameters of each.
    """
    parameters = flops / (flops_per_parameter_token * tokens)
    loss = law.loss(parameters, sparsity, tokens)
    best = int(np.argmin(loss))
    return float(loss[best]), float(parameters[best]), float(tokens[best])
