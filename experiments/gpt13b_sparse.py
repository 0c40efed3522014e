"""Sparse GPT-13B, trained beside its dense twin (arXiv 2304.05511).

At the scale that fits the machine: on a laptop a wide, shallow replica in which projections hold
the share of the FLOPs that they hold in the 13B, and the dense twin for the same wall-clock.

    python -m experiments.gpt13b_sparse                 a laptop: about 6 minutes
    python -m experiments.gpt13b_sparse --scale=13b     a GPU with 80 GB or more

Leaves runs/gpt13b_sparse-DATE/ with report.html, metrics and checkpoints.
"""

from experiments import flags


def main(values):
    """Trains and reports; see `gpt_run.run`."""
    from experiments import gpt_run

    return gpt_run.run("gpt13b_sparse", values, flags.GROUPS, sparse=True)


if __name__ == "__main__":
    flags.run(main, __doc__)
