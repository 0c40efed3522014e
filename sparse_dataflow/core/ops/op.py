"""An op with several implementations: which can run, why another cannot, and which one runs."""

import dataclasses
import importlib
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from sparse_dataflow.core.ops import dispatch
from sparse_dataflow.files.errors import UserError


class Implementation(NamedTuple):
    """Where an implementation is, and where it runs.

    Attributes:
      module: its module in the op's folder, or with a leading dot in the package, as those of
        chips are.  Its function `refusal` takes the operands and returns why it cannot run them,
        empty if it can; a module without one runs all.
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

    def of_platform(self) -> list[str]:
        """Returns the implementations for the target platform alone, in order."""
        platform = dispatch.platform()
        return [name for name, row in self.implementations.items() if row.platform == platform]

    def load(self, name: str) -> ModuleType:
        """Imports an implementation at its first use: compilers of kernels take half a second."""
        module = self.implementations[name].module
        root = self.package.partition(".")[0] if module.startswith(".") else f"{self.package}."
        return importlib.import_module(root + module)

    def refusal(self, name: str, *operands: Any, **options: Any) -> str:
        """Returns why an implementation cannot run operands here; empty if it can."""
        row = self.implementations[name]
        if row.platform not in ("", dispatch.platform()):
            return f"it runs on {row.platform}, and this is {dispatch.platform()}."
        refusal = getattr(self.load(name), "refusal", lambda *operands: "")
        return refusal(*operands, **options)

    def check(self, name: str, *operands: Any) -> None:
        """Checks that a named implementation exists and can run operands here.

        Raises:
          UserError: it does not, or cannot.
        """
        if name not in self.implementations:
            legal = ", ".join(self.implementations)
            raise UserError(f"implementation {name!r} is unknown; legal: {legal}.")
        if reason := self.refusal(name, *operands):
            legal = ", ".join(self.fallback)
            raise UserError(f"implementation {name!r} cannot run: {reason} Legal here: {legal}.")

    def choose(self, names: Iterable[str], *operands: Any, **options: Any) -> str:
        """Returns the first of names that can run operands, else the fallback; logs which and why.

        Options go to `refusal` of the implementations.
        """
        reasons = []
        for name in names:
            reason = self.refusal(name, *operands, **options)
            if not reason and not self.implementations[name].partitioned:
                reason = dispatch.sharding_refusal()
            if not reason:
                break
            reasons.append(reason)
        else:
            name = self.fallback[-1]
        op = self.package.rpartition(".")[2]
        dispatch.log_choice(op, name, dispatch.platform(), " ".join(reasons))
        return name
