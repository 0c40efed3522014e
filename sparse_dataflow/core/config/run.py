"""`RunConfig`: everything that decides what a run computes, and where."""

import dataclasses
import re
from typing import Any

from sparse_dataflow.core.config import remat, settings
from sparse_dataflow.core.config.data import DataConfig
from sparse_dataflow.core.config.evolution_config import EvolutionConfig
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.parallel import ParallelConfig
from sparse_dataflow.core.config.projections import LOW_RANK
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


@dataclasses.dataclass(frozen=True, repr=False)
class RunSettings(Readable):
    """How long a run takes, what it begins with and where it is kept.

    Attributes:
      minutes: training time where `training.steps` is 0.
      twin: True and False are "yes" and "no".
      prune_by: "activations" multiplies each input feature by the norm of its activations in
        `prune_batches` training batches (arXiv 2306.11695).
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
        self._check_remat()
        sequence = self.training.sequence
        self.model.check_context(sequence, f"training.sequence={sequence}")
        if self.training.teacher and self.model.logit_cap:
            raise UserError(
                f"training.teacher with model.logit_cap={self.model.logit_cap:g}; legal with a "
                "teacher: 0."
            )
        if self.sparsity.pattern == LOW_RANK and self.sparsity.projections:
            self._check_low_rank()
        if self.evolution.method == "low_rank_tail" and not self.sparsity.rank:
            raise UserError(
                "evolution.method=low_rank_tail adds a term of sparsity.rank; legal: 1 or more."
            )
        if self.evolution.method == "shared_to_own" and self.run.init_from:
            raise UserError(
                "evolution.method=shared_to_own begins with one block for all layers, and the "
                "weights of run.init_from have one for each; legal with them: another method."
            )
        if self.evolution.method == "self_guided" and self.run.init_from:
            raise UserError(
                "evolution.method=self_guided begins with guides that are copies of drawn blocks; "
                "legal with run.init_from: another method."
            )
        if self.run.twin == "narrow" and self.run.init_from:
            raise UserError(
                "run.twin=narrow trains a narrower model, which the weights of run.init_from do "
                "not fit; legal with them: yes, no."
            )
        if self.run.prune_by == "activations" and not self.run.init_from:
            raise UserError(
                "run.prune_by=activations chooses blocks of given weights; legal with "
                "run.init_from."
            )
        if self.data.extend_vocabulary or self.training.new_rows_first:
            self._check_vocabulary()
        if self.data.loss == "answers":
            self._check_answers()
        if self.training.adapter_rank or self.training.frozen_dtype != "compute":
            self._check_adapters()
        if self.training.teacher:
            self._check_teacher()
        if self.parallel.executor == "relay":
            self._check_relay()

    def _check_vocabulary(self):
        count = self.data.extend_vocabulary
        if not count:
            raise UserError(
                f"training.new_rows_first={self.training.new_rows_first:g} trains the rows of "
                "data.extend_vocabulary first; legal without it: 0."
            )
        named = f"data.extend_vocabulary={count}"
        if not self.run.init_from:
            raise UserError(
                f"{named} adds tokens to those of given weights; legal with run.init_from. "
                "model.vocab_size is the size of a new tokenizer."
            )
        for path, value, legal in (
            ("data.loss", self.data.loss, "all"),
            # It freezes the embedding, which has the new rows.
            ("training.adapter_rank", self.training.adapter_rank, 0),
            # It has another tokenizer.
            ("training.teacher", self.training.teacher, ""),
        ):
            if value != legal:
                raise UserError(f"{path}={value} with {named}; legal with it: {legal or 'none'}.")
        if self.parallel.executor == "relay" and self.training.new_rows_first:
            raise UserError(
                f"training.new_rows_first={self.training.new_rows_first:g} with --executor=relay, "
                "which updates each section by itself; legal with it: 0."
            )

    def _check_teacher(self):
        for path, value, legal in (
            ("data.loss", self.data.loss, ("all",)),
            ("training.adapter_rank", self.training.adapter_rank, (0,)),
            # The forward passes of the teacher would be in the FLOPs that a narrow model gets.
            ("run.twin", self.run.twin, ("no", "yes")),
        ):
            if value not in legal:
                raise UserError(
                    f"training.teacher with {path}={value}; legal with it: "
                    f"{', '.join(map(str, legal))}."
                )
        if self.evolution.method == "rigl":
            raise UserError(
                "evolution.method=rigl measures gradients of the next tokens' loss, and "
                "training.teacher trains another; legal with it: every other method."
            )

    def _check_low_rank(self):
        """Refuses what needs stored blocks, and given weights, as factors are drawn."""
        for path, value, legal in (
            ("evolution.method", self.evolution.method, ("static", "shared_to_own")),
            ("sparsity.budget", self.sparsity.budget, ("uniform",)),
        ):
            if value not in legal:
                raise UserError(
                    f"{path}={value} with sparsity.pattern={LOW_RANK}, which stores two factors "
                    f"and no blocks; legal with it: {', '.join(legal)}."
                )
        if self.run.init_from:
            raise UserError(
                f"run.init_from with sparsity.pattern={LOW_RANK}, whose two factors begin drawn; "
                "legal with given weights: a pattern of blocks, or dense weights."
            )

    def _check_remat(self):
        executor = self.parallel.executor
        if self.model.remat != remat.AUTO:
            remat.kinds(self.model.remat, self.model.num_layers)  # Refuses another number.
        if executor in ("relay", "pipeline") and self.parallel.memory_limit:
            raise UserError(
                f"parallel.memory_limit={self.parallel.memory_limit} with --executor={executor}, "
                "whose blocks are all treated alike; legal with it: whole, auto."
            )

    def _check_answers(self):
        if not self.run.init_from:
            raise UserError(
                "data.loss=answers trains given weights to answer; legal with run.init_from."
            )
        if self.evolution.method == "rigl":
            raise UserError(
                "evolution.method=rigl measures gradients of all tokens, and data.loss=answers "
                "counts some; legal with it: every other method."
            )

    def _check_adapters(self):
        if not self.training.adapter_rank:
            raise UserError(
                f"training.frozen_dtype={self.training.frozen_dtype} stores the weights under "
                "adapters; legal with training.adapter_rank of 1 or more."
            )
        rank = f"training.adapter_rank={self.training.adapter_rank}"
        if not self.run.init_from:
            raise UserError(f"{rank} trains adapters of given weights; legal with run.init_from.")
        if self.evolution.method != "static":
            raise UserError(
                f"evolution.method={self.evolution.method} changes weights, which {rank} freezes; "
                "legal with it: static."
            )
        if self.sparsity.projections and self.run.twin != "no":
            raise UserError(
                f"run.twin={self.run.twin} trains another model, and {rank} one frozen model; "
                "legal with it: no."
            )

    def _check_relay(self):
        method = self.evolution.method
        if self.parallel.server_dir and method not in ("static", "set", "rigl"):
            raise UserError(
                f"evolution.method={method} changes the shapes of the weights, and the files of "
                "parallel.server_dir keep theirs; legal with it: static, set, rigl."
            )

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
