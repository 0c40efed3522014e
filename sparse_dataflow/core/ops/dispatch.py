"""An op with several implementations: which can run, why another cannot, and which one runs."""

import contextlib
import contextvars
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import jax
from absl import logging
from jax import export, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sparse_dataflow.core.layouts.layout import BlockLayout, FixedTables, Groups
from sparse_dataflow.files.errors import UserError

# Every op and every weight loads this module; `layout` itself loads no jax.
for _static in (BlockLayout, FixedTables, Groups):
    jax.tree_util.register_static(_static)

Shaped = jax.Array | jax.ShapeDtypeStruct
"""An operand whose shape and dtype alone are read."""


_target: contextvars.ContextVar[str] = contextvars.ContextVar("target", default="")


@contextlib.contextmanager
def tracing_for(name: str) -> Iterator[None]:
    """Traces programs as for a platform, "cpu", "tpu" or "gpu", whatever this machine is."""
    token = _target.set(name)
    try:
        yield
    finally:
        _target.reset(token)


def platform() -> str:
    """Return the target platform: "cpu", "tpu" or "gpu" (any vendor).

    `tracing_for` decides, else the abstract mesh's device where there is one, else the default
    backend.
    """
    if target := _target.get():
        return target
    device = jax.sharding.get_abstract_mesh().abstract_device
    # Descriptions of devices have a platform since jax 0.10; before, none is made of another one.
    name = getattr(device, "platform", None) or jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else name


def on(platforms: tuple[str, ...]) -> bool:
    """Return whether the target platform is one of those with a trait of `platforms`."""
    return platform() in platforms


def sharding_refusal() -> str:
    """Return why a Pallas kernel cannot run here; empty if it can.

    XLA cannot partition a Pallas kernel. One device or `shard_map` avoids the need.
    """
    mesh = jax.sharding.get_abstract_mesh()
    # Without a mesh, arrays of a process with several devices may still be sharded.
    unsharded = jax.device_count() == 1
    if not mesh.empty:
        manual = jax.sharding.AxisType.Manual
        unsharded = all(
            size == 1 or kind == manual for size, kind in zip(mesh.axis_sizes, mesh.axis_types)
        )
    return "" if unsharded else "this process has several devices, over which arrays may be cut."


_without: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("without", default=())


@contextlib.contextmanager
def without(*ops: str) -> Iterator[None]:
    """Traces programs without the platform's own implementations of ops, by the names of their
    folders, to compare with these."""
    token = _without.set((*_without.get(), *ops))
    try:
        yield
    finally:
        _without.reset(token)


@functools.cache
def log_choice(op: str, name: str, platform: str, reason: str = "") -> None:
    """Log once which implementation runs, and why the faster one was refused."""
    because = reason and f", because {reason}"
    logging.info("%s: implementation %s on %s%s", op, name, platform, because)


def equally_varying(*operands: object) -> Any:
    """Returns operands (pytrees) that all vary over the same axes of `shard_map`.

    A custom gradient of an operand that varies less than another would vary too much.  JAX sums the
    gradient of the operand over the axes that are added here.
    """
    axes = frozenset[str]().union(*map(_varying, jax.tree.leaves(operands)))

    def vary(leaf):
        # A cast to "varying" moves no data; its transpose is the sum over these axes.
        missing = tuple(axes - _varying(leaf))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(vary, operands) if axes else operands


def _varying(operand):
    """Returns the axes of `shard_map` over which an operand varies."""
    aval = jax.typeof(operand)
    manual = getattr(aval, "manual_axis_type", None)  # Since jax 0.11; `vma` before.
    return aval.vma if manual is None else manual.varying


def over_auto_axes(function: Callable, x: jax.Array, *others: object) -> jax.Array | None:
    """Returns `function(x, *others)` of a product with x on a mesh with Explicit axes, else None.

    Products split and merge axes in ways for which JAX asks how the result is sharded.  Within
    `function` the compiler decides.  The result is sharded as x, its last axis replicated.
    """
    context, aval = jax.sharding.get_abstract_mesh(), jax.typeof(x)
    mesh = aval.sharding.mesh if context.empty else context
    if jax.sharding.AxisType.Explicit not in mesh.axis_types:
        return None
    # A spec may be shorter than the rank, so it is filled up with None first.  The last axis of the
    # result has new features, and is replicated.
    result: Any = P(*(*aval.sharding.spec, *(None,) * x.ndim)[: x.ndim - 1], None)
    if context.empty:
        result = NamedSharding(mesh, result)  # Else JAX does not know which axes it makes Auto.
    return jax.sharding.auto_axes(function, out_sharding=result)(x, *others)


