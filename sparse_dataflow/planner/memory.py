"""Memory estimate of training on one device, by category, and the largest scale that fits.

Master weights are float32.  Gradients and moments have the `state_dtype` of the training config;
AdamW has two moments, and Muon one for each stored weight of a projection.  With bfloat16 compute,
a working copy of the weights is added.  Only stored blocks count.  Training of adapters has the
frozen weights once, in the compute dtype, and all the others for the adapters alone.
Pure Python: importing this module loads no jax.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from sparse_dataflow.core.config.attention_settings import (
    DENSE_TOKENS,
    SEQUENTIAL,
    SHARED_NORM,
)
from sparse_dataflow.core.config.layer_groups import mean_multiplier, with_densest_layers
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import PROJECTIONS
from sparse_dataflow.core.config.sparsity import GROUPED_PATTERNS
from sparse_dataflow.core.config.training import BUILT_IN, TrainingConfig
from sparse_dataflow.core.training.cost import (
    DTYPE_BYTES,
    embeddings,
    parameter_count,
    side_count,
    stored_fractions,
)
from sparse_dataflow.hardware.chips import GIB, Chip

MASTER_BYTES = 4
ADAM_MOMENTS = 2
MUON_MOMENTS = 1
# Index and slot of every stored block, by output and by input, int32 (`LayoutTables`).
TABLE_BYTES_PER_BLOCK = 4 * 4

# Usable fraction of device memory; the rest is for the runtime and fragmentation.
USABLE = 0.9


def matrix_count(config: ModelConfig, projections: Sequence[str] = PROJECTIONS) -> int:
    """Counts the stored weights of projections, which Muon updates; see `parameter_count`."""
    fractions = stored_fractions(config)
    sizes = (
        math.prod(config.projection_shape(name)) * fractions[name] * config.stored_copies(name)
        for name in config.projections
        if name in projections
    )
    return sum(round(config.stored_layers * size) for size in sizes)


def term_count(config: ModelConfig) -> int:
    """Counts the matrices of added terms and of a side network, and the prompt vectors, which are
    all that a training of adapters changes."""
    shapes = {name: config.projection_shape(name) for name in config.projections}
    block = sum(config.linear(name).term_numbers(shape) for name, shape in shapes.items())
    added = config.prompt_vectors * config.d_model + side_count(config)
    return config.stored_layers * block + added


def block_and_rest(config: ModelConfig) -> tuple[int, int]:
    """Counts the parameters of a block and of all else in a model whose layers are alike."""
    shallow, deep = (parameter_count(dataclasses.replace(config, num_layers=n)) for n in (1, 2))
    # Parameters are linear in the number of layers.
    return deep - shallow, 2 * shallow - deep


def single_layer(config: ModelConfig) -> ModelConfig:
    """Returns the model with one layer, the densest."""
    return dataclasses.replace(with_densest_layers(config), num_layers=1)


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of training on one device, by category.

    Attributes:
      parameters: float32 master weights, and those that are frozen.
      working_copy: weights in the compute dtype, if that is not float32: of the whole model with
        remat "none", else of the embedding and one block.
      gradients: of one micro-batch, plus a float32 sum with gradient accumulation.
      moments: of the optimizer.
      layout_tables: index tables of block-sparse weights.
      activations: saved by the forward pass for the backward pass.
      working_set: temporaries of one block, and the head's input and gradient; or what Muon's
        updates need beyond the activations, which are free by then.
      logits: one chunk of float32 logits and its gradient.
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
        """Category -> bytes."""
        return dataclasses.asdict(self)

    @property
    def total(self) -> int:
        """Sum of all categories, in bytes."""
        return sum(self.categories.values())

    @property
    def state(self) -> int:
        """Bytes that do not depend on the batch: weights, working copy, gradients, moments."""
        return self.parameters + self.working_copy + self.gradients + self.moments

    def table(self) -> str:
        """Returns a text table with the GiB and the share of each category."""
        rows = {**self.categories, "total": self.total}
        return "\n".join(
            f"{name.replace('_', ' '):<14}{size / GIB:>12.3f} GiB{size / self.total:>8.1%}"
            for name, size in rows.items()
        )


def _int8_projections(config):
    return [n for n in config.projections if config.linear(n).frozen_dtype == "int8"]


def int8_count(config: ModelConfig) -> int:
    """Counts the weights in int8, of which products need a copy in the compute dtype: one of a
    layer at a time, or with remat "none" of all, for the backward pass."""
    return matrix_count(config, _int8_projections(config))


def frozen_bytes(config: ModelConfig) -> int:
    """Returns the bytes of the weights under adapters: matrices in the compute dtype, or in int8
    with float32 scales."""
    int8, small = _int8_projections(config), int8_count(config)
    scales = config.num_layers * sum(config.projection_shape(name)[1] for name in int8)
    matrices = embeddings(config) + matrix_count(config)
    vectors = parameter_count(config) - term_count(config) - matrices
    wide = (matrices - small) * DTYPE_BYTES[config.compute_dtype]
    return wide + small + (vectors + scales) * MASTER_BYTES


def gradient_bytes(accumulation, state_dtype: str):
    """Returns the bytes of gradient per parameter: of a micro-batch, plus the float32 sum."""
    return DTYPE_BYTES[state_dtype] + MASTER_BYTES * (accumulation > 1)


def moment_bytes(config: ModelConfig, parameters, matrices, state_dtype: str, optimizer: str):
    """Returns the bytes of the optimizer's state of so many parameters of a model, with `matrices`
    of `matrix_count`."""
    if optimizer not in BUILT_IN:
        return parameters * bytes_of_states(config, optimizer)
    moments = ADAM_MOMENTS * parameters
    if optimizer == "muon":
        moments = moments - (ADAM_MOMENTS - MUON_MOMENTS) * matrices
    return moments * DTYPE_BYTES[state_dtype]


@functools.cache
def bytes_of_states(config: ModelConfig, optimizer: str) -> float:
    """Returns the bytes per parameter of the states of an optimizer of `optim.by_weight`.

    They are those of the arrays that it makes, which only jax can tell.

    Raises:
      UserError: see `optim.factories.factory`.
    """
    # Inside: all other estimates must work where jax is not installed.
    import jax

    from sparse_dataflow.core.model import gpt
    from sparse_dataflow.core.optim import by_weight

    training = TrainingConfig(optimizer=optimizer)
    params = jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))
    states = jax.eval_shape(functools.partial(by_weight.init, config, training), params)
    arrays = jax.tree.leaves(states)
    size = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
    return size / sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def update_bytes(matrices, optimizer: str):
    """Returns the bytes of float32 updates that exist at once; AdamW's are never stored."""
    # The product with 0 keeps the shape of an array of plans.
    return MASTER_BYTES * matrices if optimizer == "muon" else 0 * matrices


