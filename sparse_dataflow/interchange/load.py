"""Models from run folders and Hugging Face directories alike."""

import functools
from pathlib import Path

import jax

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.model.stacks import map_arrays
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.evaluation.run_files import read_config
from sparse_dataflow.evaluation.trained import NEWEST, Model
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import hub_models, huggingface
from sparse_dataflow.runs.run_config import LONGEST_SEQUENCE


def variants(folder: str | Path) -> tuple[str, ...]:
    """Returns the variants of a run; for a Hugging Face directory "sparse" or "dense" alone.

    Raises:
      UserError: the folder is neither, or see `hub_models.fetched`.
    """
    folder = hub_models.local_folder(folder)
    if huggingface.is_directory(folder):
        return ("sparse" if huggingface.is_sparse_form(folder) else "dense",)
    return read_config(folder).variants


def load(folder: str | Path, variant: str = "", checkpoint: str = NEWEST, mesh: str = "") -> Model:
    """Loads a model from a run folder or from a Hugging Face directory, such as `sd.save` writes.

    All bytes of a checkpoint are verified.  The folder is not changed; a run may be in progress.

    A directory is one of the architectures in `interchange.architectures`, or an export of this
    project in either form.

    Args:
      folder: run folder, Hugging Face directory, or name of a model on the hub, such as
        Qwen/Qwen3-0.6B or hf:gpt2@main.
      variant: "sparse", "dense" or "narrow"; "" for the first that the folder has.
      checkpoint: of a run: "newest", "best" (lowest held-out loss) or a step number.
      mesh: cuts the weights over all devices to generate, such as "tensor:4"; see
        `over_mesh.on_mesh`.  The model is then read into host memory first.

    Returns:
      The model. That of a directory has no record and 0 steps. Its context is that of its training
      where an export says so, else its longest sequence, up to 8,192 tokens.

    Raises:
      UserError: the folder is neither, or is damaged, or has no such variant or checkpoint; or
        the mesh is not legal here.

    Examples:
        >>> model = sd.init(sd.preset("pico").change(sparsity__block=16), jax.random.key(0))
        >>> again = sd.load(sd.save(model, os.path.join(tempfile.mkdtemp(), "model")))
        >>> bool(np.all(again.params["embed"]["tokens"] == model.params["embed"]["tokens"]))
        True
    """
    if mesh:
        from sparse_dataflow.evaluation.over_mesh import legal_cuts, on_mesh

        legal_cuts(mesh)
        # The whole model may have no room on the first device.
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            model = load(folder, variant, checkpoint)
        return on_mesh(model, mesh)
    folder = hub_models.local_folder(folder)
    names = variants(folder)
    if not huggingface.is_directory(folder):
        from sparse_dataflow.interchange.starting_point import load_run

        return load_run(folder, variant or names[0], checkpoint)
    if variant not in ("", *names):
        raise UserError(f"{folder} has no variant {variant!r}; legal: {', '.join(names)}.")
    if checkpoint != NEWEST:
        raise UserError(
            f"{folder} is a Hugging Face directory, which has no checkpoint {checkpoint!r}; "
            f"legal: {NEWEST}."
        )
    imported = huggingface.read(folder)
    # The arrays are aligned as XLA wants them, so that a CPU uses them without a copy.
    put = functools.partial(jax.device_put, may_alias=True)
    params = map_arrays(put, imported.params)
    return directory_model(folder, imported.model, imported.tokenizer, params)


def directory_model(folder: Path, model: ModelConfig, tokenizer: Tokenizer, params: dict) -> Model:
    """Returns the model of a Hugging Face directory.

    Args:
      params: see `Model`; {} where they are read in parts.
    """
    return Model(
        folder=folder,
        variant="sparse" if huggingface.is_sparse_form(folder) else "dense",
        model=model,
        params=params,
        tokenizer=tokenizer,
        step=0,
        training=TrainingConfig(sequence=_context(folder, model.longest)),
        record=None,
        facts={},
    )


def _context(folder, longest):
    """The context that an export was trained with, or else that of the model."""
    context = json_files.load(folder / huggingface.CONFIG).get("context")
    legal = type(context) is int and 1 <= context
    return min(longest, LONGEST_SEQUENCE, context if legal else longest)
