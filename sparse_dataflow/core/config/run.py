"""`RunConfig`: everything that decides what a run computes, and where."""

import dataclasses
import re
from typing import Any

from sparse_dataflow.core.config import remat, settings, settings_together
from sparse_dataflow.core.config.data import DataConfig
from sparse_dataflow.core.config.evolution_config import EvolutionConfig
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.parallel import ParallelConfig
from sparse_dataflow.core.config.settings import (
    ADOPTED,
    FRESH,
    MOST_SECONDS,
    MOST_STEPS,
    Readable,
    between,
    positive,
    setting,
    validate,
)
from sparse_dataflow.core.config.sizes import SIZES
from sparse_dataflow.core.config.sparsity import SparsityConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.files.errors import UserError

TWINS = ("no", "yes", "narrow")
PRUNE_BY = ("weights", "activations")
PRUNE_TO = ("blocks", "pattern")


@dataclasses.dataclass(frozen=True, repr=False)
class RunSettings(Readable):
    """How long a run takes, what it begins with and where it is kept.

    Attributes:
      minutes: training time where `training.steps` is 0.
      twin: True and False are "yes" and "no".
      prune_by: "activations" multiplies each input feature by the norm of its activations in
        `prune_batches` training batches (arXiv 2306.11695).
      prune_to: "pattern" keeps the function of a dense model (`interchange.feature_order`).  Its
        layouts are those of drawn weights, so programs are specialised to them.
      trackers: names in `training.monitoring.trackers`.  A resumed run imports no tracker that only
        its folder names.
    """

    scale: str = setting("", "Preset that the other settings begin with.", choices=tuple(SIZES))
    minutes: float = setting(
        2.0,
        "Training time of each model, in minutes; compiling and evaluating are not counted.",
        legal=positive(MOST_SECONDS),
    )
    twin: str = setting(
        "no",
        "Train the dense twin as well, for the same time; narrow adds a narrower dense model of "
        "the sparse model's FLOPs per token.",
        choices=TWINS,
    )
    init_from: str = setting(
        "",
        "Run folder, or Hugging Face directory of GPT-2, OPT, Llama, Mistral or Qwen, or its name "
        "on the hub (OWNER/NAME@REVISION), whose weights, shape and tokenizer the run begins with.",
        path=True,
        address=True,
    )
    prune_by: str = setting(
        "weights",
        "Score of the blocks of run.init_from that are stored: norm of the weights, or of the "
        "weights times the activations that they read.",
        choices=PRUNE_BY,
    )
    prune_to: str = setting(
        "blocks",
        "Blocks of run.init_from that are stored: blocks, the best of each weight; pattern, those "
        "of sparsity.pattern, after features exchange places so that the best weights are there.",
        choices=PRUNE_TO,
    )
    prune_batches: int = setting(
        8, "Training batches that run.prune_by=activations reads.", legal=between(1, MOST_STEPS)
    )
    out: str = setting(
        "",
        "Run folder to make, or an address such as gs://BUCKET/RUN; empty is runs/EXPERIMENT-DATE.",
        resumed=FRESH,
        path=True,
        address=True,
    )
    mirror: str = setting(
        "",
        "Folder or address for a second copy of every checkpoint; --resume of it continues the "
        "run. Empty makes none.",
        resumed=ADOPTED,
        path=True,
        address=True,
    )
    eval_every: int = setting(
        0,
        "Steps between evaluations on held-out documents; 0 is eight a run.",
        legal=between(0, MOST_STEPS),
        resumed=ADOPTED,
    )
    checkpoint_every: int = setting(
        0,
        "Steps between checkpoints; 0 is at every other evaluation.",
        legal=between(0, MOST_STEPS),
        resumed=ADOPTED,
    )
    trackers: str = setting(
        "tensorboard",
        "Comma list of what gets metrics and alerts: tensorboard, wandb, mlflow, MODULE:ATTRIBUTE; "
        "none is metrics.jsonl alone.",
        resumed=FRESH,
    )
    profile: str = setting(
        "",
        "START:STEPS traces STEPS steps after START with jax.profiler; empty is none.",
        resumed=FRESH,
    )
    profile_server: int = setting(
        0,
        "Port on 127.0.0.1 where a POST to /trace?seconds=5 traces the running job; 0 is none.",
        legal=between(0, 65535),
        resumed=FRESH,
    )
    stall_alert: float = setting(
        600.0,
        "Seconds without progress after which trackers get an alert; 0 is never.",
        legal=between(0, MOST_SECONDS),
        resumed=FRESH,
    )

    def __post_init__(self):
        if isinstance(self.twin, bool):
            object.__setattr__(self, "twin", "yes" if self.twin else "no")
        validate(self, "run")
        _ = self.profiled_steps  # Refuses an illegal one.

    @property
    def profiled_steps(self) -> range | None:
        """Numbers of done steps between which a trace runs; None without `profile`.

        Raises:
          UserError: `profile` is not START:STEPS.
        """
        if not self.profile:
            return None
        match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", self.profile)
        if match is None or int(match[2]) == 0:
            raise UserError(
                f"run.profile={settings.shown(self.profile)} is not legal; legal: START:STEPS, "
                "such as 10:5 for the 5 steps after step 10."
            )
        return range(int(match[1]), int(match[1]) + int(match[2]))