def table_bytes(config: ModelConfig) -> int:
    """Returns the bytes of the index tables of all layers."""
    total = 0
    for name in config.projections:
        spec, sides = config.linear(name), config.projection_shape(name)
        size = config.num_layers * spec.weight.table_bytes(spec, sides)
        total += round(size * mean_multiplier(config))
    return total


@dataclasses.dataclass(frozen=True)
class ActivationBytes:
    """Bytes of activations per token.

    Attributes:
      saved: by one block for its backward pass.
      boundary: part of `saved` that tensor parallelism does not shard: the residual stream and norm
        outputs.
      working: temporaries of one block.
      ends: the head's input, norm and gradient.
    """

    saved: int
    boundary: int
    working: int
    ends: int


class BlockWidths(NamedTuple):
    """Features per token of the activations inside a block.

    Attributes:
      queries: of all query heads; also of attention's output.
      keys_values: of keys and values together.
      normed: what query and key norms save, 0 without them: their input.
      products: outputs of mlp_gate and mlp_in, of all experts of a token.
      hidden: those of the MLP that the backward pass reads.
    """

    queries: int
    keys_values: int
    normed: int
    products: int
    hidden: int


def block_widths(config: ModelConfig, kv_copies=1, expert_rows=None) -> BlockWidths:
    """Returns the widths of the activations inside a block, summed over its tensor-parallel chips.

    Args:
      kv_copies: chips that compute the same key/value head; see `mesh_axes.key_value_copies`.
      expert_rows: rows of the MLP per token; None for `ModelConfig.active_experts`.
    """
    queries = config.num_heads * config.head_width
    keys_values = 2 * config.kv_heads * config.head_width * kv_copies
    # Of queries and of keys, which are half of keys and values.
    normed = queries + keys_values // 2 if config.qk_norm else 0
    products, hidden = (2, 4) if config.gated_mlp else (1, 2)
    d_ff = (config.active_experts if expert_rows is None else expert_rows) * config.d_ff
    return BlockWidths(queries, keys_values, normed, products * d_ff, hidden * d_ff)


