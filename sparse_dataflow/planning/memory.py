"""Parameters and bytes of training on one device, by category, and the scale that fits a machine.

Masters are float32; gradients and both Adam moments are what the training's `state_dtype` says.
Where `compute_dtype` is bfloat16 a working copy of weights is counted beside the masters.  Only
stored blocks are counted.  Pure Python: importing this module loads no jax.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from sparse_dataflow.errors import UserError
from sparse_dataflow.models.groups import with_densest_layers
from sparse_dataflow.models.sizes import PROJECTIONS, SIZES, LinearSpec, ModelConfig
from sparse_dataflow.planning.cost import stored_fractions
from sparse_dataflow.planning.hardware import GIB

MASTER_BYTES = 4
ADAM_MOMENTS = 2
# sparsity.layout.LayoutTables: index and slot of every stored block, by output and by input; int32.
TABLE_BYTES_PER_BLOCK = 4 * 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}

# Fraction of a device's memory that a plan may fill; the rest is the runtime's and fragmentation.
USABLE = 0.9
LAPTOP_SCALE = "nano"
LARGE_SCALES = ("125m", "350m", "1.3b", "6.7b", "13b", "22b", "175b", "1t")


def parameter_count(config: ModelConfig, stored_density: Mapping[str, float] | None = None) -> int:
    """Stored parameters of the model; exact where `stored_density` is that of its layouts.

    Embeddings (vocab_size d_model, and max_len d_model for learned positions; the head is tied and
    has none of its own), per block two norms (scale, and bias for layernorm), each projection's
    stored weights, its bias and its low-rank term (rank (in + out) and one gate), one final norm.

    Args:
      config: the model.
      stored_density: see `cost.stored_fractions`.

    Raises:
      UserError: an illegal `stored_density`.
    """
    fractions = stored_fractions(config, stored_density)
    norm = config.d_model * (2 if config.norm == "layernorm" else 1)
    positions = config.max_len if config.positions == "learned" else 0
    block, stored = 2 * norm, 0
    for name in PROJECTIONS:
        fan_in, fan_out = config.projection_shape(name)
        rank = config.linear(name).rank
        stored += round(config.num_layers * fan_in * fan_out * fractions[name])
        block += fan_out + (rank * (fan_in + fan_out) + 1 if rank else 0)
    embeddings = (config.vocab_size + positions) * config.d_model
    return embeddings + stored + config.num_layers * block + norm


def one_layer(config: ModelConfig) -> ModelConfig:
    """The model with one layer, of those that store most."""
    return dataclasses.replace(with_densest_layers(config), num_layers=1)


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes of training on one device, by category.

    Attributes:
      parameters: float32 masters.
      working_copy: weights in the compute dtype, where that is not float32: of the whole model
        where the backward keeps them (remat "none"), else of the embedding and one block at a time.
      gradients: of one micro-batch, and their float32 sum where several are accumulated.
      moments: Adam's two.
      layout_tables: index tables of block-sparse weights.
      activations: what the forward keeps for the backward.
      working_set: what one block needs while it computes, and the head's input and gradient.
      logits: one chunk of logits and its gradient, float32.
    """

    parameters: int
    working_copy: int
    gradients: int
    moments: int
    layout_tables: int
    activations: int
    working_set: int
    logits: int

    @property
    def categories(self) -> dict[str, int]:
        """Category -> bytes, in the order of the attributes."""
        return dataclasses.asdict(self)

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return sum(self.categories.values())

    @property
    def state(self) -> int:
        """Bytes of weights, their working copy, gradients and moments; no batch enters."""
        return self.parameters + self.working_copy + self.gradients + self.moments

    def table(self) -> str:
        """The plan as text, a line a category with its size in GiB and its share of the total."""
        rows = {**self.categories, "total": self.total}
        return "\n".join(
            f"{name.replace('_', ' '):<14}{size / GIB:>12.3f} GiB{size / self.total:>8.1%}"
            for name, size in rows.items()
        )


