"""Sparse GPT-13B, trained beside its dense twin (arXiv 2304.05511).

At the scale that fits the machine: on a laptop a wide, shallow replica in which projections hold
the share of the FLOPs that they hold in the 13B, and the dense twin for the same wall-clock time.

    python -m experiments.gpt13b_sparse                 a laptop: about 6 minutes
    python -m experiments.gpt13b_sparse --scale=13b --corpus=hf:allenai/c4/en \\
        --set data.tokenizer=gpt2 --steps=2500   # needs h100:1
    python -m experiments.gpt13b_sparse --scale=13b --corpus=hf:allenai/c4/en \\
        --set data.tokenizer=gpt2 --steps=17500   # needs h100:8, v5e-64 or v5p-64
    python -m experiments.gpt13b_sparse --scale=13b --steps=17500 --chips=h100:8,v5e-64,v5p-64

Micro-batches, recomputation and mesh are planned for the chips at hand. --chips prints days
and memory for chips that need not be here, as docs/guide/recipes.md does. 300 billion tokens, as
GPT-3 read, are out of reach on one GPU: more than half a year.

Leaves runs/gpt13b_sparse-DATE/ with report.html, metrics and checkpoints.
"""

from sparse_dataflow.commands import command_line
from sparse_dataflow.commands.request import NAMED

SHARED = tuple(NAMED)


def main(request):
    """Trains and reports; see `commands.train.train_experiment`."""
    from sparse_dataflow.commands.preflight import early

    early.refuse(request, "gpt13b_sparse")
    from sparse_dataflow.commands import train

    return train.train_experiment(request, "gpt13b_sparse")


if __name__ == "__main__":
    command_line.run_main(main, __doc__, shared=SHARED)