def activation_bytes(
    config: ModelConfig,
    sequence: int,
    fused_attention: bool = False,
    kv_copies=1,
    expert_rows=None,
) -> ActivationBytes:
    """Estimates the activations of a block under the config's remat, and those of the head.

    The counts follow XLA's buffer assignment for a scanned pre-norm block with
    `jax.nn.dot_product_attention` and tanh GELU in float32.  Remat "full" saves the block's input.
    "keep" adds the outputs that the backward pass reads (q, k, v, attention, attn_out and mlp_in,
    3 d + 2 d + d_ff in GPT-3), and float32 statistics of fused attention.  "none" saves 9 d + 2
    d_ff there (inputs and outputs of the norms, 4 d; q, k, v, 3 d; attention's output in two
    memory orders; GELU's input and output) and the scores twice, as logits and as probabilities.  A
    gated MLP saves two more of d_ff (gate and product).  XLA's attention repeats grouped keys and
    values, and saves its output in another order.  In bfloat16, XLA allocates up to a third
    more on a CPU, where it computes elementwise operations in float32.  "none" saves what is
    between two factors too.  `kv_copies` and `expert_rows` are those of `block_widths`.
    """
    compute = DTYPE_BYTES[config.compute_dtype]
    d, widths = config.d_model, block_widths(config, kv_copies, expert_rows)
    active = config.active_experts if expert_rows is None else expert_rows
    heads = widths.queries + widths.keys_values
    # Scores are float32; probabilities have the compute dtype.
    # Where no kernel runs, the scores of more tokens are computed in chunks (`ops.attention`).
    dense = not fused_attention and sequence <= DENSE_TOKENS
    scores = config.num_heads * sequence * (4 + compute) if dense else 0
    if config.kv_heads < config.num_heads and dense:
        scores += 3 * widths.queries * compute
    if config.attention_cap and dense:
        scores += 4 * config.num_heads * sequence
    before_norms = 2 * d if config.post_norms else 0
    # Norm outputs, and the sum after attention, that a sequential pre-norm block saves.
    absent = d * (2 if not config.pre_norms else config.residual == SHARED_NORM)
    absent += d * (config.residual != SEQUENTIAL)
    # Of each expert of a token, its input and its output.
    rows = 2 * active * d if config.experts else 0
    unfused = 4 * d + heads + 2 * widths.queries + widths.normed + widths.hidden + rows
    unfused += before_norms - absent
    unfused += sum(config.inner_width(name) for name in config.projections)
    whole_block = (unfused + 3 * active * config.d_ff) * compute + scores
    statistics = 4 * config.num_heads if fused_attention or sequence > DENSE_TOKENS else 0
    kept = 2 * d + heads + widths.queries + widths.products + rows // 2 + before_norms
    saved = {
        "full": d * compute,
        "keep": kept * compute + statistics,
        "none": unfused * compute + scores,
    }[config.remat]
    # "full": input; "keep": also attn_out's output; "none": also both sums and both norm outputs.
    boundary = {"full": d, "keep": 2 * d, "none": 5 * d - absent}[config.remat] * compute
    if config.side_width:
        # What the side network reads, and with "none" its state and hidden features.
        kept = d + (1 if config.remat == "full" else 6) * config.side_width
        return ActivationBytes(kept * compute, kept * compute, whole_block, 3 * d * compute)
    return ActivationBytes(saved, boundary, whole_block, 3 * d * compute)


def has_one_op_mlp(config: ModelConfig) -> bool:
    """Returns whether a block-sparse MLP is one op (`model.mlp`) of equal groups: on a TPU the
    hidden features are on the chip.  Gated MLPs are not counted."""
    patterns = {config.linear(name).pattern for name in ("mlp_in", "mlp_out")}
    plain = not (config.gated_mlp or config.experts)
    return config.has_fused_mlp and plain and patterns <= {*GROUPED_PATTERNS}


WIDEST_HEAD = 256
"""Widest head of the kernels; cuDNN's heads are also multiples of 8 wide."""


def runs_fused(config: ModelConfig, chip: Chip, host: bool = False) -> bool:
    """Returns whether attention of a model runs in a kernel: splash on TPUs, cuDNN on GPUs.

    Args:
      host: whether it is the CPU of this host.
    """
    if host:
        return False
    if chip.is_tpu:
        return config.head_width <= WIDEST_HEAD
    fits = config.head_width <= WIDEST_HEAD and config.head_width % 8 == 0
    return fits and not config.attention_cap and config.compute_dtype == "bfloat16"
