"""Writes a trained model as a Hugging Face directory, with its tokenizer and a model card.

    python -m experiments.export --run=runs/NAME --to=exported
    python -m experiments.export --run=runs/NAME --to=exported --form=sparse

The dense form is a GPT-2 that transformers loads; blocks that are not stored are zeros in it. The
sparse form holds the stored blocks and the layout tables; the card says how they are read.
"""

from experiments import flags, run_models
from experiments.command_line import Flag, Group
from sparse_dataflow.files.errors import UserError

EXPORT = Group(
    "Export",
    "what is written where",
    (
        Flag("to", "text", "", "Folder to make."),
        Flag("form", "choice", "dense", "What the folder holds.", ("dense", "sparse")),
    ),
)
GROUPS = (run_models.MODEL, EXPORT)


def main(values):
    """Exports; see the module docstring."""
    if not values.to:
        raise UserError("No folder is named; give a new one with --to.")
    import importlib.metadata

    from sparse_dataflow.interchange import huggingface
    from sparse_dataflow.interchange.model_card import model_card

    trained = run_models.load(values)
    packages = ("sparse_dataflow", "jax", "safetensors")
    versions = {package: importlib.metadata.version(package) for package in packages}
    path = huggingface.write(
        values.to,
        values.form,
        trained.model,
        trained.params,
        trained.tables,
        trained.tokenizer,
        context=trained.context,
        card=model_card(trained, values.form, versions),
    )
    print(f"{trained.variant} after step {trained.step}: {path}")


if __name__ == "__main__":
    flags.run(main, __doc__, GROUPS)
