"""How a model is trained."""

import dataclasses

from sparse_dataflow.core.config.model import DTYPES
from sparse_dataflow.core.config.projections import FROZEN_DTYPES
from sparse_dataflow.core.config.settings import (
    A_FRACTION,
    A_SHARE,
    AT_LEAST_ZERO,
    MOST_SEQUENCES,
    MOST_SIZE,
    MOST_STEPS,
    Readable,
    between,
    positive,
    setting,
    validate,
)
from sparse_dataflow.files.errors import UserError

OPTIMIZERS = ("adamw", "muon")
_DIVISORS_SHOWN = 12


@dataclasses.dataclass(frozen=True, repr=False)
class TrainingConfig(Readable):
    """How a model is trained.

    Attributes:
      optimizer: Muon is explained in `optim.muon`.
      sparse_rate: the multiplier is a power of the density, so that 1 is 1 at every density.  The
        low-rank term of a weight has it too.
      micro_batches: 0 in a `RunConfig` that the planner has not settled, else 1 or more.
      warmup: of linear warm-up.
      final_rate: 0.1 is GPT-3's (arXiv 2005.14165, appendix B); 0 is lower for a fixed token
        budget (arXiv 2502.15938).
      state_dtype: masters, sums over micro-batches and all arithmetic are float32.
      skip_spikes: spikes are explained in `optim.loss_spikes`.
      adapter_rank: adapters are explained in `model.adapters`.
      teacher: the loss is (1 - teacher_weight) times that of the next tokens, plus teacher_weight
        times KL(teacher || model) of their distributions (arXiv 1503.02531, at temperature 1).
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
        auto=0,
    )
    optimizer: str = setting(
        "adamw",
        "muon: orthogonalised momentum for dense weights, stored blocks and groups; embeddings, "
        "vectors and low-rank terms have adamw.",
        choices=OPTIMIZERS,
    )
    learning_rate: float = setting(
        1e-3, "Peak of the warm-up and cosine schedule, for dense weights.", legal=positive(1e38)
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
    final_rate: float = setting(
        0.1,
        "End of the cosine schedule, as a fraction of its peak.",
        legal=("in [0, 1]", lambda fraction: 0 <= fraction <= 1),
    )
    weight_decay: float = setting(
        0.1,
        "Decoupled decay of matrices; biases, norms and gates have none.",
        legal=between(0, 100),
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
    adapter_rank: int = setting(
        0,
        "Rank of low-rank adapters on all projections, trained on the frozen weights of "
        "run.init_from; 0 trains all weights.",
        legal=between(0, MOST_SIZE),
    )
    adapter_alpha: float = setting(
        16.0, "Adapters are multiplied by this over their rank.", legal=positive(10**6)
    )
    frozen_dtype: str = setting(
        "compute",
        "Dtype of the dense projections under adapters: compute is model.compute_dtype, int8 has "
        "a scale for each output.",
        choices=FROZEN_DTYPES,
    )
    new_rows_first: float = setting(
        0.0,
        "Share of the steps, the first ones, that train the rows of the tokens of "
        "data.extend_vocabulary alone; 0 trains all weights from the start.",
        legal=A_SHARE,
    )
    new_rows: tuple[int, ...] = setting(
        (), "First of these rows and their number; a run that begins sets it.", legal=AT_LEAST_ZERO
    )
    teacher: str = setting(
        "",
        "Run folder, Hugging Face directory or name on the hub, with the same tokenizer, whose "
        "distribution of the next token the model learns too; empty is none.",
        path=True,
        address=True,
    )
    teacher_weight: float = setting(
        0.5,
        "Weight of the divergence from training.teacher; next tokens have the rest.",
        legal=A_FRACTION,
    )
    seed: int = setting(
        0, "Draws the weights, data order and patterns.", legal=between(0, 2**32 - 1)
    )

    def __post_init__(self):
        validate(self, "training")
        if self.adapter_rank and self.optimizer == "muon":
            raise UserError(
                f"training.optimizer=muon orthogonalises the weights of projections, which "
                f"training.adapter_rank={self.adapter_rank} freezes; legal with it: adamw."
            )
        if self.micro_batches and self.batch % self.micro_batches:
            divisors = [n for n in range(1, min(self.batch, 10**6) + 1) if self.batch % n == 0]
            more = ", ..." if len(divisors) > _DIVISORS_SHOWN else ""
            raise UserError(
                f"training.batch={self.batch} cannot be cut into training.micro_batches="
                f"{self.micro_batches} equal micro-batches; legal: "
                f"{', '.join(map(str, divisors[:_DIVISORS_SHOWN]))}{more}."
            )

    @property
    def new_rows_steps(self) -> int:
        """Steps in which `new_rows` alone are trained; 0 without such rows."""
        return round(self.new_rows_first * self.steps) if self.new_rows else 0

    @property
    def adapter_scale(self) -> float:
        """Factor of every adapter: alpha / rank."""
        return self.adapter_alpha / self.adapter_rank
