"""One trained model of a run, as an experiment's flags name it."""

from experiments.command_line import Flag, Group
from sparse_dataflow.files.errors import UserError

MODEL = Group(
    "Model",
    "which trained model",
    (
        Flag("run", "text", "", "Run folder."),
        Flag("variant", "text", "", "Model of the run; empty is sparse where it has one."),
        Flag("checkpoint", "text", "newest", "newest, best (held-out loss) or a step."),
    ),
)


def load(values):
    """The `Trained` of --run, --variant and --checkpoint.

    Raises:
      UserError: no run is named, or `trained.load` refuses it.
    """
    from sparse_dataflow.evaluation import trained

    if not values.run:
        raise UserError("No run is named; give a run folder with --run.")
    names = list(trained.read_config(values.run)["variants"])
    chosen = values.variant or ("sparse" if "sparse" in names else names[0])
    return trained.load(values.run, chosen, values.checkpoint)
