"""Block-sparse training of language models: faster steps, less memory.

In your own flax nnx model:

    >>> layer = sd.BlockSparseLinear(1024, 4096, density=0.125, block=64, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((8, 1024))).shape
    (8, 4096)

A language model of this project:

    run = sd.train(sd.preset("3m").change(sparsity__block=32, training__steps=200))
    sd.generate(run.model(), ["def "], max_new_tokens=50)[0].text

| task | names |
|---|---|
| layers of your own | `BlockSparseLinear`, `sparsify`, `densify`, `evolve`, `partition_specs` |
| linear classes of your own, layouts to save | `register_linear`, `layouts`, `set_layouts` |
| a product alone | `make_layout`, `legal_densities`, `BlockLayout`, `block_sparse_matmul` |
| its weights, without flax nnx | `draw_blocks`, `cut_blocks`, `join_blocks`, `evolve_blocks` |
| train a language model | `preset`, `RunConfig`, `ModelConfig`, `LinearSpec`, `train` |
| the same in your own loop | `init`, `loss`, `logits`, `Model`, `Tokenizer` |
| use a model | `load`, `save`, `generate` |
| prune a model, of this project or of your own | `prune` |
| count | `flops_per_token`, `parameter_count` |

`sd.__version__` is the installed version.

Wrong input raises a `UserError`, which names the legal values.  Names are imported when
they are first used, so that importing the package takes no time.  Every other module may change
from version to version.
"""

import importlib as _importlib
import types as _types
import typing as _typing

if _typing.TYPE_CHECKING:
    from sparse_dataflow.commands.library import init, logits, loss, preset, save
    from sparse_dataflow.commands.prune import prune
    from sparse_dataflow.commands.train import train
    from sparse_dataflow.core.config.model import ModelConfig
    from sparse_dataflow.core.config.projections import LinearSpec
    from sparse_dataflow.core.layouts.layout import BlockLayout
    from sparse_dataflow.core.layouts.patterns import legal_densities, make_layout
    from sparse_dataflow.core.ops.block_sparse_matmul.matmul_op import block_sparse_matmul
    from sparse_dataflow.core.training.cost import flops_per_token, parameter_count
    from sparse_dataflow.data.tokenizer import Tokenizer
    from sparse_dataflow.evaluation.generate import generate
    from sparse_dataflow.evaluation.trained import Model
    from sparse_dataflow.files.errors import UserError
    from sparse_dataflow.interchange.load import load
    from sparse_dataflow.layers.block_arrays import (
        cut_blocks,
        draw_blocks,
        evolve_blocks,
        join_blocks,
    )
    from sparse_dataflow.layers.block_sparse_linear import BlockSparseLinear
    from sparse_dataflow.layers.densities import cubic_density, erk_densities
    from sparse_dataflow.layers.evolve import evolve
    from sparse_dataflow.layers.registered import register_linear
    from sparse_dataflow.layers.replace import densify, partition_specs, sparsify
    from sparse_dataflow.layers.saved_layouts import layouts, set_layouts
    from sparse_dataflow.runs.run_config import RunConfig

__all__ = [
    "BlockLayout",
    "BlockSparseLinear",
    "LinearSpec",
    "Model",
    "ModelConfig",
    "RunConfig",
    "Tokenizer",
    "UserError",
    "block_sparse_matmul",
    "cubic_density",
    "cut_blocks",
    "densify",
    "draw_blocks",
    "erk_densities",
    "evolve",
    "evolve_blocks",
    "flops_per_token",
    "generate",
    "init",
    "join_blocks",
    "layouts",
    "legal_densities",
    "load",
    "logits",
    "loss",
    "make_layout",
    "parameter_count",
    "partition_specs",
    "preset",
    "prune",
    "register_linear",
    "save",
    "set_layouts",
    "sparsify",
    "train",
]

_HOMES = {
    "BlockLayout": "core.layouts.layout",
    "BlockSparseLinear": "layers.block_sparse_linear",
    "LinearSpec": "core.config.projections",
    "Model": "evaluation.trained",
    "ModelConfig": "core.config.model",
    "RunConfig": "runs.run_config",
    "Tokenizer": "data.tokenizer",
    "UserError": "files.errors",
    "block_sparse_matmul": "core.ops.block_sparse_matmul.matmul_op",
    "cubic_density": "layers.densities",
    "cut_blocks": "layers.block_arrays",
    "densify": "layers.replace",
    "draw_blocks": "layers.block_arrays",
    "erk_densities": "layers.densities",
    "evolve": "layers.evolve",
    "evolve_blocks": "layers.block_arrays",
    "flops_per_token": "core.training.cost",
    "generate": "evaluation.generate",
    "init": "commands.library",
    "join_blocks": "layers.block_arrays",
    "layouts": "layers.saved_layouts",
    "legal_densities": "core.layouts.patterns",
    "load": "interchange.load",
    "logits": "commands.library",
    "loss": "commands.library",
    "make_layout": "core.layouts.patterns",
    "parameter_count": "core.training.cost",
    "partition_specs": "layers.replace",
    "preset": "commands.library",
    "prune": "commands.prune",
    "register_linear": "layers.registered",
    "save": "commands.library",
    "set_layouts": "layers.saved_layouts",
    "sparsify": "layers.replace",
    "train": "commands.train",
}


_BORDER = ("errors", "extras")


def __getattr__(name: str) -> _typing.Any:
    if name == "__version__":
        return _importlib.import_module(f"{__name__}.files.console").version()
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(_importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        errors, extras = (_importlib.import_module(f"{__name__}.files.{m}") for m in _BORDER)
        if text := extras.missing(error, f"sd.{name}"):
            raise errors.UserError(text) from error
        raise
    if isinstance(value, _types.FunctionType):
        # Users' arguments are checked here, once for all public functions.
        arguments = _importlib.import_module(f"{__name__}.core.config.arguments")
        value = arguments.checked(value)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__", *(n for n in globals() if n.startswith("__"))})
