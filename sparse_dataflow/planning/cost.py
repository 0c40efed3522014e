"""FLOPs of a training step by section, the FLOP ceiling of sparsity, and MFU.

Counting rules, the same everywhere in the project:

- A product of [m, k] and [k, n] is 2 m k n FLOPs.  The backward pass is twice the forward pass.
- A block-sparse projection counts its stored blocks only; a low-rank term `x A B` and a Hadamard
  transform, as the two products that it is applied as, count in the projection they belong to.
- Embedding look-ups, norms, biases, GELU, softmax and the optimizer count as 0: they are bound by
  memory, and MFU is about the matrix units.
- Attention is Q Kᵀ and A V.  *Model* FLOPs count the causal half of it (what the mathematics
  needs; PaLM, arXiv 2204.02311, appendix B, counts the whole square).
- What rematerialisation computes again is kept apart: it is in the *hardware* FLOPs, never in the
  *model* FLOPs that MFU is made of (arXiv 2205.05198, section 6.2).

Pure Python: importing this module loads no jax.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.detect import Chip
from sparse_dataflow.kernels.hadamard import factors
from sparse_dataflow.models.groups import mean_multiplier
from sparse_dataflow.models.sizes import PROJECTIONS, ModelConfig

BACKWARD_PER_FORWARD = 2


@dataclasses.dataclass(frozen=True)
class SectionFlops:
    """FLOPs a token, by section, summed over all layers.

    Attributes:
      embed: 0, a look-up.
      qkv: the query, key and value projection.
      attention: Q Kᵀ and A V.
      attn_out: the projection behind attention.
      mlp_in: the MLP's first projection.
      mlp_out: the MLP's second projection.
      head: the logits.
      recompute: what remat computes a second time; not part of `total`.
    """

    embed: float
    qkv: float
    attention: float
    attn_out: float
    mlp_in: float
    mlp_out: float
    head: float
    recompute: float = 0.0

    @property
    def sections(self) -> dict[str, float]:
        """Section name -> model FLOPs a token, in the order of execution."""
        fields = dataclasses.asdict(self)
        del fields["recompute"]
        return fields

    @property
    def total(self) -> float:
        """Model FLOPs a token: the sum of the sections, without recompute."""
        return sum(self.sections.values())

    @property
    def hardware_total(self) -> float:
        """FLOPs a token that the chip executes: `total` and what remat recomputes."""
        return self.total + self.recompute

    @property
    def projections(self) -> float:
        """FLOPs a token of the four projections, which sparsity can reduce."""
        return sum(self.sections[name] for name in PROJECTIONS)

    @property
    def projection_share(self) -> float:
        """Fraction of `total` in the projections, in (0, 1)."""
        return self.projections / self.total


def stored_fractions(
    config: ModelConfig, stored_density: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Projection name -> fraction of its weight that is stored, in (0, 1].

    Args:
      config: the model.
      stored_density: what the real layouts store (stored blocks / all blocks), for some or all
        projections.  Others take the density that their spec asks for, the mean over layers, 1
        where dense.

    Raises:
      UserError: an unknown projection or a fraction outside (0, 1].
    """
    given = dict(stored_density or {})
    for name, fraction in given.items():
        if name not in PROJECTIONS:
            raise UserError(f"projection {name!r} is unknown; legal: {', '.join(PROJECTIONS)}.")
        if not 0 < fraction <= 1:
            raise UserError(f"stored density {fraction} of {name} is not in (0, 1].")
    specs = {name: config.linear(name) for name in PROJECTIONS}
    mean = mean_multiplier(config)
    asked = {n: s.density * mean if s.kind == "block_sparse" else 1.0 for n, s in specs.items()}
    return {**asked, **given}


def flops_per_token(
    config: ModelConfig,
    sequence: int,
    stored_density: Mapping[str, float] | None = None,
    *,
    causal_half: bool = True,
    training: bool = True,
) -> SectionFlops:
    """FLOPs a token of a training step, or of a forward pass.

    Args:
      config: the model; `config.remat` decides `recompute`.  Remat "full" computes a block's
        forward again but for `mlp_out`, whose output the backward pass does not read; "dots"
        keeps the projections' outputs and computes attention again.
      sequence: tokens a sequence; attention reads `sequence` keys, or half as many on average
        where causal.
      stored_density: see `stored_fractions`.
      causal_half: count attention at half its square (what causality needs).  False counts the
        whole square, as an implementation that masks executes it.
      training: forward and backward (three forwards); False for the forward pass alone, as in
        evaluation.

    Raises:
      UserError: `sequence` below 1, or an illegal `stored_density`.
    """
    if sequence < 1:
        raise UserError(f"sequence {sequence} must be at least 1 token.")
    fractions = stored_fractions(config, stored_density)
    layers = config.num_layers
    forward = {}
    for name in PROJECTIONS:
        fan_in, fan_out = config.projection_shape(name)
        spec = config.linear(name)
        weights = fan_in * fan_out * fractions[name] + spec.rank * (fan_in + fan_out)
        if spec.hadamard:
            weights += fan_in * sum(factors(spec.hadamard))
        forward[name] = 2.0 * layers * weights
    keys = sequence / 2 if causal_half else sequence
    forward["attention"] = 2 * 2.0 * layers * keys * config.d_model
    forward["head"] = 2.0 * config.d_model * config.vocab_size
    forward["embed"] = 0.0
    passes = 1 + BACKWARD_PER_FORWARD if training else 1
    recompute = {
        "none": 0.0,
        "dots": forward["attention"],
        "full": sum(forward[n] for n in ("qkv", "attention", "attn_out", "mlp_in")),
    }[config.remat]
    return SectionFlops(
        **{name: passes * flops for name, flops in forward.items()},
        recompute=recompute if training else 0.0,
    )


