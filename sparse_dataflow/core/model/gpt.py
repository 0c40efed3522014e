"""A decoder-only transformer as an ordered list of sections: `embed`, equal `block`s, `head`.

Executors use a model only through these pure functions over nested dicts of arrays:

    params = {"embed": ..., "blocks": every leaf stacked [stored_layers, ...], "head": ...}
    tables = {projection: LayoutTables stacked [num_layers, ...]} of the sparse projections

With per-layer densities, params["blocks"] and tables are tuples of such trees, one for each layer
group (see `model.stacks`).  A block takes the `layer_weights` of one layer: its parameters, in
which each projection is a `Linear`, a weight and a bias.

Parameters are float32.  [V] vocab_size, [D] d_model, [K] head_width:

| section | name | shape | which models have it |
|---|---|---|---|
| embed | tokens | [V, D] | all |
| embed | positions | [max_len, D] | positions="learned" |
| embed | prompt | [prompt_vectors, D] | prompt_vectors |
| block | NORM.scale | [D] | each name in `norms` |
| block | NORM.bias | [D] | norm="layernorm" |
| block | q_norm.scale, k_norm.scale | [K] | qk_norm with qk_norm_scope="head" |
| block | q_norm.bias, k_norm.bias | [K] | as q_norm.scale, and norm="layernorm" |
| block | q_norms.scale, k_norms.scale | `qk_norm_shape` | qk_norm with another scope than head |
| block | q_norms.bias, k_norms.bias | as scale | all_heads and norm="layernorm" |
| block | PROJECTION.kernel | projection_shape: [in, out] | each dense name in `projections` |
| block | PROJECTION.values | [nnz, block, block] | each block-sparse name in `projections` |
| block | PROJECTION.a_factor, b_factor | [in, r], [r, out] | each low-rank name |
| block | PROJECTION.bias | [out] | each name in `biases` |
| block | experts.router | [D, experts] | experts |
| block | experts.PROJECTION.* | [experts, ...], each as above and below | experts, for the MLP |
| block | experts.shared.PROJECTION.* | as above and below | shared_expert, for the MLP |
| block | experts.shared.router | [D, 1] | shared_gate |
| block | left_out.PROJECTION.*, left_out.positions | see `model.left_out` | left_out, for the MLP |
| block | PROJECTION.a_kernel, b_kernel, gate | [in, rank], [rank, out], [] | spec.rank > 0 |
| block, head | side.* | `side_shapes` | side_width |
| head | norm.scale | [D] | all |
| head | norm.bias | [D] | norm="layernorm" |
| head | output | [V, D] | not tied_embeddings |
| head | output_bias | [V] | output_bias |

Output features of `q`, `k` and `v`, and input features of `attn_out`, are ordered [head, K], halves
of K paired by rotation.  Those of `qkv` are ordered [kv head, (its queries..., key, value), K], so
without grouped queries [head, (query, key, value), K].

Shapes in names: B batch, T tokens, D d_model, H heads, N = B * T.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from sparse_dataflow.core.batch import NO_BATCH, Batch
from sparse_dataflow.core.config.attention_settings import (
    ALL_HEADS,
    EACH_HEAD,
    PARALLEL,
    SHARED_NORM,
)
from sparse_dataflow.core.config.layer_groups import join_groups, layer_groups
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import MLP
from sparse_dataflow.core.model import left_out, scales
from sparse_dataflow.core.model.adapters import PROMPT
from sparse_dataflow.core.model.mlp import Mlp, draw_mlp, draw_projections
from sparse_dataflow.core.model.shard import UNSHARDED, Shard, normalise
from sparse_dataflow.core.ops import dispatch, platforms
from sparse_dataflow.core.ops.attention.attention_op import self_attention
from sparse_dataflow.core.ops.cross_entropy import cross_entropy_op as cross_entropy
from sparse_dataflow.core.ops.cross_entropy.cross_entropy_op import TeacherOutput, distillation_loss
from sparse_dataflow.core.ops.derivatives import broadcast_like, lookup, lookup_and_table
from sparse_dataflow.core.step_metrics import Metrics, Sum
from sparse_dataflow.core.weights.kind import SIDE, Weight
from sparse_dataflow.core.weights.weight import Linear, named_output


class HeadNorm(nnx.Module):
    """A norm of the features of each head, with a scale for each head."""

    def __init__(self, config: ModelConfig, heads: int, rngs: nnx.Rngs):
        self.norm = _norm(config, rngs, config.head_width, scaled=False)
        self.scale = nnx.Param(jnp.ones(config.qk_norm_shape(heads)))

    def __call__(self, x_BxTxHxK):
        """Normalises [B, T, H, K] over K."""
        return self.norm(x_BxTxHxK) * broadcast_like(self.scale[...], x_BxTxHxK)


class Block(Mlp):
    """Transformer block (arXiv 2005.14165, section 2.1); the config says its parts."""

    qkv: Linear
    attn_out: Linear
    norm1: nnx.LayerNorm | nnx.RMSNorm
    norm2: nnx.LayerNorm | nnx.RMSNorm

    def __init__(self, config: ModelConfig, weights: dict):
        super().__init__(config, weights)
        for name in _block_norms(config):
            setattr(self, name, _bind_norm(config, name, weights[name]))
        if config.experts:
            from sparse_dataflow.core.model.experts import Experts

            self.experts = Experts(config, weights["experts"])
        self.query_scale = scales.query_scale(config)

    def __call__(self, x_BxTxD, batch=NO_BATCH, shard=UNSHARDED, attend=self_attention):
        """Applies the block: [B, T, D] -> [B, T, D]; T / devices tokens under a shard.

        Args:
          x_BxTxD: residual stream.
          batch: positions, documents and padding of the tokens.
          shard: shard of the weights.
          attend: attention, called as attend(queries [B, T, H, K], keys [B, T, kv heads, K],
            values like keys, window=config.window, cap=config.attention_cap), with `documents` if
            the batch has them, with `bidirectional` if the model is, and with `blocks` if the
            config has attention_blocks.
        """
        return self.residuals(x_BxTxD, batch, shard, attend)[1]

    def residuals(self, x_BxTxD, batch=NO_BATCH, shard=UNSHARDED, attend=self_attention):
        """Returns the residual stream [B, T, D] after attention and after the MLP, and the metrics
        of the block."""
        x_BxTxD, normed = self.attention(x_BxTxD, batch, shard, attend)
        if self.config.experts:
            y_BxTxD, metrics = self.experts(normed, shard, batch.real)
        else:
            y_BxTxD, metrics = self.mlp(normed, shard), {}
        return x_BxTxD, self.add_mlp(x_BxTxD, y_BxTxD, shard), metrics

    def attention(self, x_BxTxD, batch, shard, attend):
        """Returns the residual stream [B, T, D] after attention, and the input of the MLP, with
        the tokens of all devices of the shard."""
        config = self.config
        x_BxTxD, normed = self._pass_and_read("norm1", x_BxTxD, shard)
        with jax.named_scope("heads"):
            q, k, v = self._heads(normed, shard)
        if config.qk_norm:
            q, k = map(self.normed_heads, config.qk_norms, (q, k), (shard, shard))
        if config.positions == "rotary":
            from sparse_dataflow.core.model.rotary import rotate

            q, k = (rotate(config, heads, batch.positions) for heads in (q, k))
        if self.query_scale != 1:
            q *= self.query_scale
        if batch.documents is not None:
            attend = functools.partial(attend, documents=batch.documents)
        if config.bidirectional:
            attend = functools.partial(attend, bidirectional=True)
        if config.attention_blocks:
            attend = functools.partial(attend, blocks=config.blocks)
        with jax.named_scope("attention"):
            attended = attend(q, k, v, window=config.window, cap=config.attention_cap)
        attended = shard.gather_features(attended.reshape(*attended.shape[:2], -1))
        # Without its bias, which is added once, after the sum over devices.
        y_BxTxD = self.attn_out.product(attended, shard.reduce)
        # One kernel adds the bias and the residual and normalises, where a platform has it.
        if self._adds_at_once and (
            fused := shard.add_and_normalise(
                self.norm2,
                x_BxTxD,
                named_output(y_BxTxD),
                self.attn_out.bias,
                self._input_groups("mlp_in"),
            )
        ):
            return fused[0], shard.gather(fused[1])
        y_BxTxD = self._add("norm1_out", x_BxTxD, self.attn_out.plus_bias(y_BxTxD), shard)
        if config.residual == SHARED_NORM:
            return y_BxTxD, normed
        return y_BxTxD, self.mlp_input(x_BxTxD if config.residual == PARALLEL else y_BxTxD, shard)

    def mlp_input(self, x_BxTxD, shard=UNSHARDED):
        """Returns the input of the MLP or of the experts from the residual stream that it reads."""
        return self._read(
            "norm1" if self.config.residual == SHARED_NORM else "norm2", x_BxTxD, shard
        )

    def add_mlp(self, x_BxTxD, y_BxTxD, shard):
        """Adds the output of the MLP or of the experts to the residual stream after attention."""
        return self._add("norm2_out", x_BxTxD, y_BxTxD, shard)

    @property
    def _adds_at_once(self):
        """Whether norm2 reads what attention adds to the residual stream, as it is."""
        config = self.config
        sequential = config.residual not in (PARALLEL, SHARED_NORM) and config.residual_scale == 1
        return sequential and config.pre_norms and not config.post_norms

    def _pass_and_read(self, norm, x_BxTxD, shard):
        """Returns the residual stream, and what a half of the block reads of it.

        A kernel of the norm adds the gradients of both.
        """
        if self.config.pre_norms:
            groups = self._input_groups("qkv")
            fused = shard.add_and_normalise(getattr(self, norm), x_BxTxD, groups=groups)
            if fused:
                return fused[0], shard.gather(fused[1])
        return x_BxTxD, self._read(norm, x_BxTxD, shard)

    def _input_groups(self, projection):
        """Returns `Weight.input_groups` of a projection; those of a dense one if there is no such
        projection, or another function in place of its weight."""
        weight = getattr(getattr(self, projection, None), "weight", None)
        return (Weight() if weight is None else weight).input_groups

    def _read(self, norm, x_BxTxD, shard):
        if self.config.pre_norms:
            with jax.named_scope("norm"):
                x_BxTxD = shard.normalise(getattr(self, norm), x_BxTxD)
        return shard.gather(x_BxTxD)

    def _add(self, norm, x_BxTxD, y_BxTxD, shard):
        if self.config.post_norms:
            y_BxTxD = shard.normalise(getattr(self, norm), y_BxTxD)
        with jax.named_scope("residual"):
            if self.config.residual_scale != 1:
                y_BxTxD *= self.config.residual_scale
            return x_BxTxD + y_BxTxD

    def normed_heads(self, name, x_BxTxHxK, shard=UNSHARDED):
        """Applies one of `qk_norms` to the heads of this device."""
        norm = getattr(self, name)
        if self.config.qk_norm_scope != ALL_HEADS:
            return normalise(norm, x_BxTxHxK)
        rows = x_BxTxHxK.reshape(*x_BxTxHxK.shape[:2], -1)
        return shard.normalise_heads(norm, rows).reshape(x_BxTxHxK.shape)

    def _heads(self, x_BxTxD, shard):
        """Returns queries [B, T, heads, K], keys and values [B, T, kv heads, K] of the shard."""
        B, T, _ = x_BxTxD.shape
        width, group = self.config.head_width, self.config.num_heads // self.config.kv_heads
        if not self.config.fused_qkv:
            heads = [getattr(self, name)(x_BxTxD, shard.reduce_features) for name in "qkv"]
            return [rows.reshape(B, T, -1, width) for rows in heads]
        qkv = self.qkv.product(x_BxTxD, shard.reduce_features)
        if dispatch.on(platforms.HEADS_KERNEL):
            tiled = importlib.import_module("sparse_dataflow.chips.tpu.heads")
            if heads := tiled.split(self.qkv.bias, qkv, group, width):
                return heads
        qkv = self.qkv.plus_bias(qkv).reshape(B, T, -1, group + 2, width)
        if group == 1:
            if dispatch.on(platforms.JOINED_SPLITS):
                # The gradient of a split joins its parts in one copy.
                return [rows[:, :, :, 0] for rows in lax.split(qkv, (1, 1, 1), axis=3)]
            # [B, T, heads, (query, key, value), K]: three arrays along the axis of the parts.
            return jnp.moveaxis(qkv, 3, 0)
        # [B, T, kv heads, (queries..., key, value), K].
        return qkv[..., :group, :].reshape(B, T, -1, width), qkv[..., group, :], qkv[..., -1, :]


def init(config: ModelConfig, key: jax.Array) -> dict:
    """Draws the parameters in float32; the module docstring shows their structure."""
    keys = init_keys(config, key)
    blocks = [
        # A shared block is drawn once, with the key of the first layer.
        jax.vmap(functools.partial(init_section, group.model, "block"))(
            keys["blocks"][group.layers.start : group.layers.stop][: config.stored_layers]
        )
        for group in layer_groups(config)
    ]
    return {
        "embed": init_section(config, "embed", keys["embed"]),
        "blocks": join_groups(blocks),
        "head": init_section(config, "head", keys["head"]),
    }


def init_keys(config: ModelConfig, key: jax.Array) -> dict[str, jax.Array]:
    """Returns the random keys of the sections in `init`: one each, [num_layers] for "blocks"."""
    embed_key, blocks_key, head_key = jax.random.split(key, 3)
    blocks = jax.random.split(blocks_key, config.num_layers)
    return {"embed": embed_key, "blocks": blocks, "head": head_key}


def init_section(config: ModelConfig, section: str, key: jax.Array) -> dict:
    """Draws the parameters of "embed", of one "block" or of "head"."""
    rngs, shape = nnx.Rngs(params=key), (config.vocab_size, config.d_model)
    params: dict
    if section == "embed":
        # GPT-2's standard deviations, of tokens and of positions.
        params = {"tokens": 0.02 * jax.random.normal(rngs.params(), shape)}
        if config.positions == "learned":
            shape = (config.max_len, config.d_model)
            params["positions"] = 0.01 * jax.random.normal(rngs.params(), shape)
        if config.prompt_vectors:
            shape = (config.prompt_vectors, config.d_model)
            params[PROMPT] = 0.02 * jax.random.normal(rngs.params(), shape)
    elif section == "head":
        params = _draw_norms(config, ("norm",), rngs)
        if not config.tied_embeddings:
            params["output"] = 0.02 * jax.random.normal(rngs.params(), shape)
        if config.output_bias:
            params["output_bias"] = jnp.zeros(config.vocab_size)
    else:
        params = _draw_block(config, rngs)
        if config.left_out:
            params[left_out.LEFT_OUT] = left_out.draw(config, key)
    if config.side_shapes(section):
        # With a key of its own, the other numbers are those of a model without.
        params[SIDE] = _side().draw(config, section, jax.random.fold_in(key, 1))
    return params


def _draw_block(config, rngs):
    """Draws the parameters of a block, whose order is that of the random numbers."""
    params = _draw_norms(config, ("norm1",), rngs)
    attention = (name for name in config.projections if name not in MLP)
    params |= draw_projections(config, attention, rngs)
    params |= _draw_norms(config, ("norm2",), rngs)
    if config.experts:
        from sparse_dataflow.core.model.experts import draw_experts

        params["experts"] = draw_experts(config, rngs)
    else:
        params |= draw_mlp(config, rngs)
    return params | _draw_norms(config, (*config.qk_norms, "norm1_out", "norm2_out"), rngs)


def embed(
    config: ModelConfig,
    params: dict,
    tokens_BxT: jax.Array,
    batch: Batch = NO_BATCH,
    shard: Shard = UNSHARDED,
) -> jax.Array:
    """First section: int32 [B, T] -> [B, T, D] in the compute dtype; T / devices under a shard.

    Args:
      params: of the section "embed".
      tokens_BxT: token ids.
      batch: positions of the tokens.
      shard: shard of the parameters.

    Raises:
      UserError: T exceeds the positions that the model has.
    """
    # The rows of these tokens alone are decoded; they are the table then, in order.
    if isinstance(table := params["tokens"], Weight):  # In a form for decoding.
        rows_NxD = table.columns(_real_tokens(config, tokens_BxT).reshape(-1))
        rows_NxD = _with_vectors(config, params, tokens_BxT.reshape(-1), rows_NxD)
        config = dataclasses.replace(config, prompt_vectors=0)
        params = {**params, "tokens": rows_NxD}
        tokens_BxT = jnp.arange(tokens_BxT.size).reshape(tokens_BxT.shape)
    return embed_and_table(config, params, tokens_BxT, batch, shard)[0]


def embed_and_table(
    config: ModelConfig,
    params: dict,
    tokens_BxT: jax.Array,
    batch: Batch = NO_BATCH,
    shard: Shard = UNSHARDED,
) -> tuple[jax.Array, jax.Array]:
    """Returns `embed`, and the token embedding for a tied output layer in the same program: the
    gradient of the lookup is added to that of the output layer."""
    config.check_context(tokens_BxT.shape[1])
    dtype, table_VxD = jnp.dtype(config.compute_dtype), params["tokens"]
    if axes := shard.vocabulary_axes:
        # Each token has its row on one device, and zeros on the others; the sum is the embedding.
        partial = cross_entropy.lookup(table_VxD.astype(dtype), tokens_BxT, axes)
        partial = _with_vectors(config, params, tokens_BxT, partial, axes)
        x_BxTxD = shard.reduce_features(shard.reduce(partial), shard.residual_run)
    else:
        local = shard.slice(tokens_BxT, axis=1)
        x_BxTxD, table_VxD = lookup_and_table(table_VxD.astype(dtype), _real_tokens(config, local))
        x_BxTxD = _with_vectors(config, params, local, x_BxTxD)
        x_BxTxD = shard.slice_features(x_BxTxD, shard.residual_run)
    if (scale := scales.embedding_scale(config)) != 1:
        x_BxTxD *= jnp.asarray(scale, dtype)
    if config.positions == "learned":
        table_LxD = params["positions"].astype(dtype)
        if batch.positions is None:
            positions = table_LxD[: tokens_BxT.shape[1]]
        else:
            positions = lookup(table_LxD, batch.positions)
        # [T, D] or [B, T, D]: the tokens and the features of this device.
        positions = shard.slice_features(shard.slice(positions, axis=-2), shard.residual_run)
        x_BxTxD += broadcast_like(positions, x_BxTxD)
    return _side().with_state(config, x_BxTxD) if config.side_width else x_BxTxD, table_VxD


def _real_tokens(config, tokens):
    """Returns the tokens, with another one in place of each trained vector."""
    return jnp.minimum(tokens, config.vocab_size - 1) if config.prompt_vectors else tokens


def _with_vectors(config, params, tokens, x, axes=()):
    """Returns the embeddings of tokens with the trained vectors, whose ids follow the vocabulary.

    Of `axes`, over which the embeddings are a sum, the first device adds the vectors.
    """
    if not config.prompt_vectors:
        return x
    numbers = tokens - config.vocab_size
    vectors = lookup(params[PROMPT].astype(x.dtype), jnp.maximum(numbers, 0))
    if axes:
        vectors = jnp.where(lax.axis_index(axes) == 0, vectors, 0)
    return jnp.where((numbers >= 0)[..., None], vectors, x)


def block(
    config: ModelConfig,
    weights: dict,
    x_BxTxD: jax.Array,
    batch: Batch = NO_BATCH,
    shard: Shard = UNSHARDED,
    attend: Callable = self_attention,
) -> tuple[jax.Array, Metrics]:
    """Middle section: [B, T, D] -> ([B, T, D], metrics), with the `layer_weights` of one layer.

    Under a shard, x has T / devices tokens, and the weights are sharded.  See `Block` for `attend`.
    The gradient of a single block needs `with_auxiliary_losses`.
    """
    module = bind_block(config, shard.local(config, weights))
    if not config.side_width:
        return module.residuals(x_BxTxD, batch, shard, attend)[1:]
    side = _side()
    x_BxTxD, state_BxTxS = side.split(config, x_BxTxD)
    _, y_BxTxD, metrics = module.residuals(x_BxTxD, batch, shard, attend)
    state_BxTxS = side.state_after(weights[SIDE], x_BxTxD, state_BxTxS, shard)
    return jnp.concatenate([y_BxTxD, state_BxTxS], axis=-1), metrics


def with_auxiliary_losses(
    config: ModelConfig, x: jax.Array, metrics: Metrics, batch: Batch, shard: Shard
) -> jax.Array:
    """Returns the output of a block, whose gradient has the auxiliary losses of its experts too."""
    if not config.experts:
        return x
    from sparse_dataflow.core.model.experts import auxiliary_loss, with_loss

    return with_loss(x, auxiliary_loss(config, metrics) / (batch.routed * shard.devices))


def bind_block(config: ModelConfig, weights: dict) -> Block:
    """Returns the block with the `layer_weights` of one layer."""
    return Block(config, weights)


def head(
    config: ModelConfig, params: dict, x_BxTxD: jax.Array, shard: Shard = UNSHARDED
) -> jax.Array:
    """Last section without the output layer: the final norm, [B, T, D] -> [B, T, D].

    The result has the features of all devices of the shard.
    """
    if config.side_width:
        x_BxTxD = _side().head_input(config, params[SIDE], x_BxTxD, shard)
    normed = shard.normalise(_bind_norm(config, "norm", params["norm"]), x_BxTxD)
    x_BxTxD = shard.gather_features(normed, shard.residual_run)
    scale = scales.logit_scale(config)
    return x_BxTxD if scale == 1 else x_BxTxD * scale


def output_layer(
    params: dict, embedding_VxD: jax.Array, x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the inputs of the output layer and its weights, whose product are the logits.

    A bias is the weight of one more input, which is 1.

    Args:
      params: of the section "head".
      embedding_VxD: token embedding, the output layer if it is tied.
      x: result of `head`.
    """
    weights = params.get("output", embedding_VxD).astype(x.dtype)
    if "output_bias" not in params:
        return x, weights
    bias = params["output_bias"].astype(x.dtype)
    x = jnp.concatenate([x, jnp.ones_like(x[..., :1])], axis=-1)
    return x, jnp.concatenate([weights, bias[:, None]], axis=1)