@dataclasses.dataclass(frozen=True, repr=False)
class RunConfig(Readable):
    """One run.  `presets.preset` makes one; `change` makes another of it.

    Attributes:
      model: the shape; its `linears` are empty, as `sparsity` says what is stored.
      sparsity: which blocks are stored; without projections the run trains a dense model alone.
      evolution: how the stored blocks change.
      training: optimizer, batch and length.
      data: corpus and tokenizer.
      parallel: devices and processes.
      run: time, start and folder.

    Examples:
        >>> config = sd.preset("3m").change(sparsity__block=32, training__steps=200)
        >>> config.training.steps, config.variants
        (200, ('sparse', 'dense'))
    """

    model: ModelConfig
    sparsity: SparsityConfig = dataclasses.field(default_factory=SparsityConfig)
    evolution: EvolutionConfig = dataclasses.field(default_factory=EvolutionConfig)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    run: RunSettings = dataclasses.field(default_factory=RunSettings)

    def __post_init__(self):
        if self.model.linears:
            raise UserError(
                "A RunConfig's model stores its weights densely; its sparsity says which "
                "projections are block-sparse."
            )
        self.sparsity.linears(self.model)
        if self.model.remat != remat.AUTO:
            remat.kinds(self.model.remat, self.model.num_layers)  # Refuses another number.
        sequence = self.training.sequence
        self.model.check_context(sequence, f"training.sequence={sequence}")
        settings_together.refuse(self)

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the models that the run trains."""
        if not self.sparsity.projections:
            return ("dense",)
        twins = {"no": (), "yes": ("dense",), "narrow": ("dense", "narrow")}
        return ("sparse", *twins[self.run.twin])

    def change(self, **changes: Any) -> "RunConfig":
        """This config with other values, as in `change(training__batch=16)`: `__` is a dot.

        Raises:
          UserError: no such setting, or a value that is not legal.
        """
        return settings.changed(
            self, {name.replace("__", ".", 1): value for name, value in changes.items()}
        )

    def without_auto(self) -> "RunConfig":
        """This config with one micro-batch and no remat where the planner would choose them."""
        model, training = self.model, self.training
        if model.remat == remat.AUTO:
            model = dataclasses.replace(model, remat="none")
        if not training.micro_batches:
            training = dataclasses.replace(training, micro_batches=1)
        return dataclasses.replace(self, model=model, training=training)

    def dense(self) -> "RunConfig":
        """This config without block-sparse projections."""
        return dataclasses.replace(
            self,
            sparsity=dataclasses.replace(self.sparsity, projections=()),
            evolution=EvolutionConfig(),
            run=dataclasses.replace(self.run, twin="no"),
        )

    def to_json(self) -> dict[str, dict[str, Any]]:
        """{part: {setting: value}}, as in config.json; `from_json` is its inverse."""
        return settings.to_json(self)

    @classmethod
    def from_json(cls, fields: Any) -> "RunConfig":
        """The config that `to_json` wrote; UserError where a part or setting does not fit."""
        return settings.from_json(cls, fields)
