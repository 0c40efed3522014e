"""Block-sparse weights that pay while a language model trains.

    import sparse_dataflow as sd

    layout = sd.make_layout("monarch", 1024, 4096, block=64, density=0.125)
    y = sd.block_sparse_matmul(x, values, layout.tables())     # x [..., 1024], y [..., 4096]

    run = sd.train(sd.preset("3m").change(sparsity__block=32, training__steps=200))
    model = run.model("sparse")
    sd.generate(model, [model.tokenizer.encode("def ")], max_new_tokens=50)[0].text

These names are the public API; they are imported when they are first used, so that importing the
package takes no time. Every other module may change from version to version.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparse_dataflow.config.model import LinearSpec, ModelConfig
    from sparse_dataflow.config.presets import preset
    from sparse_dataflow.config.run import RunConfig
    from sparse_dataflow.config.training import TrainingConfig
    from sparse_dataflow.evaluation.generate import generate
    from sparse_dataflow.evaluation.trained import load
    from sparse_dataflow.files.errors import UserError
    from sparse_dataflow.kernels.block_sparse_matmul.api import block_sparse_matmul
    from sparse_dataflow.layers.evolve import evolve
    from sparse_dataflow.layers.linear import BlockSparseLinear
    from sparse_dataflow.layers.replace import densify, partition_specs, sparsify
    from sparse_dataflow.planning.cost import flops_per_token
    from sparse_dataflow.planning.memory import parameter_count
    from sparse_dataflow.runs.train import train
    from sparse_dataflow.sparsity.layout import BlockLayout
    from sparse_dataflow.sparsity.patterns import legal_densities, make_layout

__all__ = [
    "BlockLayout",
    "BlockSparseLinear",
    "LinearSpec",
    "ModelConfig",
    "RunConfig",
    "TrainingConfig",
    "UserError",
    "block_sparse_matmul",
    "densify",
    "evolve",
    "flops_per_token",
    "generate",
    "legal_densities",
    "load",
    "make_layout",
    "parameter_count",
    "partition_specs",
    "preset",
    "sparsify",
    "train",
]

_HOMES = {
    "BlockSparseLinear": "layers.linear",
    "densify": "layers.replace",
    "evolve": "layers.evolve",
    "partition_specs": "layers.replace",
    "sparsify": "layers.replace",
    "BlockLayout": "sparsity.layout",
    "LinearSpec": "config.model",
    "ModelConfig": "config.model",
    "TrainingConfig": "config.training",
    "RunConfig": "config.run",
    "preset": "config.presets",
    "UserError": "files.errors",
    "block_sparse_matmul": "kernels.block_sparse_matmul.api",
    "flops_per_token": "planning.cost",
    "generate": "evaluation.generate",
    "legal_densities": "sparsity.patterns",
    "load": "evaluation.trained",
    "make_layout": "sparsity.patterns",
    "parameter_count": "planning.memory",
    "train": "runs.train",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
