"""Writes a trained model as a Hugging Face directory, with its tokenizer and a model card.

    python -m experiments.export --run=runs/NAME --to=exported
    python -m experiments.export --run=runs/NAME --to=exported --form=sparse
    python -m experiments.export --run=runs/NAME --to=exported --form=program
    python -m experiments.export --run=runs/NAME --to=exported --form=gguf --dtype=q8_0
    python -m experiments.export --run=runs/NAME --to=exported --form=adapter

transformers loads the dense form. Its architecture is that of the weights that the run began with,
or the first of --architecture that represents the model. Blocks that are not
stored are zeros in it. The sparse form holds the stored blocks and the layout tables; the card says
how they are read, and run_in_torch.py in the folder runs them in PyTorch. The GGUF form is a file,
model.gguf, of dense weights for llama.cpp and what is built on it. The program form holds
programs for prompts and for new tokens, which run_in_jax.py runs with jax alone. The adapter form
holds trained adapters alone, for PEFT; the dense form has them merged into the weights, and the
sparse form and programs as low-rank terms.
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.commands.models.load_model import ModelOptions
from sparse_dataflow.core.config.settings import setting
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange.architectures import ARCHITECTURES, AUTO
from sparse_dataflow.interchange.llama_cpp import gguf_form
from sparse_dataflow.interchange.tensors import DTYPES

FORMS = ("dense", "sparse", "gguf", "program", "adapter")


@dataclasses.dataclass(frozen=True)
class Options(ModelOptions):
    """The flags."""

    to: str = setting("", "Folder to make.", path=True)
    form: str = setting("dense", "Contents of the folder.", choices=FORMS)
    architecture: str = setting(
        AUTO, "Architecture of the dense and the GGUF form.", choices=(AUTO, *ARCHITECTURES)
    )
    dtype: str = setting(
        DTYPES[0],
        "Of the numbers, which all but float32 round; float16 and q8_0 are of the GGUF form.",
        choices=tuple(gguf_form.DTYPES),
    )


def main(options):
    """Exports; see the module docstring."""
    if not options.to:
        raise UserError("No folder is named; give a new one with --to.")
    from sparse_dataflow.commands import library
    from sparse_dataflow.commands.models import load_model

    trained = load_model.load(options)
    path = library.save(trained, options.to, options.form, options.architecture, options.dtype)
    print(f"{trained.variant} after step {trained.step}: {path}")


if __name__ == "__main__":
    command_line.run_main(main, __doc__, options=Options)
