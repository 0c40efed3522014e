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

from experiments import flags
from experiments.command_line import AT_LEAST_ONE, Flag, Group

# As many blocks in all as at one density: attention has 4 of a layer's 12 squares of d_model, each
# projection of the MLP 4.
TO_MLP_IN = "qkv:0.5x,attn_out:0.5x,mlp_in:1.5x"
# Half of the layers with a third of the other half's.
RISING, FALLING = "depth:0.5x,1.5x", "depth:1.5x,0.5x"
ATTENTION = ("qkv", "attn_out")
TO_DENSE_HALF = {"pattern": "random", "evolution": "sparse_to_dense", "training_flops": 0.5}

# A rank is relative to the width of the model, hadamard to the largest power of 2 that divides it;
# training_flops, of the dense training, say when the switch comes.
ARMS = {
    "dense": None,
    "static_pixelfly": {"pattern": "pixelfly"},
    "static_cyclic": {"pattern": "cyclic"},
    "static_random": {"pattern": "random"},
    "static_monarch": {"pattern": "monarch"},
    "allocated": {"pattern": "random", "density_budget": TO_MLP_IN},
    "depth_rising": {"pattern": "random", "density_budget": RISING},
    "depth_falling": {"pattern": "random", "density_budget": FALLING},
    "low_rank": {"pattern": "random", "rank": 1 / 16},
    "hadamard": {"pattern": "random", "hadamard": 1},
    "hadamard_low_rank": {"pattern": "random", "hadamard": 1, "rank": 1 / 16},
    "allocated_low_rank": {"pattern": "random", "density_budget": TO_MLP_IN, "rank": 1 / 16},
    "set": {"pattern": "random", "evolution": "set"},
    "rigl": {"pattern": "random", "evolution": "rigl"},
    "rigl_low_rank": {"pattern": "random", "evolution": "rigl", "rank": 1 / 16},
    "gradual": {"evolution": "gradual"},
    "sparse_to_dense_half": TO_DENSE_HALF,
    "low_rank_to_dense_half": {**TO_DENSE_HALF, "rank": 1 / 16},
    "attention_first_half": {**TO_DENSE_HALF, "evolve_first": ATTENTION},
    "low_rank_attention_first_half": {
        **TO_DENSE_HALF,
        "evolve_first": ATTENTION,
        "rank": 1 / 16,
    },
    "sparse_to_dense_50": {"pattern": "random", "evolution": "sparse_to_dense", "evolve_at": 0.5},
    "sparse_to_dense_70": {"pattern": "random", "evolution": "sparse_to_dense", "evolve_at": 0.7},
    "sparse_to_dense_90": {"pattern": "random", "evolution": "sparse_to_dense", "evolve_at": 0.9},
    "monarch_to_dense_70": {"pattern": "monarch", "evolution": "sparse_to_dense", "evolve_at": 0.7},
    "monarch_to_dense_90": {"pattern": "monarch", "evolution": "sparse_to_dense", "evolve_at": 0.9},
}
COMPARED = (
    "dense",
    *("static_pixelfly", "static_cyclic", "static_random", "static_monarch"),
    *("low_rank", "rigl", "gradual", "attention_first_half"),
    *("sparse_to_dense_50", "sparse_to_dense_70", "sparse_to_dense_90"),
)
"""Trained where --arms names none."""
EQUAL = ("tokens", "flops", "seconds")

QUALITY = Group(
    "Quality",
    "what is compared",
    (
        Flag(
            "steps",
            "integer",
            400,
            "Optimizer steps of the dense model.",
            legal=AT_LEAST_ONE,
        ),
        Flag(
            "seeds",
            "integer",
            3,
            "Trainings of each arm, with other weights, data order and patterns.",
            legal=AT_LEAST_ONE,
        ),
        Flag(
            "arms",
            "list",
            ",".join(COMPARED),
            "Ways of training.",
            tuple(ARMS),
        ),
        Flag("equal", "list", "all", "What all arms have in common.", lambda: EQUAL),
        Flag("out", "text", "runs/sparse_quality", "Folder to make, or to go on in."),
    ),
)
GROUPS = (
    *flags.without(
        *("minutes", "steps", "twin", "seed", "pattern", "rank", "hadamard"),
        *("evolution", "evolve_at"),
        groups=(flags.MODEL, flags.SPARSITY, flags.EVOLUTION, flags.TRAINING, flags.DATA),
    ),
    QUALITY,
)


def main(values):
    """Trains what is not trained yet, then writes the tables."""
    from experiments import quality_runs

    return quality_runs.run(values, GROUPS, ARMS)


if __name__ == "__main__":
    flags.run(main, __doc__, GROUPS)
