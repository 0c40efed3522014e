"""Decoding with experts in host memory (InfMoE, arXiv 2106.10715, section 5).

The device holds all other weights and, for each layer, the experts of a few slots, the least
recently used of which makes room.  The router of a layer is known only after its attention.  So
the next layer's experts are predicted, by its router and norm applied to the residual stream
before this layer's experts (arXiv 2312.17238, section 3.2), and fetched while this layer computes.
Experts that were not predicted are fetched on demand; predicted ones that no token chose are
dropped.

Tokens of a prompt may choose more experts than there are slots.  A layer then computes the choices
in turns, each of as many experts as fit.

Shapes in names as in `model.experts`.
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.layer_groups import join_groups, layer_model, split_groups
from sparse_dataflow.core.config.projections import MLP
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.experts import collect, dispatch, spread
from sparse_dataflow.core.model.projection import without_layout
from sparse_dataflow.core.model.shard import UNSHARDED
from sparse_dataflow.core.weights.kind import LAYOUT
from sparse_dataflow.evaluation import kv_cache
from sparse_dataflow.evaluation.kv_cache import LayerCache, Weights
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files.errors import UserError

_HOST, _DEVICE = "pinned_host", "device"
"""Memory kinds of jax; page-locked host memory is what a device copies fastest."""


@dataclasses.dataclass
class Traffic:
    """Experts that routers chose and that were fetched, over some tokens.

    Attributes:
      chosen: experts that tokens chose, each once in a layer and step.
      resident: chosen experts that were in a slot.
      ahead: chosen experts whose fetch started before the router chose them.
      unused: fetched experts that no token chose.
    """

    tokens: int = 0
    chosen: int = 0
    resident: int = 0
    ahead: int = 0
    unused: int = 0

    @property
    def fetched(self) -> int:
        """All fetched experts."""
        return self.chosen - self.resident + self.unused

    @property
    def hit_rate(self) -> float:
        """Share of the fetches of chosen experts that started ahead; 1 if there was none."""
        missing = self.chosen - self.resident
        return self.ahead / missing if missing else 1.0


@dataclasses.dataclass
class _Layer:
    """A layer, with slots in place of its experts.

    Attributes:
      weights: on the device; arrays of the experts are [slots, ...].
      experts: the weights of each expert in host memory.
      slot_of: expert -> slot, the least recently used first.
    """

    weights: dict
    experts: list[dict]
    slot_of: collections.OrderedDict[int, int]


class OffloadedExperts:
    """Weights for decoding, with experts in host memory.

    Not a pytree: its methods take the place of `kv_cache.prefill` and `kv_cache.decode_token`.
    They change it, so one text, or one batch of texts, is written at a time.

    Attributes:
      prompt: traffic of prompts.
      writing: traffic of decoded tokens.
      expert_bytes: bytes of one expert of one layer.
      other_bytes: bytes of all weights but the experts.
    """

    def __init__(self, model: Model, slots: int):
        """Moves the experts of a model to host memory, and its other weights to the device.

        Args:
          model: the model; parameters in numpy or on a CPU never are on the device whole.
          slots: experts of each layer on the device.

        Raises:
          UserError: the model has no experts, its parameters are sharded, or there are fewer slots
            than a token has experts, or more than experts.
        """
        config = model.model
        _refuse_unsupported(model, slots)
        device = jax.local_devices()[0]
        host = SingleDeviceSharding(device, memory_kind=_HOST)
        self._device = SingleDeviceSharding(device, memory_kind=_DEVICE)
        self._config, self._slots = config, slots
        params = stacks.map_arrays(np.asarray, model.params)
        others = {**params, "blocks": join_groups([*map(_others, split_groups(params["blocks"]))])}
        others = stacks.map_arrays(lambda leaf: jax.device_put(leaf, self._device), others)
        weights = jax.device_put(kv_cache.prepare(config, others), self._device)
        del others  # Frees the float32 weights before the slots are allocated.
        self.other_bytes = _bytes(weights)
        self._ends = weights._replace(layers=())
        self._layers: list[_Layer] = []
        dtype = jnp.dtype(config.compute_dtype)
        layers = stacks.weights(config, params)
        for resident, stored in zip(weights.layers, layers, strict=True):
            stacked = _experts(stored)
            experts = [
                jax.tree.map(lambda leaf, e=e: np.ascontiguousarray(leaf[e], dtype), stacked)
                for e in range(config.experts)
            ]
            experts = jax.device_put(experts, host)
            self._layers.append(_Layer(resident, experts, collections.OrderedDict()))
        self._ahead: dict[int, dict] = {}
        self._empty_slots()
        self.expert_bytes = _bytes(self._layers[0].experts[0])
        self.prompt, self.writing = Traffic(), Traffic()
        self._traffic = self.prompt
        self._most_moving = 0

    def _empty_slots(self):
        self._ahead = {}
        for layer in self._layers:
            layer.slot_of.clear()
            for name, weights in layer.experts[0].items():
                layer.weights["experts"][name] = jax.tree.map(
                    lambda leaf: jnp.zeros(
                        (self._slots, *leaf.shape), leaf.dtype, device=self._device
                    ),
                    weights,
                )

    @property
    def device_bytes(self) -> int:
        """Most bytes of weights on the device so far: slots, and experts on their way to them."""
        slots = len(self._layers) * self._slots + self._most_moving
        return self.other_bytes + slots * self.expert_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all weights, with all experts."""
        return self.other_bytes + len(self._layers) * self._config.experts * self.expert_bytes

    def prefill(
        self, tokens_BxT: np.ndarray, lengths_B: np.ndarray, *, cache_tokens: int
    ) -> tuple[jax.Array, Sequence[LayerCache]]:
        """See `kv_cache.prefill`."""
        self._traffic = self.prompt
        caches = [None] * len(self._layers)
        return self._whole_step(tokens_BxT, None, lengths_B, caches, cache_tokens)

    def decode_token(
        self, caches: Sequence[LayerCache], tokens_B: jax.Array, positions_B: np.ndarray
    ) -> tuple[jax.Array, Sequence[LayerCache]]:
        """See `kv_cache.decode_token`; donates the caches."""
        self._traffic = self.writing
        # Rows that are complete go on at the last place of their cache, which nobody reads.
        positions_B = np.minimum(positions_B, caches[0].tokens - 1)
        lengths_B = np.ones_like(positions_B)
        return self._whole_step(tokens_B[:, None], positions_B, lengths_B, caches, 0)

    def _whole_step(self, *args):
        try:
            return self._step(*args)
        except BaseException:  # Ctrl-C between a write and its record leaves a slot unknown.
            self._empty_slots()
            raise

    def _step(self, tokens_BxT, positions_B, lengths_B, caches, cache_tokens):
        config, layers = self._config, self._layers
        real_N = (np.arange(tokens_BxT.shape[1]) < lengths_B[:, None]).reshape(-1)
        self._traffic.tokens += int(real_N.sum())
        x_BxTxD, predicted_NxK = _embed(
            config, self._ends.embed, layers[0].weights, tokens_BxT, positions_B
        )
        self._fetch_ahead(layers[0], np.asarray(predicted_NxK)[real_N])
        new_caches = []
        layers_and_caches = zip(layers, [*layers[1:], None], caches, strict=True)
        for i, (layer, following, cache) in enumerate(layers_and_caches):
            # The last layer predicts for itself, which no one reads: one program serves all layers.
            x_BxTxD, attended, cache = _attention(
                layer_model(config, i),
                layer.weights,
                (following or layer).weights,
                x_BxTxD,
                cache,
                positions_B,
                lengths_B,
                cache_tokens=cache_tokens,
            )
            new_caches.append(cache)
            normed_BxTxD, gates_NxK, *choices = attended
            # Waits for the router: which experts are needed is known only now.
            experts_NxK, predicted_NxK = jax.device_get(choices)
            experts_NxK = np.where(real_N[:, None], experts_NxK, config.experts)
            y_NxKxD = self._outputs(layer, normed_BxTxD, experts_NxK)
            if following is not None:
                # After `_outputs`, which takes what was fetched for this layer; its products may
                # still run.
                self._fetch_ahead(following, predicted_NxK[real_N])
            x_BxTxD = _combine(config, layer.weights, x_BxTxD, normed_BxTxD, gates_NxK, y_NxKxD)
        return _logits(config, self._ends, x_BxTxD, lengths_B), new_caches

    def _outputs(self, layer, normed_BxTxD, experts_NxK):
        """Returns the outputs [N, K, D] of the experts, 0 where a choice is of none."""
        chosen = [int(e) for e in np.unique(experts_NxK) if e < self._config.experts]
        traffic = self._traffic
        traffic.chosen += len(chosen)
        traffic.resident += sum(e in layer.slot_of for e in chosen)
        traffic.ahead += sum(e in self._ahead for e in chosen)
        traffic.unused += sum(e not in chosen for e in self._ahead)
        # Experts in slots come first: the other turns may overwrite them.
        chosen.sort(key=lambda e: (e not in layer.slot_of, e not in self._ahead))
        y_NxKxD = jnp.zeros((*experts_NxK.shape, self._config.d_model), normed_BxTxD.dtype)
        for start in range(0, len(chosen), self._slots):
            turn = chosen[start : start + self._slots]
            self._place(layer, turn)
            # Entry `experts` stands for padding tokens.  They and experts of other turns have no
            # slot, which `_products` knows by the number of slots.
            slots = np.full(self._config.experts + 1, self._slots, np.int32)
            slots[turn] = [layer.slot_of[e] for e in turn]
            y_NxKxD = _products(
                self._config,
                layer.weights,
                normed_BxTxD,
                slots[experts_NxK],
                y_NxKxD,
            )
        return y_NxKxD

    def _place(self, layer, turn):
        """Writes the experts of a turn, at most one for each slot, to slots."""
        # Those in use become the newest first, so that none of this turn makes room.
        for expert in turn:
            if expert in layer.slot_of:
                layer.slot_of.move_to_end(expert)
        missing = [expert for expert in turn if expert not in layer.slot_of]
        late = [expert for expert in missing if expert not in self._ahead]
        self._most_moving = max(self._most_moving, len(self._ahead) + len(late))
        fetched = {e: self._fetch(layer, e) for e in late}
        for expert in missing:
            slot = len(layer.slot_of)
            if slot == self._slots:
                _, slot = layer.slot_of.popitem(last=False)
            weights = self._ahead.pop(expert) if expert in self._ahead else fetched.pop(expert)
            experts = _experts(layer.weights)
            layer.weights["experts"] |= _write(experts, weights, np.int32(slot))
            layer.slot_of[expert] = slot

    def _fetch_ahead(self, layer, predicted):
        """Starts fetching the experts that most tokens are predicted to choose."""
        votes = collections.Counter(predicted.reshape(-1).tolist())
        missing = [expert for expert, _ in votes.most_common() if expert not in layer.slot_of]
        self._ahead = {}  # Frees experts that no token chose.
        self._ahead = {e: self._fetch(layer, e) for e in missing[: self._slots]}

    def _fetch(self, layer, expert):
        """Starts copying an expert to the device; returns before it is there."""
        return jax.device_put(layer.experts[expert], self._device)


