"""Block-sparse weights that pay while a language model trains.

    import sparse_dataflow as sd

    layout = sd.make_layout("monarch", 1024, 4096, block=64, density=0.125)
    y = sd.block_sparse_matmul(x, values, layout.tables())     # x [..., 1024], y [..., 4096]

    model = sd.ModelConfig(4, 256, 4, 1024, vocab_size=2048, max_len=256)
    sparse = model.with_linears(sd.LinearSpec("block_sparse", "monarch", 0.125, block=32))
    trained = sd.train(sparse, sd.TrainingConfig(steps=200, batch=8, sequence=128))
    sd.generate(trained, [trained.tokenizer.encode("def ")], max_new_tokens=50)[0].text

These names are the public API; they are imported when they are first used, so that importing the
package takes no time. Every other module may change from version to version.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparse_dataflow.config.model import LinearSpec, ModelConfig
    from sparse_dataflow.config.training import TrainingConfig
    from sparse_dataflow.evaluation.generate import generate
    from sparse_dataflow.evaluation.trained import load
    from sparse_dataflow.files.errors import UserError
    from sparse_dataflow.kernels.block_sparse_matmul.api import block_sparse_matmul
    from sparse_dataflow.planning.cost import flops_per_token
    from sparse_dataflow.planning.memory import parameter_count
    from sparse_dataflow.sparsity.layout import BlockLayout
    from sparse_dataflow.sparsity.patterns import legal_densities, make_layout
    from sparse_dataflow.training.in_memory import train

__all__ = [
    "BlockLayout",
    "LinearSpec",
    "ModelConfig",
    "TrainingConfig",
    "UserError",
    "block_sparse_matmul",
    "flops_per_token",
    "generate",
    "legal_densities",
    "load",
    "make_layout",
    "parameter_count",
    "train",
]

_HOMES = {
    "BlockLayout": "sparsity.layout",
    "LinearSpec": "models.sizes",
    "ModelConfig": "models.sizes",
    "TrainingConfig": "optim.optimizers",
    "UserError": "files.errors",
    "block_sparse_matmul": "kernels.block_sparse_matmul.api",
    "flops_per_token": "planning.cost",
    "generate": "evaluation.generate",
    "legal_densities": "sparsity.patterns",
    "load": "evaluation.trained",
    "make_layout": "sparsity.patterns",
    "parameter_count": "planning.memory",
    "train": "training.in_memory",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
