"""Seconds of a training step by section, each section timed alone, forward and backward.

Times of single sections leave out the effect of fusion between sections; "other" is the rest of the
measured step.
"""

import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.layer_groups import layer_groups, layer_model, split_groups
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.mlp import activate
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.core.model.projection import layer_weights
from sparse_dataflow.core.model.shard import UNSHARDED
from sparse_dataflow.core.ops.attention.attention_op import self_attention
from sparse_dataflow.core.optim.optimizers import TrainState, make_optimizer

from .warm_up import warm_up


def section_seconds(
    model: ModelConfig, training: TrainingConfig, state: TrainState, step_seconds: float
) -> dict[str, float]:
    """Returns the seconds of one training step by section, in order, over all layers.

    Args:
      training: gives the shape of a micro-batch.
      state: parameters and layouts to time with; not changed.
      step_seconds: measured seconds of a whole step.

    Returns:
      {"embed", each projection, "attention", "norms and GELU", "head and loss", "optimizer",
      "other"} -> seconds; "other" is at least 0.  "experts" stands for the projections of the MLP
      in a mixture of experts, with router and activation.
    """
    rows = training.batch // training.micro_batches
    B, T, D = rows, training.sequence, model.d_model
    rng = np.random.default_rng(0)
    dtype = jnp.dtype(model.compute_dtype)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    # Layouts of quantised products never change, and need their groups.
    rest = stacks.with_groups(state.rest) if model.quantized else state.rest
    groups = split_groups(state.params["blocks"])
    none: tuple[dict, ...] = ({},) * len(groups)
    first_layers = [
        jax.tree.map(lambda leaf: leaf[0], stacked)
        for stacked in zip(groups, split_groups(rest["blocks"]) if rest else none, strict=True)
    ]

    def bound(layer):
        return gpt.bind_block(model, layer_weights(model, merged(*layer)))

    def all_layers(apply, width):
        """Times `apply(block, x)` in the first layer of each group; returns the sum."""
        x, total = draw(B, T, width), 0.0
        for group, (params, others) in zip(layer_groups(model), first_layers, strict=True):

            def forward(params, x, others=others):
                return apply(bound((params, others)), x)

            total += len(group.layers) * _seconds(forward, (params, x))
        return total

    def projection(name):
        width, _ = model.projection_shape(name)
        return all_layers(lambda block, x: getattr(block, name)(x), width)

    def experts():
        return all_layers(lambda block, x: block.experts(x, UNSHARDED)[0], D)

    def elementwise(params, x, normed, products):
        block = bound((params, first_layers[0][1]))
        heads = [block.normed_heads(name, leaf) for name, leaf in normed.items()]
        activated = () if model.experts else activate(model, *products)
        return [getattr(block, name)(x) for name in model.norms], heads, activated

    q, k, v = (
        draw(B, T, heads, model.head_width)
        for heads in (model.num_heads, model.kv_heads, model.kv_heads)
    )

    def attention():
        """Times the attention of all layers."""
        kinds = [layer_model(model, i) for i in range(model.num_layers)]
        return sum(
            kinds.count(kind)
            * _seconds(
                functools.partial(
                    self_attention,
                    window=kind.window,
                    blocks=kind.blocks,
                    cap=kind.attention_cap,
                    bidirectional=kind.bidirectional,
                ),
                (q, k, v),
            )
            for kind in dict.fromkeys(kinds)
        )

    targets = jnp.asarray(rng.integers(model.vocab_size, size=(B, T)), jnp.int32)
    batch = Batch(targets=targets).weighted()
    embed_params, head_params = state.params["embed"], state.params["head"]
    layers = model.num_layers
    normed = dict(zip(model.qk_norms, (q, k))) if model.qk_norm else {}
    products = [draw(B, T, model.d_ff) for _ in range(2 if model.gated_mlp else 1)]
    attn_out = model.projections.index("attn_out")
    attention_names, mlp_names = model.projections[:attn_out], model.projections[attn_out + 1 :]
    mlp = {"experts": experts()} if model.experts else {n: projection(n) for n in mlp_names}
    inputs = (first_layers[0][0], draw(B, T, D), normed, products)
    embed, head = (functools.partial(part, model) for part in (gpt.embed, gpt.head_loss))
    micro_batch = {
        "embed": _seconds(embed, (embed_params,), targets),
        **{name: projection(name) for name in attention_names},
        "attention": attention(),
        "attn_out": projection("attn_out"),
        **mlp,
        "norms and GELU": layers * _seconds(elementwise, inputs),
        "head and loss": _seconds(
            head, (head_params, embed_params["tokens"], draw(B, T, D)), batch
        ),
    }
    sections = {name: training.micro_batches * seconds for name, seconds in micro_batch.items()}
    sections["optimizer"] = _optimizer_seconds(model, training, state)
    return {**sections, "other": max(0.0, step_seconds - sum(sections.values()))}


def _seconds(function: Callable, inputs: tuple, *data) -> float:
    """Returns the median seconds of `function(*inputs, *data)` and its gradient in `inputs`.

    `data` and the gradient of the result are arguments because XLA would spend minutes folding
    constants.
    """

    @jax.jit
    def forward_and_backward(inputs, data, dy):
        y, vjp = jax.vjp(lambda *inputs: function(*inputs, *data), *inputs)
        return y, vjp(dy)

    dy = jax.tree.map(
        lambda y: jnp.ones(y.shape, y.dtype), jax.eval_shape(function, *inputs, *data)
    )
    return _median(lambda: forward_and_backward(inputs, data, dy))


def _optimizer_seconds(model, training, state):
    optimizer = make_optimizer(model, training)
    named = {"rest": stacks.with_groups(state.rest), "learning_rate": 1e-3}
    update = jax.jit(functools.partial(optimizer.update, **named))
    return _median(lambda: update(state.params, state.moments, state.params))


def _median(run):
    def seconds():
        start = time.perf_counter()
        jax.block_until_ready(run())
        return time.perf_counter() - start

    warm_up(seconds)
    return float(np.median([seconds() for _ in range(5)]))
