"""Models of this project as the model "sparse_dataflow" of lm-eval's own command line.

lm-eval finds it by the entry point `lm_eval.models` of setup.cfg. Releases up to 0.4.13 read no
entry points; `python -m sparse_dataflow.commands.lm_eval` is their `lm_eval` with this model.
"""

from lm_eval.api.registry import register_model

from sparse_dataflow.evaluation import harness, trained
from sparse_dataflow.interchange.load import load


@register_model("sparse_dataflow")
class SparseDataflowLM(harness.HarnessLM):
    """A model that `sd.load` reads, as `--model_args run=DIR,variant=dense,checkpoint=best`."""

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
          run: run folder, export or Hugging Face directory.
          variant: a variant of the run; empty for the first that the run has.
          checkpoint: of a run: "newest", "best" (held-out loss) or a step.
          batch_size: unused; batches have the tokens of a micro-batch of the training.
          max_batch_size: unused.
          device: unused; JAX chooses the device.

        Raises:
          UserError: see `interchange.load.load`.
        """
        super().__init__(*harness.functions(load(run, variant, str(checkpoint))))
