"""Models with adapters on every projection, or prompt vectors, as `model.adapters` has them."""

import dataclasses
import functools

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.files.errors import UserError


def with_adapters(
    model: ModelConfig, rank: int, frozen_dtype: str = "compute", prompt_vectors: int = 0
) -> ModelConfig:
    """Returns the model with an adapter on every projection, and with prompt vectors.

    Args:
      model: config without adapters.
      rank: of every adapter; 0 for none.
      frozen_dtype: of the weights under them; see `LinearSpec`.
      prompt_vectors: see `ModelConfig`.

    Raises:
      UserError: a projection is narrower than the rank, has a low-rank term already, or stores
        blocks and is to be int8.
    """
    if prompt_vectors:
        model.refuse_experts(f"training.prompt_vectors={prompt_vectors}", "0")
        model = dataclasses.replace(model, prompt_vectors=prompt_vectors)
    if not rank:
        return model
    model.refuse_experts(f"training.adapter_rank={rank}", "0")
    if frozen_dtype == "int8":
        model.require("frozen_int8", "training.frozen_dtype=int8", "compute")
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
    adapted = functools.partial(dataclasses.replace, rank=rank, frozen_dtype=frozen_dtype)
    specs = {n: adapted(model.linear(n)) for n in model.projections}
    return dataclasses.replace(model, linears=specs)


def without_adapters(model: ModelConfig) -> ModelConfig:
    """Returns the base of `with_adapters`."""
    plain = functools.partial(dataclasses.replace, rank=0, frozen_dtype="compute")
    specs = {n: plain(spec) for n, spec in dict(model.linears).items()}
    return dataclasses.replace(model, linears=specs, prompt_vectors=0)
