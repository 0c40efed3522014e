"""FLOPs of a training step by section, the FLOP ceiling of sparsity, and MFU.

Counting rules of the project:

- A product of [m, k] and [k, n] has 2 m k n FLOPs.  The backward pass has twice the forward FLOPs.
- A block-sparse projection counts its stored blocks, a low-rank one its two factors.  A low-rank
  term `x A B` and a Hadamard transform as two products, count in the projection.
- A projection of experts counts the experts that a token has.  Their padding does not count.  The
  router is a section.
- Embedding lookups, norms, biases, GELU, softmax and AdamW count as 0, because they are
  memory-bound and MFU measures the matrix units.  Muon's products are `orthogonalization_flops`.
- Attention is Q Kᵀ and A V.  Its causal half counts everywhere, which is what kernels compute, and
  of it the sliding window or the blocks of its layout; both halves if the model is bidirectional.
  (PaLM, arXiv 2204.02311, appendix B, counts the whole square.)
- A depth schedule leaves blocks out of a step: FLOPs count the share of the blocks that take part.
- With adapters or prompt vectors, the backward pass has no gradient of the frozen weights: half of
  its FLOPs there.
- With a side network, it has the side network and the head alone.
- Prompt vectors are computed as tokens.  Their FLOPs count in those of the text behind them.
- Rematerialised FLOPs are *hardware* FLOPs, not *model* FLOPs, and do not count (arXiv 2205.05198,
  section 6.2).

Pure Python: importing this module loads no jax.
"""

import dataclasses
import math
from collections.abc import Mapping

from sparse_dataflow.core.config.attention_settings import (
    EACH_HEAD,
    SLIDING,
)
from sparse_dataflow.core.config.layer_groups import mean_multiplier
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import MLP, PROJECTIONS
from sparse_dataflow.core.ops.hadamard import factors
from sparse_dataflow.core.optim import muon
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import Chip

BACKWARD_PER_FORWARD = 2
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclasses.dataclass(frozen=True)
class SectionFlops:
    """FLOPs per token by section, summed over layers.

    Attributes:
      sections: name -> model FLOPs per token, in the order of execution: "embed" (0, a lookup),
        each projection of the model, "attention" (Q Kᵀ and A V), "router" of a model with experts,
        and "head" (logits).
    """

    sections: Mapping[str, float]

    @property
    def attention(self) -> float:
        """FLOPs per token of Q Kᵀ and A V."""
        return self.sections["attention"]

    @property
    def head(self) -> float:
        """FLOPs per token of the logits."""
        return self.sections["head"]

    @property
    def total(self) -> float:
        """Model FLOPs per token: sum of the sections."""
        return sum(self.sections.values())

    @property
    def projections(self) -> float:
        """FLOPs per token of the projections, which sparsity can reduce."""
        return sum(self.sections.get(name, 0.0) for name in PROJECTIONS)

    @property
    def projection_share(self) -> float:
        """Fraction of `total` in the projections, in (0, 1)."""
        return self.projections / self.total


def stored_fractions(config: ModelConfig) -> dict[str, float]:
    """Returns projection name -> stored fraction of its weight, averaged over layers, in (0, 1]."""
    mean, fractions = mean_multiplier(config), {}
    for name in config.projections:
        spec, sides = config.linear(name), config.projection_shape(name)
        fractions[name] = spec.weight.stored(spec, sides) / math.prod(sides)
        if spec.weight.stores_blocks:
            fractions[name] *= mean
    return fractions


