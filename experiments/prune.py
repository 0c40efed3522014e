"""Prunes a model of a directory into a new one, a layer at a time.

    python -m experiments.prune --run=DIR --texts=notes/ --out=pruned
    python -m experiments.prune --run=model.gguf --texts=notes/ --block=1x16 --out=pruned
    python -m experiments.prune --run=DIR --texts=notes/ --block=narrow --out=smaller

What goes is chosen by the error that the other weights cannot make up for.  What stays is fitted to
the outputs of the whole model, on --tokens tokens of --texts, any corpus that a run can train on.
A line says the held-out error of each projection, and after each layer the time left.  The same
command goes on after an interrupt.
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.commands.models.load_model import refuse_no_model
from sparse_dataflow.core.config.settings import AT_LEAST_ONE, AT_LEAST_ZERO, between, setting
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange.tensors import DTYPES


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags."""

    run: str = setting(
        "", "Run folder, Hugging Face directory, GGUF file, or name on the hub.", path=True
    )
    out: str = setting("", "Folder to make with the pruned model.", path=True)
    texts: str = setting(
        "", "Corpus whose training documents the weights are fitted on.", path=True
    )
    tokens: int = setting(16_384, "Tokens of --texts that are read.", legal=AT_LEAST_ONE)
    density: float = setting(
        0.5, "Fraction of each projection that stays.", legal=between(1e-6, 1 - 1e-6)
    )
    block: str = setting(
        "1",
        "What goes together: 1 (single weights), 2:4, 1x16 (1 input x 16 outputs), 16 (squares), "
        "or narrow (heads and hidden features).",
    )
    rounds: int = setting(0, "Rounds in which weights go; 0 is 8.", legal=AT_LEAST_ZERO)
    dtype: str = setting(DTYPES[0], "Of the numbers; bfloat16 rounds them.", choices=DTYPES)


def main(options):
    """Prunes; see the module docstring."""
    for flag in ("out", "texts"):
        if not getattr(options, flag):
            raise UserError(
                f"--{flag} is empty; legal: a new folder in --out, a corpus in --texts."
            )
    refuse_no_model(options.run)
    from sparse_dataflow.commands import prune_command

    prune_command.prune_model(options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, options=Options)
