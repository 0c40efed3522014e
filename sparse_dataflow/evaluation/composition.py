"""A composition of experts: several models in host memory, of which one is on the device.

SN40L (arXiv 2405.07518) serves many fine-tuned models this way: a router picks one for each prompt,
and the time of a switch is the time of copying its weights.  The weights here have the compute
dtype and the form for decoding, so a sparse model moves its stored blocks and index tables alone.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import SingleDeviceSharding

from sparse_dataflow.evaluation import decoded_form, kv_cache
from sparse_dataflow.evaluation.trained import Model

HOST, DEVICE = "pinned_host", "device"
"""Memory kinds of jax; page-locked host memory is what a device copies fastest."""


class Prompt(NamedTuple):
    """A text to continue.

    Attributes:
      expert: name of the expert that continues it; "" leaves the choice to the router.
    """

    text: str
    expert: str = ""


class Switch(NamedTuple):
    """A move of an expert's weights to the device.

    Attributes:
      bytes: bytes that moved.
      seconds: wall-clock seconds until all of them were there.
    """

    expert: str
    bytes: int
    seconds: float


class Experts(Protocol):
    """What continues prompts: one model, or a composition.

    Attributes:
      models: name -> model, without parameters in a composition.
    """

    models: dict[str, Model]

    def choose(self, prompts: Sequence[Prompt]) -> list[str]:
        """Returns the name of the expert of each prompt."""

    def activate(self, name: str) -> tuple[kv_cache.Weights, Switch | None]:
        """Puts an expert on the device.

        Returns:
          Its weights for decoding, and the switch; None where nothing moved.
        """


class OneModel(Experts):
    """A model that continues every prompt."""

    def __init__(self, model: Model, weights: Any = None, form: str = decoded_form.AUTO):
        """Takes a model.

        Args:
          weights: for decoding; None if the model has parameters, which are prepared at their first
            use.
          form: of masked weights, see `decoded_form`.
        """
        self.models, self._weights, self._form = {"": model}, weights, form

    def choose(self, prompts: Sequence[Prompt]) -> list[str]:
        return [""] * len(prompts)

    def activate(self, name: str) -> tuple[kv_cache.Weights, None]:
        if self._weights is None:
            model = self.models[name]
            self._weights = kv_cache.prepare(model.model, model.params, self._form)
        return self._weights, None


class Composition(Experts):
    """Models in host memory, of which at most one is on the device."""

    def __init__(self, router: Callable[[Sequence[str]], list[str]] | None = None):
        """Makes an empty composition.

        Args:
          router: maps texts to the names of their experts; None where every prompt names its own.
        """
        device = jax.local_devices()[0]
        self._host = SingleDeviceSharding(device, memory_kind=HOST)
        self._device = SingleDeviceSharding(device, memory_kind=DEVICE)
        self._router = router
        self._weights: dict[str, kv_cache.Weights] = {}
        self._active: tuple[str, kv_cache.Weights] | None = None
        self.models: dict[str, Model] = {}

    def add(self, name: str, model: Model) -> None:
        """Copies a model to host memory; its parameters on the device are the caller's to free."""
        self.add_weights(name, kv_cache.prepare(model.model, model.params))
        self.models[name] = dataclasses.replace(model, params={})

    def add_weights(self, name: str, weights: kv_cache.Weights) -> None:
        """Copies weights of `kv_cache.prepare` to host memory."""
        self._weights[name] = jax.block_until_ready(jax.device_put(weights, self._host))

    def bytes(self, name: str) -> int:
        """Returns the bytes of an expert's weights, which a switch to it moves."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._weights[name]))

    def choose(self, prompts: Sequence[Prompt]) -> list[str]:
        """Returns the name of the expert of each prompt; see `Experts`."""
        texts = [prompt.text for prompt in prompts if not prompt.expert]
        routed: Iterator[str] = iter(())
        if texts:
            assert self._router is not None
            routed = iter(self._router(texts))
        return [prompt.expert or next(routed) for prompt in prompts]

    def activate(self, name: str) -> tuple[kv_cache.Weights, Switch | None]:
        """Puts an expert on the device; see `Experts`.

        The weights of the expert before are deleted first, so the device never holds two.
        """
        if self._active and self._active[0] == name:
            return self._active[1], None
        before, self._active = self._active, None
        if before:
            for leaf in jax.tree.leaves(before[1]):
                # Deleted by hand: a caller may still reference the weights, and the device has no
                # room for two experts.
                leaf.delete()
        start = time.perf_counter()
        weights = jax.block_until_ready(jax.device_put(self._weights[name], self._device))
        switch = Switch(name, self.bytes(name), time.perf_counter() - start)
        self._active = name, weights
        return weights, switch
