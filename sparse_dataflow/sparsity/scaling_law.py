"""The scaling law of sparse models: loss against parameters, sparsity and tokens.

    L(S, N, D) = (a_S (1 - S)^b_S + c_S) N^-b_N + (a_D / D)^b_D + c

with N the parameters that are not zero, S the fraction of zeros among all that a dense model of the
same shape has, D the training tokens and L in nats a token (arXiv 2309.08520, equation 1).
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
    """Trainings to fit, one an element.

    Attributes:
      parameters: float [runs], stored parameters, above 0.
      sparsity: float [runs], in [0, 1).
      tokens: float [runs], trained on, above 0.
      loss: float [runs], held out, in nats a token, above 0.

    Raises:
      UserError: on construction, where a column is of another length or holds an illegal value.
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

    def take(self, which: np.ndarray) -> "Runs":
        """The runs at these positions, or where this mask is true."""
        return Runs(*(getattr(self, name)[which] for name in COLUMNS))


@dataclasses.dataclass(frozen=True)
class ScalingLaw:
    """The constants of the law; N is counted in `unit_parameters`, D in `unit_tokens`.

    The units keep the constants near 1, and so the fit well conditioned; `constants_per_one` gives
    them for N and D counted one by one, as papers print them.
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
        """Nats a token, for arrays or numbers that broadcast together."""
        size = np.asarray(parameters, np.float64) / self.unit_parameters
        data = np.asarray(tokens, np.float64) / self.unit_tokens
        stored = 1.0 - np.asarray(sparsity, np.float64)
        capacity = (self.a_s * stored**self.b_s + self.c_s) * size**-self.b_n
        return capacity + (self.a_d / data) ** self.b_d + self.c

    def constants_per_one(self) -> dict[str, float]:
        """The seven constants for parameters and tokens counted one by one."""
        scale = self.unit_parameters**self.b_n
        own = {name: getattr(self, name) for name in CONSTANTS}
        own |= {"a_s": self.a_s * scale, "c_s": self.c_s * scale}
        return own | {"a_d": self.a_d * self.unit_tokens}

    def dense_equivalent(self, sparsity: float) -> float:
        """How many times more stored parameters a dense model needs for the same loss: the
        "gain" of arXiv 2309.08520, section 3.1, seen from the stored parameters."""
        capacity = (self.a_s * (1 - sparsity) ** self.b_s + self.c_s) / (self.a_s + self.c_s)
        return float(capacity ** (-1 / self.b_n))


HUBER = 1e-3
"""Residual in log loss up to which it counts squared (arXiv 2203.15556, appendix D.2)."""


def fit(runs: Runs, starts: int = 24, seed: int = 0) -> ScalingLaw:
    """The law of least Huber loss in log L, from several starts.

    Args:
      runs: at least 8, with two values or more of each of parameters, sparsity and tokens.
      starts: random starting points; the best end is taken.
      seed: draws them.

    Raises:
      UserError: too few runs, or a column that does not vary, so that the law is not determined.
    """
    _refuse_undetermined(runs)
    units = np.median(runs.parameters), np.median(runs.tokens)
    rng = np.random.default_rng(seed)
    ends = [_descend(runs, units, _start(runs, rng)) for _ in range(starts)]
    return _law(min(ends, key=lambda end: end.cost).x, units)


def _refuse_undetermined(runs):
    if len(runs) < len(CONSTANTS) + 1:
        raise UserError(
            f"{len(runs)} runs cannot fit {len(CONSTANTS)} constants; legal: 8 or more."
        )
    for name in ("parameters", "sparsity", "tokens"):
        if np.ptp(getattr(runs, name)) == 0:
            raise UserError(f"All runs have one value of {name}; the law needs two or more.")


def _start(runs, rng):
    """Logarithms of plausible constants: the three terms share the loss at the median run."""
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
    """Laws fitted to runs drawn with replacement, for intervals of constants and predictions.

    A draw that does not determine the law is drawn again.

    Raises:
      UserError: as `fit`.
    """
    best = fit(runs, seed=seed)
    units = best.unit_parameters, best.unit_tokens
    start = np.log([getattr(best, name) for name in CONSTANTS])
    rng = np.random.default_rng(seed)
    found: list[ScalingLaw] = []
    while len(found) < rounds:
        drawn = runs.take(rng.integers(len(runs), size=len(runs)))
        if all(np.ptp(getattr(drawn, name)) for name in ("parameters", "sparsity", "tokens")):
            found.append(_law(_descend(drawn, units, start).x, units))
    return found


def noise(runs: Runs) -> float | None:
    """Standard deviation of log loss among runs that differ by their seed alone, pooled over all
    such; None where no two runs have equal parameters, sparsity and tokens."""
    places = np.column_stack([runs.parameters, runs.sparsity, runs.tokens])
    _, which, counts = np.unique(places, axis=0, return_inverse=True, return_counts=True)
    which = which.reshape(-1)
    freedom = len(runs) - len(counts)
    if not freedom:
        return None
    logs = np.log(runs.loss)
    means = np.bincount(which, logs) / counts
    return float(np.sqrt(np.sum((logs - means[which]) ** 2) / freedom))


def interval(samples: Sequence[float], level: float = 0.9) -> tuple[float, float]:
    """The central interval that holds `level` of the samples."""
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
    """(loss, parameters, tokens) of the best training of one sparsity for a budget.

    Args:
      law: the law.
      flops: of the whole training.
      sparsity: of the model.
      flops_per_parameter_token: what one stored parameter costs for one token: 6 where only stored
        blocks are computed, 6 / (1 - sparsity) where zeros are, more where blocks run slower.
      tokens: float [n] candidates; each gives the parameters that the budget leaves.
    """
    parameters = flops / (flops_per_parameter_token * tokens)
    loss = law.loss(parameters, sparsity, tokens)
    best = int(np.argmin(loss))
    return float(loss[best]), float(parameters[best]), float(tokens[best])