def head_loss(
    config: ModelConfig,
    params: dict,
    embedding_VxD: jax.Array,
    x_BxTxD: jax.Array,
    batch: Batch,
    shard: Shard = UNSHARDED,
    scored: bool = False,
) -> tuple[jax.Array, Metrics]:
    """Last section: float32 sum of weights * negative log-likelihood, in nats; and its metrics.

    The batch has the targets and their weights.  If it has a teacher, the result is
    `distillation_loss`.

    The output layer is "output" of the params, else the token embedding.

    Under a shard, x has T / devices tokens, targets and weights have T, and the result is this
    device's share of the sum.

    An evaluation of a bidirectional model is `scored`: "correct" is the sum of the weights of the
    targets that are a likeliest token.
    """
    x = head(config, params, x_BxTxD, shard)
    targets_BxT, weights_BxT = batch.targets, batch.token_weights
    teacher_hidden = batch.teacher_hidden
    # A device has either its part of the vocabulary for all tokens, or all of it for its tokens.
    if shard.vocabulary:
        x = shard.gather(x)
    else:
        targets_BxT, weights_BxT = (shard.slice(a, axis=1) for a in (targets_BxT, weights_BxT))
        # Several devices have the same rows, and the sum over devices counts each of them.
        weights_BxT = weights_BxT / shard.equal_rows
        teacher_hidden = None if teacher_hidden is None else shard.slice(teacher_hidden, axis=1)
    x_NxD, targets, weights = _rows(x), targets_BxT.reshape(-1), weights_BxT.reshape(-1)
    x_NxD, output = output_layer(params, embedding_VxD, x_NxD)
    axes, size, cap = shard.vocabulary_axes, config.vocab_size, config.logit_cap
    if batch.teacher is not None:
        # A cap of logits is refused with a teacher: the divergence compares plain ones.
        teacher = TeacherOutput(_rows(teacher_hidden), *batch.teacher)
        loss = distillation_loss(x_NxD, output, targets, weights, teacher, axes, size)
    elif scored and config.bidirectional:
        losses, is_largest = cross_entropy.token_scores(x_NxD, output, targets, axes, size, cap)
        # Every device of the axes has the same scores.
        weights = weights / (lax.axis_size(axes) if axes else 1)
        loss, correct = jnp.sum(losses * weights), jnp.sum(is_largest * weights)
        return loss, {"loss": Sum(loss), "correct": Sum(correct)}
    else:
        loss = cross_entropy.weighted_loss(x_NxD, output, targets, weights, axes, size, cap)
    return loss, {"loss": Sum(loss)}


