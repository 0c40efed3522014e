"""Loads the trained model that an experiment's flags name."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from sparse_dataflow.commands import program_cache
from sparse_dataflow.core.config.settings import A_SHARE, setting
from sparse_dataflow.files.errors import UserError

if TYPE_CHECKING:
    from sparse_dataflow.evaluation.activation_sparsity import Share
    from sparse_dataflow.evaluation.trained import Model


@dataclasses.dataclass(frozen=True)
class ActivationOptions:
    """The flag of `evaluation.activation_sparsity`; a base of the options of experiments that apply
    a model."""

    activation_sparsity: str = setting(
        "0",
        "Share of each projection's inputs, the smallest, that count as zeros, or of each a share "
        "of its own, qkv:0.5,mlp_out:0.3. A CPU that decodes one text reads fewer rows of dense "
        "weights.",
    )

    @property
    def share(self) -> "Share":
        """The shares of zeros; 0.0 or {} for none.

        Raises:
          UserError: the text is no share, and no shares by projection.
        """
        words, is_share = A_SHARE
        pairs = [item.rpartition(":") for item in self.activation_sparsity.split(",")]
        try:
            shares = {name: float(number) for name, _, number in pairs}
        except ValueError:
            shares = {}
        mixed = "" in shares and len(pairs) > 1
        if mixed or len(shares) < len(pairs) or not all(map(is_share, shares.values())):
            raise UserError(
                f"--activation_sparsity={self.activation_sparsity} is not legal: it must be a "
                f"number {words}, or one for each projection, such as qkv:0.5,mlp_out:0.3."
            )
        return shares.get("", {name: share for name, share in shares.items() if share})


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Flags that name a trained model; a base of the options of experiments that load one."""

    run: str = setting(
        "",
        "Run folder, Hugging Face directory, GGUF file, or name on the hub; alone, the newest of "
        "runs/.",
        path=True,
    )
    variant: str = setting("", "Model of the run; empty is sparse where it has one.")
    checkpoint: str = setting("newest", "newest, best (held-out loss) or a step.")


def load(options: ModelOptions, mesh: str = "") -> "Model":
    """The model that the options name; for `mesh` see `interchange.load`.

    Raises:
      UserError: no run is named, or `interchange.load` refuses it.
    """
    from sparse_dataflow.interchange import load

    refuse_no_model(options.run)
    program_cache.keep_programs()
    return load.load(options.run, options.variant, options.checkpoint, mesh)


def refuse_no_model(run: str, flag: str = "--run") -> None:
    """Refuses what is neither a run folder nor a Hugging Face directory nor a name on the hub.

    Raises:
      UserError: naming the runs that are there.
    """
    from sparse_dataflow.commands import run_list
    from sparse_dataflow.interchange import hub_models, huggingface

    if not run:
        raise UserError(
            "No run is named; give a run folder, a Hugging Face directory or its name on the hub "
            f"with {flag}, or {flag} alone for the newest run; {run_list.runs_in_words()}."
        )
    if hub_models.hub_name(run) or hub_models.gguf_file(Path(run).expanduser()):
        return
    if not huggingface.is_directory(run):
        run_list.refuse_other_folder(flag, run)