def at_most(size: Any, limit: int) -> bool:
    """Returns whether a dimension is known to be at most a limit; a symbolic one of `jax.export` is
    with such a constraint."""
    if not export.is_symbolic_dim(size):
        return size <= limit
    bounds = getattr(export, "symbolic_dim_bounds", None)  # Since jax 0.10; unknown before.
    return bounds is not None and bounds(size)[1] <= limit


class Implementation(NamedTuple):
    """Where an implementation is, and where it runs.

    Attributes:
      module: its module in the op's folder, or with a leading dot in the package, as those of
        chips are.  Its function `<op>_refusal` takes the operands and returns why it cannot run
        them, empty if it can; a module without one runs all.
      platform: the only platform that it runs on; empty for all.
      partitioned: whether XLA can partition it over devices, unlike a Pallas kernel.
    """

    module: str
    platform: str = ""
    partitioned: bool = True


@dataclasses.dataclass(frozen=True)
class Op:
    """The implementations of an op.

    To add one, write its module and its row.

    Attributes:
      package: the op's folder.
      implementations: name -> row.  Of several for one platform, the first that can run does.
      fallback: names that run all operands everywhere, the one for automatic choices last.
    """

    package: str
    implementations: Mapping[str, Implementation]
    fallback: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the op's folder, with which its functions are named."""
        return self.package.rpartition(".")[2]

    def platform_implementations(self) -> list[str]:
        """Returns the implementations for the target platform alone, in order."""
        target = platform()
        return [name for name, row in self.implementations.items() if row.platform == target]

    def load(self, name: str) -> ModuleType:
        """Imports an implementation at its first use: compilers of kernels take half a second."""
        module = self.implementations[name].module
        root = self.package.partition(".")[0] if module.startswith(".") else f"{self.package}."
        return importlib.import_module(root + module)

    def implementation_refusal(self, name: str, *operands: object, **options: object) -> str:
        """Returns why an implementation cannot run operands here; empty if it can."""
        row = self.implementations[name]
        if row.platform not in ("", platform()):
            return f"it runs on {row.platform}, and this is {platform()}."
        refusal = getattr(self.load(name), f"{self.name}_refusal", lambda *operands: "")
        return refusal(*operands, **options)

    def check(self, name: str, *operands: Any) -> None:
        """Checks that a named implementation exists and can run operands here.

        Raises:
          UserError: it does not, or cannot.
        """
        if name not in self.implementations:
            legal = ", ".join(self.implementations)
            raise UserError(f"implementation {name!r} is unknown; legal: {legal}.")
        if reason := self.implementation_refusal(name, *operands):
            legal = ", ".join(self.fallback)
            raise UserError(f"implementation {name!r} cannot run: {reason} Legal here: {legal}.")

    def module(self, implementation: str | None, *operands: object) -> ModuleType:
        """Returns the module of a named implementation, or of the platform's first that can run
        operands if None.

        Raises:
          UserError: the named one does not exist, or cannot run.
        """
        if implementation is None:
            return self.load(self.choose(self.platform_implementations(), *operands))
        self.check(implementation, *operands)
        return self.load(implementation)

    def choose(self, names: Iterable[str], *operands: object, **options: object) -> str:
        """Returns the first of names that can run operands, else the fallback; logs which and why.

        Options go to `<op>_refusal` of the implementations.
        """
        reasons = []
        for name in () if self.name in _without.get() else names:
            reason = self.implementation_refusal(name, *operands, **options)
            if not reason and not self.implementations[name].partitioned:
                reason = sharding_refusal()
            if not reason:
                break
            reasons.append(reason)
        else:
            name = self.fallback[-1]
        log_choice(self.name, name, platform(), " ".join(reasons))
        return name