def head_scores(
    config: ModelConfig,
    params: dict,
    embedding_VxD: jax.Array,
    x_BxTxD: jax.Array,
    places_S: jax.Array,
    targets_S: jax.Array,
    shard: Shard = UNSHARDED,
) -> tuple[jax.Array, jax.Array]:
    """Last section at some places.

    Under a shard, x has T / devices tokens, and the results are replicated.

    Args:
      params: of the section "head".
      embedding_VxD: token embedding, the output layer if it is tied; like "output" of the params,
        sharded over V if `shard.vocabulary`.
      x_BxTxD: output of the last block.
      places_S: int32 indices into the B * T tokens.  Their number must be divisible by the devices
        of the shard unless `shard.vocabulary`.
      targets_S: int32 ids of next tokens.
      shard: shard of the parameters.

    Returns:
      (float32 [S] negative log-likelihoods in nats, bool [S] whether each target is the likeliest
      token).
    """
    # Places count over all tokens, of which a device has a part.
    x = shard.gather(x_BxTxD)
    # Devices share either the vocabulary, and each scores all places, or the places.
    if not shard.vocabulary:
        places_S, targets_S = (shard.slice(a, axis=0) for a in (places_S, targets_S))
    x_SxD = head(config, params, _rows(x)[places_S], shard)
    losses, largest = cross_entropy.token_scores(
        *output_layer(params, embedding_VxD, x_SxD),
        targets_S,
        shard.vocabulary_axes,
        config.vocab_size,
        config.logit_cap,
    )
    if shard.vocabulary:
        return losses, largest
    return shard.gather(losses[None])[0], shard.gather(largest[None])[0]


