"""The mesh axis "feature", which cuts the features of the residual stream: their order, its limits.

See `model.shard.Shard` for the collectives, and `sharding.RULES` for the parameters.
"""

import numpy as np

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.executors.mesh import AnyMesh
from sparse_dataflow.core.executors.mesh_axes import cut_run_length as run_length
from sparse_dataflow.core.executors.mesh_axes import feature_obstacle as obstacle
from sparse_dataflow.files.errors import UserError


def order(model: ModelConfig, mesh: AnyMesh) -> np.ndarray | None:
    """Returns the features of the residual stream in the order of the devices of "feature".

    int32 [d_model]; None if they are in order.
    """
    run, devices = run_length(model), mesh.shape["feature"]
    if run == model.d_model or devices == 1:
        return None
    # A run is the side of a block. Each device takes the same part of every run, so it has a strip
    # of every stored block, and all devices have one layout. With d_model 8, blocks of 4 and two
    # devices, the devices have 0 1 4 5 and 2 3 6 7.
    features = np.arange(model.d_model, dtype=np.int32).reshape(-1, devices, run // devices)
    return features.swapaxes(0, 1).reshape(-1)


def refuse(mesh: AnyMesh, model: ModelConfig) -> None:
    """Refuses a model that the axis "feature" cannot cut.

    Raises:
      UserError: naming what it does not divide or does not have, and the legal sizes.
    """
    tensor, feature = mesh.shape["tensor"], mesh.shape["feature"]
    if words := obstacle(model, tensor, feature):
        sizes = range(1, model.kv_heads + 1)
        legal = ", ".join(str(size) for size in sizes if not obstacle(model, tensor, size))
        raise UserError(
            f"feature:{feature} with tensor:{tensor} {words}; legal for this model: {legal}."
        )