def flops_per_token(
    config: ModelConfig,
    sequence: int,
    *,
    training: bool = True,
    adapters: bool = False,
    depth: float = 1.0,
) -> SectionFlops:
    """Returns the FLOPs per token of a training step or forward pass.

    Args:
      config: the model.
      sequence: tokens of a sequence, which attention's FLOPs grow with.
      training: whether to count forward and backward pass; False counts the forward pass.
      adapters: whether training freezes everything but low-rank terms and prompt vectors.
      depth: mean share of the blocks that take part in a step; see `DepthSchedule`.

    Raises:
      UserError: `sequence` is below 1.

    Examples:
        >>> config = sd.ModelConfig(2, 128, 2, 512, vocab_size=512, max_len=64)
        >>> dense = sd.flops_per_token(config, sequence=64)
        >>> spec = sd.LinearSpec("block_sparse", density=0.125, block=16)
        >>> sparse = sd.flops_per_token(config.with_linears(spec), sequence=64)
        >>> round(dense.total / sparse.total, 1)
        3.6
    """
    if sequence < 1:
        raise UserError(f"sequence is {sequence} tokens; legal: 1 or more.")
    row = config.row(sequence)
    fractions, layers = stored_fractions(config), depth * config.num_layers
    forward, trained = {"embed": 0.0}, {}
    for name in config.projections:
        if name == "attn_out":
            width = config.num_heads * config.head_width
            # Q K^T and A V: for each visible key a product of `width` features.
            forward["attention"] = 2 * 2.0 * layers * visible_keys(config, row) * width
        fan_in, fan_out = config.projection_shape(name)
        spec = config.linear(name)
        weights = fan_in * fan_out * fractions[name]
        added = spec.term_numbers((fan_in, fan_out))
        weights += added
        trained[name] = 2.0 * layers * added
        if spec.hadamard:
            # Each feature meets one row of both Kronecker factors.
            weights += fan_in * sum(factors(spec.hadamard))
        active = config.active_experts if name in MLP else 1
        forward[name] = 2.0 * layers * weights * active
    if config.experts:
        forward["router"] = 2.0 * layers * config.d_model * (config.experts + config.shared_gate)
    # A bias of the output layer is the weight of one more input (`gpt.output_layer`).
    forward["head"] = 2.0 * (config.d_model + config.output_bias) * config.vocab_size
    # Attention has no weights, so its backward pass is always whole.
    trained = {**trained, "attention": forward["attention"]} if adapters else forward
    passed, backward = forward, BACKWARD_PER_FORWARD / 2 if training else 0
    if config.side_width:
        block, head = (_side_count(config, section) for section in ("block", "head"))
        forward["side"] = 2.0 * (layers * block + head)
        # No gradient passes through the layers.
        trained, passed = {"side": forward["side"]}, {n: forward[n] for n in ("side", "head")}

    def section(name):
        back = passed.get(name, 0.0) + trained.get(name, 0.0)
        return row / sequence * (forward[name] + backward * back)

    return SectionFlops({name: section(name) for name in forward})


def _side_count(config, section):
    return sum(math.prod(shape) for shape in config.side_shapes(section).values())


def side_count(config: ModelConfig) -> int:
    """Counts the parameters of a side network, which are all matrices."""
    return config.stored_layers * _side_count(config, "block") + _side_count(config, "head")


def visible_keys(config: ModelConfig, sequence: int) -> float:
    """Returns the mean keys that a query sees, over the layers: half of the sequence, or fewer
    under a window or in the blocks of a layout; twice as many in both directions."""
    sliding = sum(config.layer_type(i) == SLIDING for i in range(config.num_layers))
    window = min(config.window or sequence, sequence)
    # Mean over positions of min(position, window): the first ones see fewer keys.
    within = window - window**2 / (2 * sequence)
    if config.blocks:
        from sparse_dataflow.core.layouts.attention_blocks import visible_pairs

        within = visible_pairs(config.blocks, sequence) / sequence
    # Layers without a window see half of the sequence in the mean.
    causal = within + (1 - sliding / config.num_layers) * (sequence / 2 - within)
    return causal * (1 + config.bidirectional)


def gradient_norms_flops(config: ModelConfig, tokens: int, sequence: int) -> float:
    """Returns the FLOPs of the block norms of the dense gradient over `tokens` tokens.

    The sum of a forward pass, a backward pass without weight gradients, and the dense xᵀ dy of
    every projection whose stored weights change.
    """
    forward = flops_per_token(config, sequence, training=False)
    sides = [config.projection_shape(name) for name in config.partial_projections]
    dense = 2.0 * config.num_layers * sum(fan_in * fan_out for fan_in, fan_out in sides)
    # Attention has two backward products for each forward product.
    return tokens * (2 * forward.total + forward.attention + dense)


