"""Runs as the model "sparse_dataflow" of lm-eval's own command line.

lm-eval finds it by the entry point `lm_eval.models` of setup.cfg. Releases up to 0.4.13 read no
entry points; `python -m sparse_dataflow.evaluation` is their `lm_eval` with this model.
"""

from lm_eval.api.registry import register_model

from sparse_dataflow.evaluation import harness, trained
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.training.run_files import read_config


@register_model("sparse_dataflow")
class RunLM(harness.HarnessLM):
    """A model of a run folder, as `--model_args run=DIR,variant=dense,checkpoint=best` names it."""

    def __init__(
        self,
        run: str,
        variant: str = "",
        checkpoint: str = trained.NEWEST,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
    ):
        """Loads the model.

        Args:
          run: run folder.
          variant: a variant of the run; empty for the first that the run has.
          checkpoint: "newest", "best" (held-out loss) or a step.
          batch_size: unused; batches have the tokens of a micro-batch of the training.
          max_batch_size: unused.
          device: unused; JAX chooses the device.

        Raises:
          UserError: see `trained.load`.
        """
        variant = variant or read_config(run).variants[0]
        model = trained.load(run, variant, str(checkpoint))
        if model.training.adapter_rank:
            raise UserError(
                f"{run} has adapters without the weights that they are for; legal here: the folder "
                "that experiments.export writes, or experiments.evaluate, which reads both."
            )
        super().__init__(*harness.functions(model))
