"""`RunConfig`: everything that decides what a run computes, and where; and its presets by scale."""

import dataclasses
import re

from sparse_dataflow.core.config import remat, settings
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.settings import (
    ADOPTED,
    ASKED,
    FRESH,
    MOST_SECONDS,
    MOST_SIZE,
    MOST_STEPS,
    Readable,
    between,
    positive,
    setting,
    validate,
)
from sparse_dataflow.core.config.sparsity import EvolutionConfig, SparsityConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.json_files import JsonObject
from sparse_dataflow.runs import compatibility
from sparse_dataflow.runs.families import SIZES
from sparse_dataflow.runs.parallel import ParallelConfig

TOKENIZERS = ("bpe", "gpt2", "none")
"""Tokenizers that are no directory and no name on the hub."""
LOSSES = ("all", "answers")


@dataclasses.dataclass(frozen=True, repr=False)
class DataConfig(Readable):
    """The corpus and its tokenizer.

    Attributes:
      tokenizer: "bpe" learns `model.vocab_size` tokens from the corpus. "none" takes
        `model.vocab_size` for the ids of a corpus of token ids.
      loss: the tokens that count in training and in held-out losses; see `data.examples`.
    """

    corpus: str = setting(
        "python_stdlib",
        "python_stdlib, a folder, file or address of text, a saved Hugging Face dataset, "
        "hf:OWNER/NAME, a tfds name such as c4/en, or a mixture such as books:0.7,code:0.3.",
        path=True,
        address=True,
    )
    column: str = setting(
        "",
        "Field or column with the text; empty is text, else the only one of strings.",
    )
    validation: str = setting(
        "",
        "A corpus that is held out instead of some of the documents of data.corpus.",
        path=True,
    )
    tokenizer: str = setting(
        "bpe",
        "bpe is trained on the corpus; gpt2 is GPT-2's own; DIR or hf:NAME is that of a Hugging "
        "Face directory or run folder; none is for corpora of token ids.",
        path=True,
    )
    extend_vocabulary: int = setting(
        0,
        "Tokens to add to the tokenizer of run.init_from, learned from data.corpus, of a mixture "
        "from its first corpus. Their rows begin as the mean of the tokens that they join.",
        legal=between(0, MOST_SIZE),
    )
    loss: str = setting(
        "all",
        'Tokens that the loss counts; answers: those of a .jsonl corpus of "prompt" and "answer", '
        'or "messages", which the chat template of run.init_from renders.',
        choices=LOSSES,
    )

    def __post_init__(self):
        validate(self, "data")
        if not self.corpus:
            raise UserError(
                "data.corpus is empty; legal: python_stdlib, a folder or file, a name or a mixture."
            )
        if not self.tokenizer:
            raise UserError(
                f"data.tokenizer is empty; legal: {', '.join(TOKENIZERS)}, DIR, hf:NAME."
            )


TWINS = ("no", "yes", "narrow")
PRUNE_BY = ("rebuild", "weights")
VARIANTS = ("sparse", "dense", "narrow")
"""Names of the models that runs train."""

PRUNE_TO = ("blocks", "pattern")
EVALUATED = ("part", "all")