def orthogonalization_flops(config: ModelConfig) -> float:
    """Returns the FLOPs of Muon's Newton-Schulz in one optimizer step, whatever its batch.

    A step on a matrix of m x n, m <= n, has three products: 2 m (2 m n + m^2).  Dense weights and
    factors are whole matrices.  Block-sparse weights are the groups of a layout that has them and
    does not change, else single blocks.
    """
    fractions, total = stored_fractions(config), 0.0
    for name in config.projections:
        spec, sides = config.linear(name), config.projection_shape(name)
        weights = sides[0] * sides[1] * fractions[name] * config.stored_copies(name)
        matrices = spec.weight.matrices(spec, sides)
        # The matrices of a weight have one shape, or are the two factors.
        count = weights / sum(m * n for m, n in matrices)
        for shape in matrices:
            m, n = sorted(shape)
            total += count * 2 * m * (2 * m * n + m * m)
    return muon.STEPS * config.stored_layers * total


def flop_ceiling(config: ModelConfig, sequence: int) -> float:
    """Returns the FLOP ceiling of a model that does not change: FLOPs of its dense twin over its
    own.

    Returns:
      Ratio from 1 (dense) to 1 / the lowest stored density.
    """
    dense = dataclasses.replace(config, linears={})
    return flops_per_token(dense, sequence).total / flops_per_token(config, sequence).total


def mfu(
    flops_per_token: float, tokens_per_second: float, chip: Chip, dtype: str, *, devices: int
) -> float | None:
    """Returns the model FLOPs utilisation: model FLOP/s as a fraction of the chips' peak rate.

    Pass the stored FLOPs of a sparse model, so that MFU measures the use of the chip.  The peak of
    a CPU is measured with large products, so MFU can slightly exceed 1 there.

    Args:
      flops_per_token: `flops_per_token(...).total`.
      tokens_per_second: of all devices together.
      chip: from `hardware.detect.detect` or `hardware.chips.CHIPS`.
      dtype: dtype of the operands, "bfloat16" or "float32".
      devices: chips that compute together.

    Returns:
      A fraction, or None if the peak for this dtype is unknown.
    """
    peak = chip.peak(dtype)
    return None if peak is None else flops_per_token * tokens_per_second / (devices * peak)


def parameter_count(config: ModelConfig) -> int:
    """Counts the stored parameters.

    The sum of: embeddings (vocab_size d_model, again for an output layer of its own, and max_len
    d_model for learned positions; vocab_size for a bias of the output layer); per block its norms
    (scale, and bias for layernorm), those of queries and keys, and for each projection its stored
    weights (blocks or factors), bias and low-rank term (rank (in + out), and a gate), for every
    expert; a router (d_model experts) and the gate of a shared expert (d_model); and the final
    norm.  A block that all layers share counts once.

    Args:
      config: the model.

    Examples:
        >>> sd.parameter_count(sd.ModelConfig(2, 128, 2, 512, vocab_size=512, max_len=64))
        470528
    """
    fractions = stored_fractions(config)
    leaves = 2 if config.norm == "layernorm" else 1
    norm = leaves * config.d_model
    block, stored = len(config.norms) * norm, 0
    if config.qk_norm:
        heads = config.num_heads, config.kv_heads
        scales = sum(math.prod(config.qk_norm_shape(count)) for count in heads)
        block += scales * (1 if config.qk_norm_scope == EACH_HEAD else leaves)
    for name in config.projections:
        fan_in, fan_out = config.projection_shape(name)
        spec = config.linear(name)
        copies = config.stored_copies(name)
        stored += round(config.stored_layers * fan_in * fan_out * fractions[name]) * copies
        block += fan_out * copies if name in config.biases else 0
        block += round(spec.term.stored(spec, (fan_in, fan_out))) if spec.term else 0
    # The router's columns.
    block += config.d_model * (config.experts + config.shared_gate)
    prompt = config.prompt_vectors * config.d_model
    added = prompt + side_count(config)
    return embeddings(config) + added + stored + config.stored_layers * block + norm


def embeddings(config: ModelConfig) -> int:
    """Counts the parameters of the embedding, learned positions, an untied output layer and its
    bias."""
    positions = config.max_len if config.positions == "learned" else 0
    matrices = 1 if config.tied_embeddings else 2
    bias = config.vocab_size if config.output_bias else 0
    return (matrices * config.vocab_size + positions) * config.d_model + bias
