"""How a model is trained."""

import dataclasses
import re

from sparse_dataflow.core.config.model import DTYPES
from sparse_dataflow.core.config.projections import FROZEN_DTYPES
from sparse_dataflow.core.config.settings import (
    A_FRACTION,
    A_SHARE,
    ADOPTED,
    AT_LEAST_ZERO,
    MOST_SEQUENCES,
    MOST_SIZE,
    MOST_STEPS,
    Legal,
    Readable,
    between,
    positive,
    setting,
    shown,
    validate,
)
from sparse_dataflow.files.errors import UserError

BUILT_IN = ("adamw", "muon")
OPTIMIZERS = (*BUILT_IN, "lion", "adafactor", "schedule_free")
SCHEDULES = ("cosine", "linear", "wsd", "constant")
DECAYED = ("matrices", "projections", "all")
CAUSAL, MASKED = "causal", "masked"
OBJECTIVES = (CAUSAL, MASKED)
FEATURE_DTYPES = ("no", "int8", "bfloat16")

MOST_NARROW_B2 = 0.96
"""Largest b2 with moments in bfloat16: see `TrainingConfig.b1`."""
A_DECAY_RATE: Legal = ("from 0 to 1 - 2^-18", lambda n: 0 <= n <= 1 - 2**-18)
"""Float32 has 1 minus such a number to 1%.  Steps divide by it."""

LEAST_EPSILON = 2.0**-63
"""Smallest number whose square float32 has.  The squares of gradients that are smaller are 0, so a
smaller epsilon would divide larger numbers than itself."""

LEAST_SCHEDULE_FREE_B1 = 1e-3
"""Schedule-free learning divides a difference of weights by b1."""
_DIVISORS_SHOWN = 12