def _refuse_unsupported(model: Model, slots: int) -> None:
    config = model.model
    if not config.experts:
        raise UserError(
            f"expert_slots={slots} is for a mixture of experts, and model.experts is 0; legal: 0."
        )
    token = config.prototypes * config.top_k
    if not token <= slots <= config.experts:
        raise UserError(
            f"expert_slots={slots} is not legal: a token has {token} of {config.experts} experts "
            f"in each layer; legal: {token} to {config.experts}, or 0 for no host memory."
        )
    arrays = [leaf for leaf in jax.tree.leaves(model.params) if isinstance(leaf, jax.Array)]
    devices = max((len(array.devices()) for array in arrays), default=1)
    if devices > 1:
        raise UserError(
            f"The parameters are sharded over {devices} devices; legal with expert_slots: one "
            "device."
        )


def _experts(layer):
    """Returns the projections of the experts of a layer, without their layouts.

    Every layer of the experts has the layout of `model_layouts.expert_layout`.
    """
    return {
        name: without_layout(linear) for name, linear in layer["experts"].items() if name in MLP
    }


def _others(params):
    """Returns the parameters without the weights of the experts."""
    experts = params["experts"]
    others = {name: leaf for name, leaf in experts.items() if name not in MLP}
    if "shared" in others:  # It has the layouts of the experts.
        others["shared"] = {
            name: {**({LAYOUT: experts[name][LAYOUT]} if LAYOUT in experts[name] else {}), **leaf}
            if name in MLP
            else leaf
            for name, leaf in others["shared"].items()
        }
    return {**params, "experts": others}


