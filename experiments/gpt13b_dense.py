"""Dense GPT-13B: the twin of gpt13b_sparse, alone (arXiv 2304.05511).

    python -m experiments.gpt13b_dense                  a laptop: about 3 minutes
    python -m experiments.gpt13b_dense --scale=13b --corpus=hf:allenai/c4/en \\
        --set data.tokenizer=gpt2 --steps=17500   # needs h100:4, h100:8, v5e-64 or v5p-64

Leaves runs/gpt13b_dense-DATE/ with report.html, metrics and checkpoints.
"""

from sparse_dataflow.commands import command_line
from sparse_dataflow.commands.request import NAMED

SHARED = tuple(
    name for name in NAMED if name not in ("density", "pattern", "block", "evolution", "twin")
)


def main(request):
    """Trains and reports; see `commands.train.train_experiment`."""
    from sparse_dataflow.commands.preflight import early

    early.refuse(request, "gpt13b_dense", sparse=False)
    from sparse_dataflow.commands import train

    return train.train_experiment(request, "gpt13b_dense", sparse=False)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, shared=SHARED)
