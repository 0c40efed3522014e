"""Dense GPT-13B: the twin of gpt13b_sparse, alone (arXiv 2304.05511).

    python -m experiments.gpt13b_dense                  a laptop: about 3 minutes
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.98 python -m experiments.gpt13b_dense --scale=13b \\
        --batch=1 --remat=full --state_dtype=bfloat16   one H200, which it fills

Leaves runs/gpt13b_dense-DATE/ with report.html, metrics and checkpoints.
"""

from experiments import flags


def main(values):
    """Trains and reports; see `gpt_run.run`."""
    from experiments import gpt_run

    return gpt_run.run("gpt13b_dense", values, GROUPS, sparse=False)


SPARSE_ONLY = ("pattern", "density", "block", "rank", "hadamard", "sparse_projections", "twin")
GROUPS = flags.without(*SPARSE_ONLY, *(flag.name for flag in flags.EVOLUTION.flags))

if __name__ == "__main__":
    flags.run(main, __doc__, GROUPS)
