"""What sparsity costs in quality, and which way of training wins it back.

Trains one GPT densely and with block-sparse weights in several ways ("arms"), several seeds each,
and compares held-out bits per byte. Every comparison is a training of its own length with its own
learning-rate schedule, never a curve cut short:

- tokens: as many steps as the dense model's --steps.
- flops: as many steps as the dense training's FLOPs pay for.
- seconds: as many steps as the dense training's time pays for, by step times measured here.

Each arm learns at its scale's recipe: rates for dense weights, for stored blocks by their density,
and for embeddings, biases and norms, the same in every arm.  A weight that turns dense learns
faster than one that always was (`optim.optimizers.TURNED_DENSE_RATE`).

    python -m experiments.sparse_quality --scale=pico --block=8 --steps=1000      two cores: hours
    python -m experiments.sparse_quality --scale=125m --steps=20000 --corpus=...  a GPU

Leaves OUT/quality.json and OUT/quality.md; the same command goes on where it was stopped.
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import AT_LEAST_ONE, setting

# As many blocks in all as at one density: attention has 4 of a layer's 12 squares of d_model, each
# projection of the MLP 4.
TO_MLP_IN = {"sparsity.budget": "qkv:0.5x,attn_out:0.5x,mlp_in:1.5x"}
# Half of the layers store a third of the other half's blocks.
RISING = {"sparsity.budget": "depth:0.5x,1.5x"}
FALLING = {"sparsity.budget": "depth:1.5x,0.5x"}
PIXELFLY = {"sparsity.pattern": "pixelfly"}
CYCLIC = {"sparsity.pattern": "cyclic"}
RANDOM = {"sparsity.pattern": "random"}
MONARCH = {"sparsity.pattern": "monarch"}
SHUFFLE = {"sparsity.pattern": "shuffle"}
LOW_RANK = {"sparsity.rank": 1 / 16}
HADAMARD = {"sparsity.hadamard": 1}
SET = {"evolution.method": "set"}
RIGL = {"evolution.method": "rigl"}
OFTEN = {"evolution.every": 50, "evolution.share": 0.3}
GRADUAL = {"evolution.method": "gradual"}
TO_DENSE = {"evolution.method": "sparse_to_dense"}
TO_DENSE_HALF = RANDOM | TO_DENSE | {"training_flops": 0.5}
# An expert is narrower than the MLP, so that the experts of a token cost what the MLP costs, or all
# experts store what it stores.
EXPERTS = {"model.experts": 8, "model.top_k": 2}
AS_ACTIVE, AS_STORED = EXPERTS | {"model.d_ff": 1 / 2}, EXPERTS | {"model.d_ff": 1 / 8}
DENSE = {"sparsity.projections": ()}
# A model of a quarter of the weights, which helps the beginning of the dense one.
SMALL = DENSE | {"model.num_layers": 1, "model.d_ff": 1 / 4}
FIRST = {"training.teacher_weight": 0.5, "training.teacher_first": 0.3}
ATTENTION_FIRST = {"evolution.first": ("qkv", "attn_out")}

ARMS = {
    "dense": None,
    "static_pixelfly": PIXELFLY,
    "static_cyclic": CYCLIC,
    "static_random": RANDOM,
    "static_monarch": MONARCH,
    "static_shuffle": SHUFFLE,
    "allocated": RANDOM | TO_MLP_IN,
    "depth_rising": RANDOM | RISING,
    "depth_falling": RANDOM | FALLING,
    "two_factors": {"sparsity.pattern": "low_rank"},
    "low_rank": RANDOM | LOW_RANK,
    "hadamard": RANDOM | HADAMARD,
    "hadamard_low_rank": RANDOM | HADAMARD | LOW_RANK,
    "allocated_low_rank": RANDOM | TO_MLP_IN | LOW_RANK,
    "set": RANDOM | SET,
    "set_often": RANDOM | SET | OFTEN,
    "rigl": RANDOM | RIGL,
    "rigl_often": RANDOM | RIGL | OFTEN,
    "rigl_often_256": RANDOM | RIGL | OFTEN | {"evolution.sequences": 256},
    "rigl_low_rank": RANDOM | RIGL | LOW_RANK,
    "gradual": GRADUAL,
    "distilled": MONARCH | {"training.teacher": "dense"},
    "small": SMALL,
    "inherited": DENSE | {"training.teacher": "small"} | FIRST,
    "sparse_to_dense_half": TO_DENSE_HALF,
    "low_rank_to_dense_half": TO_DENSE_HALF | LOW_RANK,
    "attention_first_half": TO_DENSE_HALF | ATTENTION_FIRST,
    "shuffle_attention_first_half": TO_DENSE_HALF | SHUFFLE | ATTENTION_FIRST,
    "low_rank_attention_first_half": TO_DENSE_HALF | ATTENTION_FIRST | LOW_RANK,
    "sparse_to_dense_50": RANDOM | TO_DENSE | {"evolution.at": 0.5},
    "sparse_to_dense_70": RANDOM | TO_DENSE | {"evolution.at": 0.7},
    "sparse_to_dense_90": RANDOM | TO_DENSE | {"evolution.at": 0.9},
    "monarch_to_dense_70": MONARCH | TO_DENSE | {"evolution.at": 0.7},
    "moe_equal_flops": AS_ACTIVE | DENSE | {"flops_a_token": MONARCH},
    "moe_equal_parameters": AS_STORED | DENSE,
    "moe_sparse": AS_ACTIVE | MONARCH,
    "monarch_to_dense_90": MONARCH | TO_DENSE | {"evolution.at": 0.9},
}
"""Changes of the config by path; None is the dense model.  `studies.quality.Changes` says how rank,
hadamard, d_ff, teacher, training_flops and flops_a_token are relative."""
COMPARED = (
    "dense",
    *("static_pixelfly", "static_cyclic", "static_random", "static_monarch"),
    *("low_rank", "rigl", "gradual", "attention_first_half"),
    *("sparse_to_dense_50", "sparse_to_dense_70", "sparse_to_dense_90"),
)
"""Trained where --arms names none."""
EQUAL = ("tokens", "flops", "seconds")

SHARED = ("scale", "corpus", "batch", "learning_rate", "density", "block")


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of its own."""

    steps: int = setting(400, "Optimizer steps of the dense model.", legal=AT_LEAST_ONE)
    seeds: int = setting(
        3, "Trainings of each arm, with other weights, data order and patterns.", legal=AT_LEAST_ONE
    )
    arms: tuple[str, ...] = setting(COMPARED, "Ways of training.", choices=tuple(ARMS))
    equal: tuple[str, ...] = setting(EQUAL, "What all arms have in common.", choices=EQUAL)
    out: str = setting("runs/sparse_quality", "Folder to make, or to go on in.", path=True)


def main(request, options):
    """Trains what is not trained yet, then writes the tables."""
    from .studies import quality

    return quality.study_quality(request, ARMS, options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, shared=SHARED, options=Options)