def training_flops(parts: Iterable[tuple[ModelConfig, int]], sequence: int) -> float:
    """Model FLOPs of a training whose model changes on the way.

    Args:
      parts: (model, tokens that it is trained on), in any order.
      sequence: tokens a sequence.

    Raises:
      UserError: as `flops_per_token`.
    """
    return sum(tokens * flops_per_token(model, sequence).total for model, tokens in parts)


def gradient_norms_flops(config: ModelConfig, tokens: int, sequence: int) -> float:
    """FLOPs of the dense gradient's block norms over some tokens.

    A forward pass, a backward pass without weight gradients, and xᵀ dy whole for every
    block-sparse projection; a low-rank term's share of the backward is counted as one forward.

    Raises:
      UserError: as `flops_per_token`.
    """
    forward = flops_per_token(config, sequence, training=False)
    sides = [config.projection_shape(name) for name in config.sparse_projections]
    dense = 2.0 * config.num_layers * sum(fan_in * fan_out for fan_in, fan_out in sides)
    # The backward of attention is two products for each of the forward's.
    return tokens * (2 * forward.total + forward.attention + dense)


def flop_ceiling(
    config: ModelConfig,
    sequence: int,
    stored_density: Mapping[str, float] | None = None,
    *,
    causal_half: bool = False,
) -> float:
    """Model FLOPs of the dense twin over those of `config`: the most that sparsity can speed up.

    Attention is counted whole by default, because the ceiling is set beside measured speed-ups and
    masked attention executes the whole square; with 50,257 tokens of vocabulary and a sequence of
    2048 this gives the 13B's 5.13x at 87.5% sparsity (5.89x with `causal_half`).  It is the lower,
    and so the more modest, of the two conventions.

    Returns:
      A ratio; 1 for a dense model, at most 1 / the lowest stored density.

    Raises:
      UserError: as `flops_per_token`.
    """
    dense = dataclasses.replace(config, linears={})
    sparse_flops = flops_per_token(config, sequence, stored_density, causal_half=causal_half)
    return flops_per_token(dense, sequence, causal_half=causal_half).total / sparse_flops.total


def decoding_bytes(
    config: ModelConfig,
    batch: int,
    cached: int,
    stored_density: Mapping[str, float] | None = None,
) -> float:
    """Bytes that one more token of every row reads: each weight once, and the caches.

    Weights and caches have the compute dtype's size.  The tied vocabulary is read whole, dense; of
    the positions, and where tokens are looked up, single rows, which count as 0.

    Args:
      config: the model.
      batch: rows.
      cached: tokens before it in each row.
      stored_density: see `stored_fractions`.

    Raises:
      UserError: as `stored_fractions`.
    """
    fractions = stored_fractions(config, stored_density)
    weights: float = config.vocab_size * config.d_model
    for name in PROJECTIONS:
        fan_in, fan_out = config.projection_shape(name)
        rank = config.linear(name).rank
        stored = fan_in * fan_out * fractions[name] + rank * (fan_in + fan_out)
        weights += config.num_layers * (stored + fan_out)
    caches = 2 * config.num_layers * batch * cached * config.d_model
    return (weights + caches) * {"float32": 4, "bfloat16": 2}[config.compute_dtype]


def mfu(
    flops_per_token: float, tokens_per_second: float, chip: Chip, dtype: str, chips: int = 1
) -> float | None:
    """Model FLOPs utilisation: the fraction of the chips' peak rate that model FLOPs use.

    For a sparse model pass its own (stored) FLOPs, so that MFU says how well the chip is used and
    not how much work sparsity saved.  On a CPU the peak is itself measured (the best of several
    large products), so a step that beats it may show slightly above 1.

    Args:
      flops_per_token: `flops_per_token(...).total`.
      tokens_per_second: over all chips.
      chip: from `hardware.detect()` or `hardware.CHIPS`.
      dtype: of the products' operands, "bfloat16" or "float32".
      chips: how many chips shared the work.

    Returns:
      A fraction, or None where the chip's peak for this dtype is not known.
    """
    peak = chip.peak(dtype)
    if peak is None:
        return None
    return flops_per_token * tokens_per_second / (peak * chips)