def training_bytes(
    config: ModelConfig,
    batch: int,
    sequence: int,
    *,
    stored_density: Mapping[str, float] | None = None,
    accumulation: int = 1,
    logits_chunk: int = 512,
    fused_attention: bool = False,
    state_dtype: str = "float32",
) -> MemoryPlan:
    """Bytes of one training step on one device that holds the whole model.

    Args:
      config: the model; `remat` and `compute_dtype` decide the activations.
      batch: sequences in one micro-batch on the device.
      sequence: tokens a sequence.
      stored_density: see `cost.stored_fractions`.
      accumulation: micro-batches a step; above 1 a second copy of the gradients accumulates them.
      logits_chunk: tokens whose logits exist at once in the chunked cross-entropy.
      fused_attention: attention whose score matrix never reaches memory (flash attention).
      state_dtype: see `training.optimizer.TrainingConfig`.

    Raises:
      UserError: batch, sequence, accumulation or logits_chunk below 1, or an illegal
        `stored_density`.
    """
    sizes = {"batch": batch, "sequence": sequence}
    sizes |= {"accumulation": accumulation, "logits_chunk": logits_chunk}
    for name, value in sizes.items():
        if value < 1:
            raise UserError(f"{name} {value} must be at least 1.")
    parameters = parameter_count(config, stored_density)
    copied = parameters
    if config.remat != "none":
        copied = parameter_count(one_layer(config), stored_density)
    tokens = batch * sequence
    compute = DTYPE_BYTES[config.compute_dtype]
    held = activation_bytes(config, sequence, fused_attention)
    return MemoryPlan(
        parameters=parameters * MASTER_BYTES,
        working_copy=copied * compute if compute != MASTER_BYTES else 0,
        gradients=parameters * gradient_bytes(accumulation, state_dtype),
        moments=parameters * moment_bytes(state_dtype),
        layout_tables=table_bytes(config, stored_density),
        activations=tokens * config.num_layers * held.kept,
        working_set=tokens * (held.working + held.ends),
        logits=2 * min(tokens, logits_chunk) * config.vocab_size * 4,
    )


def of_training(config: ModelConfig, training, fused_attention: bool = False) -> MemoryPlan:
    """`training_bytes` of a model that is trained as a `TrainingConfig` says."""
    return training_bytes(
        config,
        training.batch // training.micro_batches,
        training.sequence,
        accumulation=training.micro_batches,
        fused_attention=fused_attention,
        state_dtype=training.state_dtype,
    )


def by_turns(plans: Sequence[MemoryPlan]) -> int:
    """Bytes of several trainings that make their steps by turns on one device: the masters, moments
    and tables of all stay, a step's own memory is there once, the largest."""
    stays = [plan.parameters + plan.moments + plan.layout_tables for plan in plans]
    return sum(stays) + max(plan.total - kept for plan, kept in zip(plans, stays))


def gradient_bytes(accumulation, state_dtype: str):
    """Bytes of a parameter's gradient: that of a micro-batch, and the sum of several."""
    return DTYPE_BYTES[state_dtype] + MASTER_BYTES * (accumulation > 1)


def moment_bytes(state_dtype: str) -> int:
    """Bytes of a parameter's moments."""
    return ADAM_MOMENTS * DTYPE_BYTES[state_dtype]


def table_bytes(config: ModelConfig, stored_density: Mapping[str, float] | None = None) -> int:
    """Bytes of the index tables of all layers; see `cost.stored_fractions`."""
    fractions = stored_fractions(config, stored_density)
    total = 0
    for name in PROJECTIONS:
        spec = config.linear(name)
        if spec.kind == "block_sparse":
            fan_in, fan_out = config.projection_shape(name)
            weights = config.num_layers * fan_in * fan_out * fractions[name]
            total += round(weights / spec.block**2) * TABLE_BYTES_PER_BLOCK
    return total


@dataclasses.dataclass(frozen=True)
class ActivationBytes:
    """Bytes a token of what the forward pass keeps, and of the memory that it works in.

    Attributes:
      kept: by one block for its backward pass, of which `boundary` has the model's width at the
        borders of its products: what cutting a layer's products leaves whole.
      boundary: see `kept`.
      working: while one block computes.
      ends: the head's input, norm and gradient.
    """

    kept: int
    boundary: int
    working: int
    ends: int


def activation_bytes(
    config: ModelConfig, sequence: int, fused_attention: bool = False
) -> ActivationBytes:
    """What blocks keep under the config's remat, one block's working set, and the head's.

    The counts are those of XLA's buffer assignment for a scanned pre-norm block with
    `jax.nn.dot_product_attention` and tanh GELU in float32: a block under remat "full" keeps its
    input; "dots" keeps as well the projections' outputs that the backward reads (qkv 3 d,
    attn_out d, mlp_in d_ff); "none" keeps 12 d + 2 d_ff (norms, q, k, v in both layouts, GELU's
    input and output) and the scores twice, as logits and as probabilities.  In bfloat16 XLA
    allocates up to a third more on a CPU, where it widens elementwise operations to float32.
    """
    compute = DTYPE_BYTES[config.compute_dtype]
    d, d_ff = config.d_model, config.d_ff
    # Scores are computed in float32; the second copy has the operands' dtype.
    scores = 0 if fused_attention else config.num_heads * sequence * (4 + compute)
    whole_block = (12 * d + 5 * d_ff) * compute + scores
    kept = {
        "full": d * compute,
        "dots": (5 * d + d_ff) * compute,
        "none": whole_block - 3 * d_ff * compute,
    }[config.remat]
    # The input; with "dots" attn_out's output too; with "none" both sums, both norms' outputs too.
    boundary = {"full": 1, "dots": 2, "none": 5}[config.remat] * d * compute
    return ActivationBytes(kept, boundary, whole_block, 3 * d * compute)


