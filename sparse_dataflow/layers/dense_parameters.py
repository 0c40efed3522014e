"""What stays dense in a model beside its block-sparse layers, and the line that says so."""

import logging
import re

from flax import nnx

from sparse_dataflow.layers.block_sparse_linear import BlockSparseLinear

_LOG = logging.getLogger(__name__)

_MOST_NAMES = 12
"""Names of a list of the line; of more, their number is said."""


def say_replaced(model: nnx.Module, paths: list[str]) -> None:
    """Logs what became block-sparse and which other parameters of two or more axes are dense."""
    linears = "1 linear is" if len(paths) == 1 else f"{len(paths)} linears are"
    sparse = f"sd.sparsify: {linears} block-sparse" + f" ({_names(paths)})" * any(paths)
    dense = [f"{path} of {type(module).__name__}" for path, module in _dense_parameters(model)]
    _LOG.info("%s; dense: %s.", sparse, _names(dense) or "no other weight")


def dense_classes(model: nnx.Module) -> list[tuple[type, str]]:
    """Returns (class, path) of modules that have a parameter of two or more axes, by class."""
    classes: dict[type, str] = {}
    for path, module in _dense_parameters(model):
        if not type(module).__module__.startswith("flax."):
            classes.setdefault(type(module), path.rpartition(".")[0] or "The model")
    return list(classes.items())


def _dense_parameters(model) -> list[tuple[str, nnx.Module]]:
    """Returns (path, module) of each dense parameter of two or more axes."""
    modules = dict(nnx.iter_modules(model))
    parameters = []
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        depth = max(n for n in range(len(path)) if tuple(path[:n]) in modules)
        module = modules[tuple(path[:depth])]
        if variable.ndim > 1 and not isinstance(module, BlockSparseLinear):
            parameters.append((".".join(map(str, path)), module))
    return parameters


def _names(paths):
    """Returns a list of paths, where those that differ in numbers alone are one."""
    counts: dict[str, int] = {}
    for path in paths:
        general = re.sub(r"(?<![^.])\d+(?![^. ])", "*", path)
        counts[general] = counts.get(general, 0) + 1
    firsts = {re.sub(r"(?<![^.])\d+(?![^. ])", "*", path): path for path in reversed(paths)}
    names = [firsts[each] if n == 1 else f"{n} x {each}" for each, n in counts.items()]
    rest = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {rest} more kinds" if rest > 0 else "")