def _bytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def _predict(config, weights, x_BxTxD):
    """Returns the experts [N, K] that a layer's router would choose for a residual stream."""
    block = gpt.bind_block(config, weights)
    normed = block.mlp_input(x_BxTxD)
    return block.experts.route(normed.reshape(-1, normed.shape[-1]))[1]


@functools.partial(jax.jit, static_argnames="config")
def _embed(config, embed, first_weights, tokens_BxT, positions_B):
    """Returns the embedded tokens and the predicted experts of the first layer."""
    batch = Batch(positions=None if positions_B is None else positions_B[:, None])
    x_BxTxD = gpt.embed(config, embed, tokens_BxT, batch)
    return x_BxTxD, _predict(config, first_weights, x_BxTxD)


@functools.partial(
    jax.jit, static_argnames=("config", "cache_tokens"), donate_argnames=("x_BxTxD", "cache")
)
def _attention(
    config, weights, following_weights, x_BxTxD, cache, positions_B, lengths_B, *, cache_tokens
):
    """Applies a block up to its experts.

    Returns:
      (residual stream, (input of the experts, factors [N, K], experts [N, K], predicted experts
      [N, K] of the following layer), cache).
    """
    caches: list[LayerCache] = []
    if cache is None:
        positions_BxT = None
        attend = functools.partial(kv_cache.prompt_attention, caches, cache_tokens, lengths_B)
    else:
        positions_BxT = positions_B[:, None]
        attend = functools.partial(kv_cache.append_to_cache, caches, cache, positions_BxT, True)
    block = gpt.bind_block(config, weights)
    x_BxTxD, normed_BxTxD = block.attention(
        x_BxTxD, Batch(positions=positions_BxT), UNSHARDED, attend
    )
    gates, experts, _ = block.experts.route(normed_BxTxD.reshape(-1, normed_BxTxD.shape[-1]))
    predicted = _predict(config, following_weights, x_BxTxD)
    return x_BxTxD, (normed_BxTxD, gates, experts, predicted), caches[0]