def logits(config: ModelConfig, params: dict, x_BxTxD: jax.Array) -> jax.Array:
    """Returns float32 [B, T, vocab_size] logits from the output of the last block."""
    x = head(config, params["head"], x_BxTxD)
    table = params["head"].get("output", params["embed"]["tokens"])
    if isinstance(table, Weight):  # In a form for decoding.
        # A product has the dtype of x, and logits are float32.
        logits = x.astype(jnp.float32) @ table + params["head"].get("output_bias", 0)
    else:
        x, output = output_layer(params["head"], table, x)
        logits = jnp.einsum("btd,vd->btv", x, output, preferred_element_type=jnp.float32)
    return cross_entropy.capped(logits, config.logit_cap)


def _side():
    """Returns the module of side networks, which other models do not load."""
    from sparse_dataflow.core.model import side

    return side


def _rows(x_BxTxD):
    return x_BxTxD.reshape(-1, x_BxTxD.shape[-1])


def _bind_norm(config, name, params):
    """Returns a norm of a block, or the last one, with its parameters."""
    return nnx.merge(_norm_graph(config, name), params)


@functools.cache
def _norm_graph(config, name):
    """Returns the graph definition of a norm, without arrays."""
    return nnx.split(nnx.eval_shape(lambda: _named_norm(config, name, nnx.Rngs(0))), nnx.Param)[0]


def _draw_norms(config, names, rngs):
    """Returns the parameters of those of these norms that a model has."""
    norms = {n: _named_norm(config, n, rngs) for n in names if n in ("norm", *_block_norms(config))}
    return {name: nnx.to_pure_dict(nnx.state(norm, nnx.Param)) for name, norm in norms.items()}


def _block_norms(config):
    return *config.norms, *(config.qk_norms if config.qk_norm else ())


def _named_norm(config, name, rngs):
    if name not in config.qk_norms:
        return _norm(config, rngs)
    heads = config.num_heads if name == config.qk_norms[0] else config.kv_heads
    if config.qk_norm_scope == EACH_HEAD:
        return HeadNorm(config, heads, rngs)
    return _norm(config, rngs, *config.qk_norm_shape(heads))


def _norm(config, rngs, width=None, scaled=True):
    kind = {"layernorm": nnx.LayerNorm, "rmsnorm": nnx.RMSNorm}[config.norm]
    options = {"epsilon": config.norm_epsilon, "dtype": jnp.dtype(config.compute_dtype)}
    if not scaled:
        options |= {"use_scale": False} | ({"use_bias": False} if kind is nnx.LayerNorm else {})
    return kind(width or config.d_model, rngs=rngs, **options)