@dataclasses.dataclass(frozen=True, repr=False)
class RunSettings(Readable):
    """How long a run takes, what it begins with and where it is kept.

    Attributes:
      minutes: training time where `training.steps` is 0.
      twin: True and False are "yes" and "no".
      prune_by: "rebuild" removes the blocks whose loss the other weights make up for best, and fits
        these to the outputs of the dense model (`pruning.rebuild`) on `prune_batches` training
        batches.
      prune_to: "pattern" keeps the function of a dense model (`interchange.feature_order`).  Its
        layouts are those of drawn weights, so programs are specialised to them.
      trackers: names in `monitoring.trackers`.  A resumed run imports no tracker that only
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
        "Train the dense twin as well, for the same time; narrow adds a narrower model without "
        "sparse weights, of the sparse model's FLOPs per token.",
        choices=TWINS,
    )
    init_from: str = setting(
        "",
        "Run folder, or Hugging Face directory or its name on the hub (OWNER/NAME@REVISION), whose "
        "weights, shape and tokenizer the run begins with.",
        path=True,
        address=True,
    )
    init_variant: str = setting(
        "",
        "Model of a run in run.init_from; empty is the one that this run's first model is named "
        "after, else the first that the run has.",
        choices=VARIANTS,
    )
    prune_by: str = setting(
        "rebuild",
        "How the stored blocks of run.init_from are chosen: rebuild, by the error that others "
        "cannot make up for, and fitted to the dense outputs; weights, by their norm.",
        choices=PRUNE_BY,
    )
    prune_to: str = setting(
        "blocks",
        "Blocks of run.init_from that are stored: blocks, the best of each weight; pattern, those "
        "of sparsity.pattern, after features exchange places so that the best weights are there.",
        choices=PRUNE_TO,
    )
    prune_batches: int = setting(
        8,
        "Training batches that run.prune_by=rebuild reads.",
        legal=between(1, MOST_STEPS),
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
        resumed=ASKED,
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
    keep_programs: bool = setting(
        True,
        "Keep compiled programs in the cache folder, up to 1 GiB, so that a later start does not "
        "compile them again. JAX_COMPILATION_CACHE_DIR names another folder.",
        resumed=FRESH,
    )
    evaluate: str = setting(
        "part",
        "Held-out text after the last step: part, 512 windows at equal distances, the same ones "
        "for all models; or all.",
        choices=EVALUATED,
        resumed=ADOPTED,
    )
    grace: float = setting(
        60.0,
        "Seconds after SIGTERM in which a step must end, so that the run saves; else it ends "
        "without.",
        legal=between(0, MOST_SECONDS),
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
    """One run.  `run_config.preset` makes one; `change` makes another of it.

    Attributes:
      model: the shape; its `linears` are empty, as `sparsity` says what is stored.
      sparsity: which blocks are stored; without projections the run trains a dense model alone.
      evolution: how the stored blocks change.
      training: optimizer, batch and length.
      data: corpus and tokenizer.
      parallel: devices and processes.
      run: time, start and folder.

    Raises:
      UserError: parts do not go together, or the model has `linears` of its own.

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
        # Called for its refusals: a config that cannot be resolved must not be made.
        self.sparsity.linears(self.model)
        if self.model.remat != remat.AUTO:
            remat.kinds(self.model.remat, self.model.num_layers)  # Refuses another number.
        sequence, vectors = self.training.sequence, self.training.prompt_vectors
        more = f" after training.prompt_vectors={vectors}" if vectors else ""
        name = f"training.sequence={sequence}{more}"
        # Prompt vectors take places of the context too.
        prompted = dataclasses.replace(self.model, prompt_vectors=vectors)
        prompted.check_context(prompted.row(sequence), name)
        compatibility.refuse(self)

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the models that the run trains."""
        if not self.sparsity.projections:
            return ("dense",)
        twins = {"no": (), "yes": ("dense",), "narrow": ("dense", "narrow")}
        return ("sparse", *twins[self.run.twin])

    def change(self, **changes: object) -> "RunConfig":
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

    def to_json(self) -> dict[str, JsonObject]:
        """{part: {setting: value}}, as in config.json; `from_json` is its inverse."""
        return settings.to_json(self)

    @classmethod
    def from_json(cls, fields: object) -> "RunConfig":
        """The config that `to_json` wrote; UserError where a part or setting does not fit."""
        parts = fields if isinstance(fields, dict) else {}
        sparsity = parts.get("sparsity")
        if isinstance(sparsity, dict) and "block_outputs" in sparsity:
            # An earlier version had the outputs of a block in a setting of their own.
            sparsity = dict(sparsity)
            if outputs := sparsity.pop("block_outputs"):
                sparsity["block"] = f"{sparsity.get('block')}x{outputs}"
            fields = {**parts, "sparsity": sparsity}
        return settings.from_json(cls, fields)


GPT2_VOCABULARY = 50257
"""Tokens of GPT-2's tokenizer: 256 bytes, 50,000 merges and the end of a text."""

LAPTOP_SCALES = ("pico", "3m", "nano", "micro", "mini")
"""Scales at which the dense twin is trained as well."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Training settings of a scale; the fields are those of `TrainingConfig`."""

    batch: int
    learning_rate: float
    sparse_rate: float
    vector_rate: float


