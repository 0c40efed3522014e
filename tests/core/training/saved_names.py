"""Names, shapes and dtypes of what checkpoints store; run as a program, it prints those of CASES.

The kept ones, saved_names.json, are of the release before layouts became leaves of their weights.
"""

import dataclasses
import json
from pathlib import Path

from small_models import DENSE, EACH_KIND, LOW_RANK, SPARSE

from sparse_dataflow.core.checkpoint.named_arrays import flatten
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.training.phases import phases
from sparse_dataflow.core.training.saved_state import abstract_saved_state

RELEASED = Path(__file__).with_name("saved_names.json")
STEPS = 8
RIGL = EvolutionConfig("rigl", every=2)
BY_DEPTH = dataclasses.replace(SPARSE, density_by_depth=(1.0, 0.5))
EXPERTS = dataclasses.replace(
    DENSE.with_linears(SPARSE.linear("qkv"), ("qkv", "attn_out")), experts=4
)
FACTORS = DENSE.with_linears(LinearSpec("low_rank", "low_rank", density=0.25))
MASKED = DENSE.with_linears(LinearSpec("masked", "masked", 0.5, block=1))

CASES = {
    "dense": (DENSE, EvolutionConfig(), {}),
    "static": (SPARSE, EvolutionConfig(), {}),
    "rigl, muon": (SPARSE, RIGL, {"optimizer": "muon"}),
    "rigl, adafactor": (SPARSE, RIGL, {"optimizer": "adafactor"}),
    "wrappers": (LOW_RANK, EvolutionConfig(), {}),
    "each kind, lion": (EACH_KIND, EvolutionConfig(), {"optimizer": "lion"}),
    "by depth": (BY_DEPTH, EvolutionConfig(), {}),
    "experts": (EXPERTS, EvolutionConfig(), {}),
    "factors": (FACTORS, EvolutionConfig(), {}),
    "masked": (MASKED, EvolutionConfig("set", every=2), {}),
    "adapters": (SPARSE, EvolutionConfig(), {"adapter_rank": 2}),
}
"""Model, evolution and settings of training by name."""


def names(case: str) -> dict[str, str]:
    """Returns {name: dtype and shape} of the checkpoint after step 4."""
    model, evolution, settings = CASES[case]
    training = TrainingConfig(steps=STEPS, **settings)
    state = abstract_saved_state(phases(model, evolution, STEPS), training, STEPS // 2)
    return {name: f"{a.dtype}{list(a.shape)}" for name, a in flatten(state).items()}


if __name__ == "__main__":
    print(json.dumps({case: names(case) for case in CASES}, indent=0))
