"""Checks that the fields of a `ModelConfig` fit each other; they raise UserError.

The config calls them, so its type has no name here.
"""

from typing import Any

from sparse_dataflow.core.config.projections import LOW_RANK, MLP
from sparse_dataflow.core.config.settings import MOST_EXPERTS
from sparse_dataflow.files.errors import UserError

MOST_BLOCKS = 2**28
"""Upper bound of the stored blocks of one projection, summed over layers."""


def check_attention(model: Any) -> None:
    """Checks that heads fit the width, the key/value heads and the position encoding."""
    if not model.head_dim and model.d_model % model.num_heads:
        raise UserError(
            f"d_model {model.d_model} is not divisible by num_heads {model.num_heads}; "
            f"legal head counts: {_divisors(model.d_model)}."
        )
    if model.num_heads % model.kv_heads:
        raise UserError(
            f"num_kv_heads {model.num_kv_heads} does not divide num_heads {model.num_heads}; "
            f"legal: {_divisors(model.num_heads)}."
        )
    if model.positions == "rotary":
        model.check_rotary(model.head_width)
    model.check_layer_types()
    if model.rotary_local_base and not model.window:
        raise UserError(
            f"model.rotary_local_base={model.rotary_local_base:g} is for layers with a window; "
            "legal with model.window=0: 0."
        )
    if model.rotary_low >= model.rotary_high:
        raise UserError(
            f"rotary_low {model.rotary_low:g} is not below rotary_high {model.rotary_high:g}; "
            f"legal: above 0, below {model.rotary_high:g}."
        )


def check_experts(model: Any) -> None:
    """Checks the groups of experts, and that experts have the storage that a mixture can."""
    if not model.experts:
        names = ("top_k", "prototypes", "expert_capacity", "shared_expert", "shared_gate",
                 "raw_gates")  # fmt: skip
        if given := [name for name in names if name in model.family_fields()]:
            raise UserError(
                f"model.{given[0]}={getattr(model, given[0])} needs experts; legal with it: "
                f"model.experts of 1 to {MOST_EXPERTS}."
            )
        return
    if model.experts % model.prototypes:
        raise UserError(
            f"model.prototypes={model.prototypes} does not divide model.experts={model.experts}; "
            f"legal: {_divisors(model.experts)}."
        )
    group = model.experts // model.prototypes
    if model.top_k > group:
        raise UserError(
            f"model.top_k={model.top_k} is above the {group} experts of a group; legal: 1 to "
            f"{group}."
        )
    if model.shared_gate and not model.shared_expert:
        raise UserError("model.shared_gate=yes needs a shared expert; legal without one: no.")
    if model.shared_expert > 1 and set(MLP) & set(model.sparse_projections):
        raise UserError(
            f"model.shared_expert={model.shared_expert} with block-sparse experts, whose layouts "
            "it shares; legal: 0, 1, or sparsity.projections of attention alone."
        )
    if model.quantized:
        raise UserError(
            f"model.precision={model.precision} with model.experts={model.experts}; legal with "
            "experts: compute_dtype."
        )
    specs = {name: model.linear(name) for name in model.projections if name in MLP}
    for name, spec in specs.items():
        if spec.kind == LOW_RANK:
            raise UserError(
                f"{name} is a product of two factors, which experts cannot be; legal: another "
                "sparsity.pattern, or sparsity.projections of attention alone."
            )
        if spec.rank:
            raise UserError(
                f"{name} has a low-rank term of {spec.rank}, and experts can have none; legal: "
                "sparsity.rank=0, or sparsity.projections of attention alone."
            )
    if model.density_by_depth and any(s.kind == "block_sparse" for s in specs.values()):
        raise UserError(
            "The density of experts varies by depth; legal for experts: one density in all layers."
        )


def check_blocks(model: Any) -> None:
    """Checks that block-sparse projections fit their Hadamard transform and MOST_BLOCKS."""
    for name in model.sparse_projections:
        spec, (fan_in, fan_out) = model.linear(name), model.projection_shape(name)
        if spec.hadamard and fan_in % spec.hadamard:
            raise UserError(
                f"sparsity.hadamard={spec.hadamard} does not divide the {fan_in} input features of "
                f"{name}; legal: powers of 2 up to {fan_in & -fan_in}."
            )
        layers = sum(model.density_by_depth) or model.num_layers
        layers *= model.stored_copies(name)
        if layers * fan_in * fan_out / spec.block**2 * spec.density > MOST_BLOCKS:
            raise UserError(
                f"{name} has more than {MOST_BLOCKS} blocks with --block={spec.block}; legal: "
                "larger blocks."
            )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
