"""Models with a low-rank adapter on every projection, as `model.adapters` computes them."""

import dataclasses
import functools

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.files.errors import UserError


def with_adapters(model: ModelConfig, rank: int, frozen_dtype: str = "compute") -> ModelConfig:
    """Returns the model with an adapter on every projection; the model itself for rank 0.

    Args:
      model: config without adapters.
      rank: of every adapter.
      frozen_dtype: of the weights under them; see `LinearSpec`.

    Raises:
      UserError: a projection is narrower than the rank, has a low-rank term already, or stores
        blocks and is to be int8.
    """
    if not rank:
        return model
    model.refuse_experts(f"training.adapter_rank={rank}", "0")
    if frozen_dtype == "int8":
        model.require("frozen_int8", "training.frozen_dtype=int8", "compute")
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
    adapted = functools.partial(dataclasses.replace, rank=rank, frozen_dtype=frozen_dtype)
    specs = {n: adapted(model.linear(n)) for n in model.projections}
    return dataclasses.replace(model, linears=specs)


def without_adapters(model: ModelConfig) -> ModelConfig:
    """Returns the base of `with_adapters`."""
    plain = functools.partial(dataclasses.replace, rank=0, frozen_dtype="compute")
    specs = {n: plain(spec) for n, spec in dict(model.linears).items()}
    return dataclasses.replace(model, linears=specs)