@functools.partial(jax.jit, static_argnames="config", donate_argnames="y_NxKxD")
def _products(config, weights, normed_BxTxD, slots_NxK, y_NxKxD):
    """Returns y with the outputs of the experts in slots; `slots` in slots_NxK is no slot."""
    experts = gpt.bind_block(config, weights).experts
    count = len(jax.tree.leaves(_experts(weights))[0])
    sent, tiles_T = dispatch(config, slots_NxK, count)
    x_SxD = spread(normed_BxTxD.reshape(-1, normed_BxTxD.shape[-1]), sent)
    outputs_NxKxD = collect(experts.products(x_SxD, tiles_T, UNSHARDED), sent)
    return jnp.where(slots_NxK[..., None] < count, outputs_NxKxD, y_NxKxD)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="x_BxTxD")
def _combine(config, weights, x_BxTxD, normed_BxTxD, gates_NxK, y_NxKxD):
    """Adds the experts' outputs to the residual stream."""
    block = gpt.bind_block(config, weights)
    y_BxTxD = block.experts.combine(gates_NxK, y_NxKxD, normed_BxTxD, UNSHARDED)
    return block.add_mlp(x_BxTxD, y_BxTxD, UNSHARDED)


@functools.partial(jax.jit, donate_argnames="slots")
def _write(slots, expert, slot):
    """Writes the weights of an expert to a slot, in place."""
    return jax.tree.map(lambda all_slots, one: all_slots.at[slot].set(one), slots, expert)


@functools.partial(jax.jit, static_argnames="config")
def _logits(config, ends: Weights, x_BxTxD, lengths_B):
    return kv_cache.last_logits(config, ends, x_BxTxD, lengths_B)
