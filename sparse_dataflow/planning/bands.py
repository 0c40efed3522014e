"""Error bands of predicted step times: how far published runs of the same kind are from theirs.

A domain is a key of `efficiency.EFFICIENCIES` (chip family and software stack) and a regime.  Its
band is the 90% quantile of the relative errors of runs whose model had no part in the fit;
`fitting.fit_bands` computes BANDS, and a test compares them with the runs that no fit has seen.
"""

import dataclasses

from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.planning import efficiency, memory

REGIMES = {
    "small": "below 7B, to 8,192 tokens",
    "large": "7B and more, to 8,192 tokens",
    "long": "more than 8,192 tokens",
}
_LARGE, _LONG = 6.5e9, 8192


@dataclasses.dataclass(frozen=True)
class Band:
    """Relative error that nine of ten runs of a kind stay within.

    Attributes:
      error: in log seconds; 0.06 is about 6%.
      runs: published runs behind it.
    """

    error: float
    runs: int


_BANDS: dict = {
}
BANDS = {domain: Band(*band) for domain, band in _BANDS.items()}
"""(key of EFFICIENCIES, regime) -> band."""


def regime(config: ModelConfig, sequence: int) -> str:
    """Returns the regime of a run."""
    if sequence > _LONG:
        return "long"
    return "large" if memory.parameter_count(config) >= _LARGE else "small"


def band(config: ModelConfig, sequence: int, chip: Chip, key: str) -> Band | None:
    """Returns the band of a prediction, or None where no published run is of its kind.

    Args:
      config: the model; no published run with block-sparse weights names its plan.
      sequence: tokens per sequence.
      chip: kind of chip.
      key: constants that predict it.
    """
    if config.sparse_projections or not chip.family:
        return None
    return BANDS.get((key, regime(config, sequence)))


def words(config: ModelConfig, sequence: int, chip: Chip, key: str) -> str:
    """Returns the band of a prediction in words."""
    if chip.family not in efficiency.EFFICIENCIES and key not in efficiency.EFFICIENCIES:
        return f"extrapolated: prior constants, because no published run is on {chip.name}"
    if config.sparse_projections:
        return "extrapolated: no published run of this kind (block-sparse weights)"
    found = band(config, sequence, chip, key)
    if found is None:
        kind = REGIMES[regime(config, sequence)]
        return f"extrapolated: no published run of this kind ({key}, {kind})"
    return f"±{found.error:.0%}, like {found.runs} published runs of this kind ({key})"
