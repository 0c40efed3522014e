"""Models with what is trained beside frozen weights, as `model.adapters` has it."""

import dataclasses
import functools

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.files.errors import UserError


def with_adapters(
    model: ModelConfig,
    rank: int,
    frozen_dtype: str = "compute",
    prompt_vectors: int = 0,
    side_width: int = 0,
) -> ModelConfig:
    """Returns the model with an adapter on every projection, prompt vectors and a side network.

    Args:
      model: config without adapters.
      rank: of every adapter; 0 for none.
      frozen_dtype: of the frozen weights; see `LinearSpec`.
      prompt_vectors: see `ModelConfig`, also for `side_width`.

    Raises:
      UserError: a projection is narrower than the rank, has a low-rank term already, or stores
        blocks and is to be int8.
    """
    added = {"adapter_rank": rank, "prompt_vectors": prompt_vectors, "side_width": side_width}
    for name, count in added.items():
        if count:
            model.refuse_experts(f"training.{name}={count}", "0")
    model = dataclasses.replace(model, prompt_vectors=prompt_vectors, side_width=side_width)
    if frozen_dtype == "int8":
        model.require("frozen_int8", "training.frozen_dtype=int8", "compute")
    if rank:
        _refuse_rank(model, rank)
    elif frozen_dtype == "compute":
        return model
    adapted = functools.partial(dataclasses.replace, rank=rank, frozen_dtype=frozen_dtype)
    specs = {n: adapted(model.linear(n)) for n in model.projections}
    return dataclasses.replace(model, linears=specs)


def _refuse_rank(model, rank):
    """Raises UserError unless every projection can have an adapter."""
    # A factor cannot have a higher rank than the shorter side of its matrix.
    narrowest = min(min(model.projection_shape(name)) for name in model.projections)
    if rank > narrowest:
        raise UserError(
            f"training.adapter_rank={rank} is above {narrowest}, the features of the narrowest "
            f"projection; legal: 1 to {narrowest}."
        )
    with_term = [name for name in model.projections if model.linear(name).rank]
    if with_term:
        raise UserError(
            f"training.adapter_rank={rank} on weights whose {', '.join(with_term)} have a low-rank "
            "term already; legal: weights without one, such as the dense form that "
            "sparse-dataflow export writes."
        )


def without_adapters(model: ModelConfig) -> ModelConfig:
    """Returns the base of `with_adapters`."""
    plain = functools.partial(dataclasses.replace, rank=0, frozen_dtype="compute")
    specs = {n: plain(spec) for n, spec in dict(model.linears).items()}
    return dataclasses.replace(model, linears=specs, prompt_vectors=0, side_width=0)