RECIPES = {
    "pico": Recipe(8, 2e-3, 4, 8),
    "3m": Recipe(8, 1e-3, 4, 32),
    "nano": Recipe(8, 1e-3, 2, 2),
    "micro": Recipe(8, 1e-3, 2, 2),
    "mini": Recipe(8, 6e-4, 2, 2),
    "125m": Recipe(256, 6e-4, 2, 1),
    "350m": Recipe(256, 3e-4, 2, 1),
    "1.3b": Recipe(512, 2e-4, 2, 1),
    "6.7b": Recipe(1024, 1.2e-4, 2, 1),
    "13b": Recipe(1024, 1e-4, 2, 1),
    "22b": Recipe(1024, 1e-4, 2, 1),
    "175b": Recipe(1600, 6e-5, 2, 1),
    "1t": Recipe(1600, 6e-5, 2, 1),
    "llama3-1b": Recipe(128, 2e-4, 2, 1),
    "llama3-8b": Recipe(256, 1e-4, 2, 1),
    "qwen3-0.6b": Recipe(128, 3e-4, 2, 1),
    "qwen3-8b": Recipe(256, 1e-4, 2, 1),
}
"""Recipes by scale.  pico, 3m and nano: the lowest held-out loss of a sweep
(docs/evidence/quality.md).  micro and mini: scaled from nano.  125m and larger: batch and rate of
GPT-3 (arXiv 2005.14165, table 2.1), stored blocks at twice that rate.  Llama and Qwen: the rates of
GPT-3's nearest size, and batches of about its tokens."""

BLOCKS = {
    "pico": 16,
    "3m": 32,
    "125m": 32,
    **dict.fromkeys(("350m", "1.3b", "6.7b", "13b", "22b", "175b", "1t", "llama3-8b"), 128),
    **dict.fromkeys(("qwen3-0.6b", "qwen3-8b"), 128),
}
"""Side of a block by scale, where it is not `SparsityConfig.block`: blocks of 64 do not divide
pico, 3m and 125m into eighths, and TPUs multiply blocks of 128 twice as fast (`efficiency`)."""

LONGEST_SEQUENCE = 8192
"""Upper bound of a preset's training sequence, in tokens: the length that Llama 3 trains at."""

SUPAR_LEARNING_RATE = 5e-4
"""Peak of every model under SuPar, whatever its width and density (docs/evidence/quality.md).  With
the multipliers of the optimizer a dense model's matrices then learn at 0.13 / d_model."""

SUPAR_VECTOR_RATE = 16.0
"""`TrainingConfig.vector_rate` under SuPar."""


def preset(scale: str, *, compute_dtype: str = "float32") -> RunConfig:
    """The run of a named scale with its recipe: block-sparse at 1/8, beside its dense twin where
    the scale fits a laptop.  The planner settles micro-batches, remat and mesh.

    Args:
      scale: a name in `SIZES`.
      compute_dtype: dtype of activations; bfloat16 suits accelerators.

    Raises:
      UserError: no such scale.

    Examples:
        >>> sd.preset("13b").model.d_model
        5120
    """
    if scale not in SIZES:
        raise UserError(f"There is no scale {scale!r}; legal: {', '.join(SIZES)}.")
    size, recipe = SIZES[scale], RECIPES[scale]
    return RunConfig(
        model=dataclasses.replace(size, compute_dtype=compute_dtype, remat=remat.AUTO),
        sparsity=SparsityConfig(block=BLOCKS.get(scale, SparsityConfig().block)),
        # Zero micro-batches leave their number to the planner, as the remat above.
        training=TrainingConfig(
            sequence=min(size.longest, LONGEST_SEQUENCE), micro_batches=0, **vars(recipe)
        ),
        run=RunSettings(scale=scale, twin="yes" if scale in LAPTOP_SCALES else "no"),
    )


def rescaled(config: RunConfig, scale: str) -> RunConfig:
    """Another scale with every setting in which a config differs from its own scale's preset."""
    # Only the differences: the new scale's own batch, rates and block side must not be overwritten
    # by the old scale's.
    before, after = preset(config.run.scale).to_json(), config.to_json()
    changes = {
        f"{member}.{name}": getattr(getattr(config, member), name)
        for member, fields in after.items()
        for name, value in fields.items()
        if value != before[member][name]
    }
    return settings.changed(preset(scale), changes)


def supar(config: RunConfig) -> RunConfig:
    """A config under the SuPar parametrization (arXiv 2405.15743), with its learning rates."""
    return config.change(
        model__parametrization="supar",
        training__learning_rate=SUPAR_LEARNING_RATE,
        training__sparse_rate=1.0,
        training__vector_rate=SUPAR_VECTOR_RATE,
    )
