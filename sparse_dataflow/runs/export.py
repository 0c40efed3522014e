"""Exports of trained models, with their card."""

import importlib.metadata
import shutil
from pathlib import Path

from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import huggingface, peft
from sparse_dataflow.interchange.model_card import model_card


def export(
    trained: Model, to: str | Path, form: str = "dense", architecture: str = huggingface.AUTO
) -> Path:
    """Writes a model of a run as a Hugging Face directory; returns its path.

    Args:
      trained: the model, loaded from a run folder.
      to: folder to make; it must not exist.
      form: "dense", which `transformers` loads; "sparse", the stored blocks alone; or "adapter",
        the adapters for PEFT.  The first has adapters merged into its weights, the second has them
        as low-rank terms.
      architecture: of the dense form: a name in `interchange.architectures`, or "auto" for that of
        the weights that the run began with, or else the first that represents the model.

    Raises:
      UserError: the model is not of a run, the architecture cannot represent it, or the folder
        exists or cannot be written.
    """
    if trained.record is None:
        raise UserError(f"{trained.folder} is not a run folder, so there is nothing to export.")
    packages = ("sparse_dataflow", "jax", "safetensors")
    versions = {package: importlib.metadata.version(package) for package in packages}
    if form == "adapter":
        peft.refuse_other(trained)
        with huggingface.new_folder(Path(to).expanduser()) as partial:
            for path in peft.write(partial, trained):
                shutil.copymode(partial / peft.CONFIG, path)
            card = model_card(trained, form, versions)
            (partial / huggingface.CARD).write_text(card, encoding="utf-8")
        return Path(to).expanduser()
    return huggingface.write(
        to,
        form,
        trained.model,
        trained.params,
        trained.tables,
        trained.tokenizer,
        context=trained.context,
        card=model_card(trained, form, versions),
        architecture=huggingface.preferred(architecture, trained.record, trained.model),
    )