def scale_plan(scale: str, linears: Mapping[str, LinearSpec] | None = None) -> MemoryPlan:
    """The least memory in which a scale trains on one device, unsharded.

    One sequence of full length a micro-batch, bfloat16 compute with float32 masters, full remat: a
    run that is chosen by this plan has to start from these settings.

    Args:
      scale: a key of SIZES.
      linears: projection name -> LinearSpec for a sparse model; dense where not given.

    Raises:
      UserError: an unknown scale.
    """
    _legal_scale(scale)
    config = dataclasses.replace(
        SIZES[scale], linears=dict(linears or {}), remat="full", compute_dtype="bfloat16"
    )
    return training_bytes(config, batch=1, sequence=config.max_len)


def largest_scale_that_fits(
    memory_bytes: int,
    linears: Mapping[str, LinearSpec] | None = None,
    up_to: str = LARGE_SCALES[-1],
) -> str:
    """The largest of LARGE_SCALES, up to `up_to`, whose `scale_plan` fits; "nano" where none does.

    Raises:
      UserError: `up_to` is not one of LARGE_SCALES.
    """
    if up_to not in LARGE_SCALES:
        raise UserError(f"scale {up_to!r} is not large; legal: {', '.join(LARGE_SCALES)}.")
    candidates = LARGE_SCALES[: LARGE_SCALES.index(up_to) + 1]
    fitting = [s for s in candidates if scale_plan(s, linears).total <= memory_bytes]
    return fitting[-1] if fitting else LAPTOP_SCALE


def choose_scale(
    memory_bytes: int | None,
    backend: str,
    linears: Mapping[str, LinearSpec] | None = None,
    up_to: str = "13b",
) -> str:
    """The scale that `--scale=auto` stands for.

    Args:
      memory_bytes: of one device; None where it is not known, which chooses "nano".
      backend: "cpu", "gpu", "tpu", ... as `jax.default_backend()` names it.  A CPU runs "nano"
        whatever its memory: time is what it lacks.
      linears: as in `scale_plan`.
      up_to: the experiment's own scale, which is never exceeded.

    Returns:
      "nano", or the largest scale that fits into 90% of the memory.
    """
    if backend == "cpu" or memory_bytes is None:
        return LAPTOP_SCALE
    return largest_scale_that_fits(int(memory_bytes * USABLE), linears, up_to)


def scale_message(
    memory_bytes: int,
    scale: str,
    linears: Mapping[str, LinearSpec] | None = None,
    target: str = "13b",
) -> str:
    """One line on which scale runs, and why it is not `target`.

    Args:
      memory_bytes: of this machine's device, or host where it is a CPU.
      scale: the scale that runs.
      linears: as in `scale_plan`, of the experiment.
      target: the scale that the experiment is about.

    Raises:
      UserError: an unknown scale.
    """
    _legal_scale(scale)
    need = scale_plan(target, linears).total
    # A CPU with memory enough still gets the laptop scale; without a reason the line would puzzle.
    reason = ", but it is too slow for it" if need <= memory_bytes * USABLE else ""
    line = (
        f"{target.upper()} in training needs {_gib(need, math.ceil)} GiB; "
        f"this machine has {_gib(memory_bytes, math.floor)}"
    )
    if scale == target:
        return f"{line}: running the '{scale}' scale"
    return f"{line}{reason}: running the '{scale}' scale; on a pod pass --scale={target}"


def _gib(size: int, rounding) -> str:
    """Whole GiB, one decimal below 10; rounded towards what promises less."""
    gib = size / GIB
    return f"{rounding(gib)}" if gib >= 10 else f"{rounding(gib * 10) / 10}"


def _legal_scale(scale: str) -> None:
    if scale not in SIZES:
        raise UserError(f"scale {scale!r} is unknown; legal: {', '.join(SIZES)}.")