def is_factory(optimizer: str) -> bool:
    """Returns whether an optimizer is named MODULE:ATTRIBUTE."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", optimizer) is not None


@dataclasses.dataclass(frozen=True, repr=False)
class TrainingConfig(Readable):
    """How a model is trained.

    Attributes:
      optimizer: Muon is explained in `optim.muon`, factories in `optim.factories`.
      sparse_rate: the multiplier is a power of the density, so that 1 is 1 at every density.  The
        low-rank term of a weight has it too.
      micro_batches: 0 in a `RunConfig` that the planner has not settled, else 1 or more.
      warmup: of linear warm-up.
      warmup_steps: one number in the settings of one model; see `runs.variants.variants`.
      b1: its default and that of `b2` are GPT-3's (arXiv 2005.14165, appendix B).  They allow
        moments in bfloat16, as in DeepSeek-V3 (arXiv 2412.19437, section 3.3.2), rounded to
        nearest: bfloat16 rounds by at most 2^-8 = 0.4%, while a step moves the second moment by
        1 - b2 = 5% of its distance from the new square, and the first by 10%.  So the second
        moment stops within 8.5% of its float32 limit, the first within 4.1%, and both decay to
        zero without gradients.  With a b2 of 0.999 neither holds.
      final_rate: 0.1 is GPT-3's (arXiv 2005.14165, appendix B); 0 is lower for a fixed token
        budget (arXiv 2502.15938).
      state_dtype: masters, sums over micro-batches and all arithmetic are float32.
      skip_spikes: spikes are explained in `optim.loss_spikes`.
      objective: "masked" is BERT's (arXiv 1810.04805, section 3.1); see `data.masking`.
      adapter_rank: adapters are explained in `model.adapters`, also for prompt_vectors.
      side_width: side networks are explained in `model.side`.
      stored_features: explained in `training.features`.
      teacher: the loss is (1 - teacher_weight) times that of the next tokens, plus teacher_weight
        times KL(teacher || model) of their distributions (arXiv 1503.02531, at temperature 1).
      teacher_first: knowledge inheritance from a smaller teacher (CPM-2, arXiv 2106.10715).
    """

    steps: int = setting(
        0, "Optimizer steps; 0 is as many as run.minutes allows.", legal=between(0, MOST_STEPS)
    )
    batch: int = setting(8, "Sequences in an optimizer step.", legal=between(1, MOST_SEQUENCES))
    sequence: int = setting(128, "Tokens in a sequence.", legal=between(1, MOST_SIZE))
    micro_batches: int = setting(
        1,
        "Micro-batches of an optimizer step (gradient accumulation); with auto, which is 0, the "
        "planner chooses.",
        legal=between(0, MOST_SEQUENCES),
        resumed=ADOPTED,
        auto=0,
    )
    optimizer: str = setting(
        "adamw",
        f"{', '.join(OPTIMIZERS)}, or MODULE:ATTRIBUTE, a function with the argument "
        "learning_rate that returns an optax optimizer, such as optax:nadamw. muon orthogonalises "
        "the momentum of dense weights, stored blocks and groups; the rest has adamw.",
    )
    b1: float = setting(
        0.9, "Decay rate of the first moment; of lion, its share in a step.", legal=A_DECAY_RATE
    )
    b2: float = setting(
        0.95, "Decay rate of the second moment; of lion, of its momentum.", legal=A_DECAY_RATE
    )
    epsilon: float = setting(
        1e-8,
        "Added to the root of the second moment.",
        legal=(f"from {LEAST_EPSILON:.2g} to 1", lambda n: LEAST_EPSILON <= n <= 1),
    )
    learning_rate: float = setting(
        1e-3, "Peak of the schedule, for dense weights.", legal=positive(1e38)
    )
    schedule: str = setting(
        "cosine",
        "Learning rate after warm-up: cosine or linear to the last step; wsd, constant and then "
        "linear in the last fraction training.decay; or constant.",
        choices=SCHEDULES,
    )
    decay: float = setting(
        0.2,
        "Fraction of the steps, at the end, in which training.schedule=wsd falls.",
        legal=A_FRACTION,
    )
    sparse_rate: float = setting(
        1.0,
        "Learning-rate multiplier of block-sparse weights at density 1/8; scales with density.",
        legal=positive(1000),
    )
    vector_rate: float = setting(
        1.0,
        "Learning-rate multiplier of embeddings, biases, norms and gates.",
        legal=positive(1000),
    )
    warmup: float = setting(0.1, "Fraction of the steps spent in warm-up.", legal=A_SHARE)
    warmup_steps: tuple[int, ...] = setting(
        (),
        "Steps of warm-up of each model of the run, in their order, instead of training.warmup; "
        "another end of a run sets them.",
        legal=AT_LEAST_ZERO,
    )
    final_rate: float = setting(
        0.1,
        "End of the schedule, as a fraction of its peak.",
        legal=("in [0, 1]", lambda fraction: 0 <= fraction <= 1),
    )
    weight_decay: float = setting(
        0.1,
        "Decoupled weight decay of what training.decayed names.",
        legal=between(0, 100),
    )
    decayed: str = setting(
        "matrices",
        "What decays: matrices of projections, routers, embeddings and output layer; projections, "
        "without the last two; all, also biases, norms and gates.",
        choices=DECAYED,
    )
    clip: float = setting(1.0, "Largest global gradient norm.", legal=positive(10**12))
    state_dtype: str = setting(
        "float32",
        "Dtype of the moments and of a micro-batch's gradients; bfloat16 takes 10 bytes a "
        "parameter, float32 16; with muon 8 and 12.",
        choices=DTYPES,
    )
    skip_spikes: float = setting(
        0.0,
        "Skips a step whose loss is this many standard deviations above the mean of the last 128; "
        "after 4 in a row the run rolls back to a checkpoint. 6 is usual; 0 is never.",
        legal=between(0, 1000),
    )
    objective: str = setting(
        CAUSAL,
        "What the model predicts: causal, the next token from those before it; masked, hidden "
        "tokens from all others, with attention in both directions.",
        choices=OBJECTIVES,
    )
    mask_share: float = setting(
        0.15, "Share of a window's tokens that training.objective=masked hides.", legal=positive(1)
    )
    mask_replaced: float = setting(
        0.8, "Share of the hidden tokens that the mask token replaces.", legal=A_FRACTION
    )
    mask_random: float = setting(
        0.1, "Share of the hidden tokens that random ones replace; the rest stay.", legal=A_FRACTION
    )
    adapter_rank: int = setting(
        0,
        "Rank of low-rank adapters on all projections, trained on the frozen weights of "
        "run.init_from; 0 trains all weights.",
        legal=between(0, MOST_SIZE),
    )
    adapter_alpha: float = setting(
        16.0, "Adapters are multiplied by this over their rank.", legal=positive(10**6)
    )
    prompt_vectors: int = setting(
        0,
        "Trained vectors in front of each row of text, on the frozen weights of run.init_from; 0 "
        "is none.",
        legal=between(0, MOST_SIZE),
    )
    side_width: int = setting(
        0,
        "Features of a side network, which reads the frozen layers of run.init_from and is trained "
        "without gradients through them; 0 is none.",
        legal=between(0, MOST_SIZE),
    )
    stored_features: str = setting(
        "no",
        "Dtype in which the cache stores what a side network reads of the frozen layers, for later "
        "epochs and runs; no computes it in each step.",
        choices=FEATURE_DTYPES,
    )
    frozen_dtype: str = setting(
        "compute",
        "Dtype of the dense projections under adapters or a side network: compute is "
        "model.compute_dtype, int8 has a scale for each output.",
        choices=FROZEN_DTYPES,
    )
    new_rows_first: float = setting(
        0.0,
        "Fraction of the steps, at the start, that train only the rows of the tokens of "
        "data.extend_vocabulary; 0 trains all weights from the start.",
        legal=A_SHARE,
    )
    new_rows: tuple[int, ...] = setting(
        (), "First of these rows and their number; a run that begins sets it.", legal=AT_LEAST_ZERO
    )
    teacher: str = setting(
        "",
        "Run folder, Hugging Face directory or name on the hub, with the same tokenizer, whose "
        "prediction of the next token the model learns too; empty is none.",
        path=True,
        address=True,
    )
    teacher_weight: float = setting(
        0.5,
        "Weight of the divergence from training.teacher; the rest is the weight of the next "
        "tokens.",
        legal=A_FRACTION,
    )
    teacher_first: float = setting(
        0.0,
        "Fraction of the steps, at the start, in which training.teacher_weight falls linearly to "
        "0; 0 keeps it.",
        legal=A_SHARE,
    )
    seed: int = setting(
        0, "Draws the weights, data order and patterns.", legal=between(0, 2**32 - 1)
    )

    def __post_init__(self):
        validate(self, "training")
        if self.teacher_first and not self.teacher:
            raise UserError(
                f"training.teacher_first={self.teacher_first:g} needs a training.teacher; legal "
                "without one: 0."
            )
        self._check_optimizer()
        if self.mask_replaced + self.mask_random > 1:
            raise UserError(
                f"training.mask_replaced={self.mask_replaced:g} and training.mask_random="
                f"{self.mask_random:g} are more than all hidden tokens; legal: up to 1 together."
            )
        if self.freezes and self.optimizer == "muon":
            raise UserError(
                "training.optimizer=muon orthogonalises the weights of projections, which "
                "training.adapter_rank, training.prompt_vectors and training.side_width freeze; "
                "legal with it: adamw."
            )
        inner = "adapter_rank" if self.adapter_rank else "prompt_vectors"
        if self.side_width and getattr(self, inner):
            raise UserError(
                f"training.side_width={self.side_width} lets no gradient through the layers, which "
                f"training.{inner}={getattr(self, inner)} is trained by; legal with it: 0."
            )
        if self.stored_features != FEATURE_DTYPES[0] and not self.side_width:
            raise UserError(
                f"training.stored_features={self.stored_features} are those that a side network "
                f"reads; legal without training.side_width: {FEATURE_DTYPES[0]}."
            )
        if self.micro_batches and self.batch % self.micro_batches:
            divisors = [n for n in range(1, min(self.batch, 10**6) + 1) if self.batch % n == 0]
            more = ", ..." if len(divisors) > _DIVISORS_SHOWN else ""
            raise UserError(
                f"training.batch={self.batch} cannot be cut into training.micro_batches="
                f"{self.micro_batches} equal micro-batches; legal: "
                f"{', '.join(map(str, divisors[:_DIVISORS_SHOWN]))}{more}."
            )

    def _check_optimizer(self):
        named = f"training.optimizer={shown(self.optimizer)}"
        if self.optimizer not in OPTIMIZERS and not is_factory(self.optimizer):
            raise UserError(
                f"{named} is unknown. Legal: {', '.join(OPTIMIZERS)}, or MODULE:ATTRIBUTE, such as "
                "optax:nadamw."
            )
        if self.optimizer == "schedule_free" and self.b1 < LEAST_SCHEDULE_FREE_B1:
            raise UserError(
                f"training.b1={self.b1:g} with {named}, which divides by it; legal with it: at "
                f"least {LEAST_SCHEDULE_FREE_B1:g}."
            )
        if self.state_dtype == "float32":
            return
        if self.optimizer not in BUILT_IN:
            raise UserError(
                f"training.state_dtype={self.state_dtype} with {named}, whose state stays in "
                f"float32; legal with it: float32, or another optimizer: {', '.join(BUILT_IN)}."
            )
        if self.b2 > MOST_NARROW_B2:
            raise UserError(
                f"training.b2={self.b2:g} with training.state_dtype={self.state_dtype}, which "
                f"rounds away so small a step of a moment; legal: at most {MOST_NARROW_B2}, or "
                "float32."
            )

    @property
    def is_built_in(self) -> bool:
        """Whether the optimizer is AdamW or Muon, which `optim.optimizers` applies."""
        return self.optimizer in BUILT_IN

    @property
    def hides_tokens(self) -> bool:
        """Whether the model predicts hidden tokens, from both sides."""
        return self.objective == MASKED

    @property
    def warmup_stop(self) -> int:
        """First step (from 0) after warm-up; at most the last one."""
        steps = self.warmup_steps[0] if self.warmup_steps else round(self.warmup * self.steps)
        return min(steps, self.steps - 1)

    @property
    def plateau_stop(self) -> int:
        """First step (from 0) in which training.schedule=wsd falls."""
        return self.steps - max(1, round(self.decay * self.steps))

    @property
    def new_rows_steps(self) -> int:
        """Steps in which `new_rows` alone are trained; 0 without such rows."""
        return round(self.new_rows_first * self.steps) if self.new_rows else 0

    def teacher_share(self, step: float) -> float:
        """Returns the factor of `teacher_weight` in a step (from 0)."""
        if not self.teacher_first:
            return 1.0
        return max(0.0, 1 - step / (self.teacher_first * self.steps))

    @property
    def freezes(self) -> bool:
        """Whether the weights of run.init_from are frozen, and adapters, vectors or a side network
        trained."""
        return bool(self.adapter_rank or self.prompt_vectors or self.side_width)

    @property
    def adapter_scale(self) -> float:
        """Factor of every adapter: alpha / rank; 0 without adapters."""
        return self.adapter_alpha / self.adapter_rank if self.adapter_rank else 0.0

    @property
    def frozen_scale(self) -> float | None:
        """`adapter_scale`; None if all weights are trained."""
        return self.adapter_scale if self.freezes else None
