"""Tokens a second while a model writes, dense and sparse, paired in one run.

At batch 1 the time of a token is bound by the bytes that it reads: every weight once, the tied
vocabulary dense in both models. Both models have random weights, both write in turn from a cache of
--cached tokens, and the ratio of each round (median and quartiles) stands beside the byte ceiling,
the bytes that a dense token reads over those of a sparse one. Joules of a token are written where
the machine counts them.

--activation_sparsity adds both models with that share of the inputs of their projections as zeros,
and the ratio of dense time to it. Thresholds come from the token that is written, so that the share
is exact. A CPU with --batch=1 reads fewer rows of dense weights; block-sparse weights gain nothing.

Masks of rows (1 input x 16 outputs) are decoded by a CPU with the stored rows alone. --torch adds
the dense model in torch, in a process of its own, by a Python that has torch.

--narrow adds a narrower dense model of the sparse one's training FLOPs.

--exports times exported models instead, with the readers that are written into their folders: the
programs in jax and, where it is installed, the sparse form in PyTorch. It times prompts of --cached
tokens too. A dense model's export has the same reader, which multiplies by whole matrices.

    python -m experiments.decode_bench
    python -m experiments.decode_bench --scale=350m --batch=4
    python -m experiments.decode_bench --set model.num_layers=4
    python -m experiments.decode_bench --scale=mini --activation_sparsity=0.4
    python -m experiments.decode_bench --scale=nano --narrow
    python -m experiments.decode_bench --scale=mini --pattern=masked --density=0.5 \\
        --block=1x16 --torch=PYTHON
    python -m experiments.decode_bench --scale=mini --exports
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import A_SHARE, AT_LEAST_ONE, setting

from .benchmarks.options import BenchOptions

SHARED = ("scale", "batch", "density", "pattern", "block", "seed")
DEFAULTS = {"scale": "1.3b", "batch": 1}


@dataclasses.dataclass(frozen=True)
class Options(BenchOptions):
    """What is written."""

    activation_sparsity: float = setting(
        0.0, "Share of the inputs of each projection that count as zeros.", legal=A_SHARE
    )
    cached: int = setting(128, "Tokens that each new one sees.", legal=AT_LEAST_ONE)
    tokens: int = setting(4, "Tokens written in a timed round.", legal=AT_LEAST_ONE)
    torch: str = setting(
        "", "Python with torch, whose dense GPT takes turns with both models.", path=True
    )
    narrow: bool = setting(False, "Time a narrower dense model of the sparse one's FLOPs too.")
    exports: bool = setting(False, "Time exported models, in jax and in PyTorch.")


def main(request, options):
    """Measures, prints and writes; see the module docstring."""
    from .benchmarks import decoding, exported

    measure = exported.measure_exports if options.exports else decoding.measure_decoding
    measure(request, options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, shared=SHARED, options=Options, defaults=DEFAULTS)
