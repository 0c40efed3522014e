"""Decoding layer by layer, where the layers are not all on one device.

A stage holds consecutive layers and their caches: on this device, in host memory (the device then
holds two layers at a time, as L2L, arXiv 2002.05645, trains), or in another process (Petals, arXiv
2209.01188).  A stage that was lost may come back without its caches: they are computed again from
the ids of the texts.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import numpy as np

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.evaluation import kv_cache
from sparse_dataflow.evaluation.kv_cache import LayerCache, Weights


class StageLost(Exception):
    """A stage ended, with its caches; says which and why."""


class Stage(Protocol):
    """Consecutive layers with their caches, which a new prompt begins again."""

    def read_prompts(
        self, x_BxTxD: jax.Array, lengths_B: jax.Array, cache_tokens: int
    ) -> jax.Array:
        """Returns the outputs [B, T, D] of the layers; see `kv_cache.read_prompts`."""

    def append(self, x_Bx1xD: jax.Array, positions_Bx1: jax.Array) -> jax.Array:
        """Returns the outputs [B, 1, D] of the layers for a token of each row."""

    def revive(self) -> None:
        """Brings a lost stage back, without caches; raises UserError if it does not come."""


class Layers:
    """Layers on this device."""

    def __init__(self, config: ModelConfig, layers: Sequence[dict], first: int = 0):
        self._config, self._layers, self._first = config, layers, first
        self._caches: tuple[LayerCache, ...] = ()

    def read_prompts(
        self, x_BxTxD: jax.Array, lengths_B: jax.Array, cache_tokens: int
    ) -> jax.Array:
        """See `Stage`."""
        self._caches = ()  # Frees them first.
        x_BxTxD, self._caches = kv_cache.read_prompts(
            self._config, self._layers, x_BxTxD, lengths_B, cache_tokens, self._first
        )
        return x_BxTxD

    def append(self, x_Bx1xD: jax.Array, positions_Bx1: jax.Array) -> jax.Array:
        """See `Stage`."""
        x_Bx1xD, self._caches = kv_cache.append_texts(
            self._config, self._layers, self._caches, x_Bx1xD, positions_Bx1, True, self._first
        )
        return x_Bx1xD

    def revive(self) -> None:
        """Is never lost."""


class LayersInTurn:
    """Layers in host memory, of which the device holds the one that computes and the next."""

    def __init__(self, config: ModelConfig, layers: Sequence[dict], first: int = 0):
        """Takes layers in numpy, or of a CPU."""
        self._config, self._layers, self._first = config, layers, first
        self._device = jax.local_devices()[0]
        self._caches: list[LayerCache] = []

    def read_prompts(
        self, x_BxTxD: jax.Array, lengths_B: jax.Array, cache_tokens: int
    ) -> jax.Array:
        """See `Stage`."""
        self._caches = []

        def read(number, layer, x_BxTxD):
            x_BxTxD, caches = kv_cache.read_prompts(
                self._config, layer, x_BxTxD, lengths_B, cache_tokens, number
            )
            self._caches += caches
            return x_BxTxD

        return self._in_turn(read, x_BxTxD)

    def append(self, x_Bx1xD: jax.Array, positions_Bx1: jax.Array) -> jax.Array:
        """See `Stage`."""

        def append(number, layer, x_Bx1xD):
            i = number - self._first
            x_Bx1xD, [self._caches[i]] = kv_cache.append_texts(
                self._config, layer, [self._caches[i]], x_Bx1xD, positions_Bx1, True, number
            )
            return x_Bx1xD

        return self._in_turn(append, x_Bx1xD)

    def revive(self) -> None:
        """Is never lost."""

    def _in_turn(self, run, x):
        following = jax.device_put(self._layers[0], self._device)
        for i in range(len(self._layers)):
            layer = following
            if i + 1 < len(self._layers):
                following = jax.device_put(self._layers[i + 1], self._device)
            x = run(self._first + i, [layer], x)
            # Calls return before they computed: all layers would soon be on their way at once.
            jax.block_until_ready(x)
        return x


class Staged:
    """A model whose layers are in stages.

    Its methods take the place of `kv_cache.prefill` and `kv_cache.decode_token`.  They change it,
    so one batch of texts is written at a time.
    """

    def __init__(
        self,
        config: ModelConfig,
        ends: Weights,
        stages: Sequence[Stage],
        on_loss: Callable[[str], None] = lambda reason: None,
    ):
        """
        Args:
          ends: of the embedding and the head, without layers; see `kv_cache.prepare`.
          stages: of all layers, in order.
          on_loss: called with the reason when a stage was lost, before it comes back.
        """
        self._config, self._ends = config, ends._replace(layers=())
        self._stages, self._on_loss = stages, on_loss
        self._texts_BxT = np.zeros((0, 0), np.int32)

    def prefill(
        self, tokens_BxT: np.ndarray, lengths_B: np.ndarray, *, cache_tokens: int
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """See `kv_cache.prefill`; the stages keep the caches."""
        room = cache_tokens - tokens_BxT.shape[1]
        self._texts_BxT = np.pad(tokens_BxT, ((0, 0), (0, room)))
        try:
            return self._read(tokens_BxT, lengths_B), ()
        except StageLost as error:
            return self._read_again(error, lengths_B), ()

    def decode_token(
        self, caches: Sequence[LayerCache], tokens_B: np.ndarray, positions_B: np.ndarray
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """See `kv_cache.decode_token`."""
        # Rows that are complete go on at the last place of their cache, which nobody reads.
        positions_B = np.minimum(positions_B, self._texts_BxT.shape[1] - 1)
        self._texts_BxT[np.arange(len(tokens_B)), positions_B] = tokens_B
        config = self._config
        try:
            x_Bx1xD, positions_Bx1 = kv_cache.embedded_at(
                config,
                self._ends.embed,
                tokens_B[:, None],
                positions_B + np.int32(config.prompt_vectors),
            )
            for stage in self._stages:
                x_Bx1xD = stage.append(x_Bx1xD, positions_Bx1)
        except StageLost as error:
            return self._read_again(error, positions_B + np.int32(1)), ()
        ones_B = np.ones(len(tokens_B), np.int32)
        return kv_cache.last_logits(config, self._ends, x_Bx1xD, ones_B), ()

    def _read(self, tokens_BxT, lengths_B):
        """Returns the logits after prompts; their caches have room for all of the texts."""
        x_BxTxD, lengths_B, cache_tokens = kv_cache.embedded_prompts(
            self._config, self._ends.embed, tokens_BxT, lengths_B, self._texts_BxT.shape[1]
        )
        for stage in self._stages:
            x_BxTxD = stage.read_prompts(x_BxTxD, lengths_B, cache_tokens)
        return kv_cache.last_logits(self._config, self._ends, x_BxTxD, lengths_B)

    def _read_again(self, error, lengths_B):
        """Returns the logits after the texts so far, all caches computed again."""
        while True:
            self._on_loss(str(error))
            for stage in self._stages:
                stage.revive()
            try:
                return self._read(self._texts_BxT, lengths_B)
            except StageLost as again:
                error = again
