"""Which parallel plan trains a model fastest on given chips, and what decides it.

Prices every legal plan (tensor, pipeline and sharded data parallelism, micro-batch, schedule, ZeRO,
rematerialisation) by the planner's cost model, after arXiv 2312.12705. Needs no accelerator.

    python -m experiments.layout_search --scale=175b --chips=mi250x:1024 --batch=10240
    python -m experiments.layout_search --scale=13b --density=0.125 --chips=h100:64
    python -m experiments.layout_search --scale=1.3b --experts=64 --top_k=2 \\
        --expert_capacity=1.25 --chips=h100:64 --batch=1024
    python -m experiments.layout_search --chips=h100:64 --batch=1024 \\
        --shape=num_layers=48,d_model=6144,num_heads=48,d_ff=24576

Prints the ten best with their days, memory and ties, the terms of the best one, how much each
choice decides, and the commands that train under the recommended plan. Where the compiler for the
chips is installed (make aot-tpu), the ten are compiled, and the table says which of them fit.
Writes OUT/search.html and OUT/trials.csv.
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.commands.planning.options import TOKENS, ModelOptions, shape_changes
from sparse_dataflow.core.config.settings import (
    ABOVE_ZERO,
    AT_LEAST_ONE,
    AT_LEAST_ZERO,
    MOST_EXPERTS,
    between,
    setting,
)
from sparse_dataflow.hardware.chips import CHIPS


@dataclasses.dataclass(frozen=True)
class Options(ModelOptions):
    """What is searched."""

    shape: str = setting(
        "",
        "Fields of the model that differ from --scale, as in "
        "num_layers=48,d_model=6144,num_heads=48,d_ff=24576.",
    )
    experts: int = setting(
        0, "Experts of each MLP; 0 is one MLP for all tokens.", legal=between(0, MOST_EXPERTS)
    )
    top_k: int = setting(1, "Experts of a token.", legal=between(1, MOST_EXPERTS))
    expert_capacity: float = setting(
        0.0,
        "Most tokens of an expert, as a multiple of the mean; 0 drops none.",
        legal=between(0, MOST_EXPERTS),
    )
    chips: str = setting(
        "h100:8",
        "Chips that are all used, KIND:NUMBER. A KIND is "
        f"{', '.join(CHIPS)}, the start of one, or a TOML file that describes your own.",
    )
    feature: int = setting(
        1,
        "Largest size of the mesh axis feature that is priced; 1 leaves the axis out.",
        legal=AT_LEAST_ONE,
    )
    verify: float = setting(
        10.0,
        "Minutes in which the best ten are compiled for their chips (TPU v5e, v5p, v6e and H200, "
        "where that compiler is installed); 0 compiles none.",
        legal=AT_LEAST_ZERO,
    )
    tokens: float = setting(
        TOKENS, "Training tokens; the table says in how many days.", legal=ABOVE_ZERO
    )
    explain: int = setting(
        1,
        "Number of the best plans whose terms of time and memory are printed.",
        legal=AT_LEAST_ZERO,
    )
    out: str = setting(
        "runs/layout_search", "Output folder; made where it does not exist.", path=True
    )

    @property
    def label(self) -> str:
        """The model in words."""
        return f"{self.scale} ({self.shape})" if self.shape else self.scale

    @property
    def changes(self):
        """See `ModelOptions`."""
        return shape_changes(self.shape, frozenset(vars(self)))

    def with_density(self, density):
        """See `ModelOptions`."""
        model = super().with_density(density)
        names = ("experts", "top_k", "expert_capacity")
        return dataclasses.replace(model, **{name: getattr(self, name) for name in names})


def main(options):
    """Searches and reports; see the module docstring."""
    from .planning import search_report

    search_report.report_search(options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, options=Options)
