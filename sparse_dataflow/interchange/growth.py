"""Larger models that begin with the function of given weights.

- Depth: a new block is a copy of the block before it whose output projections are zero, so it adds
  nothing to the residual stream (LLaMA Pro, arXiv 2401.02415).  They have gradients at once, the
  projections before them after the first step.
- Width: see `width`.
- Experts: every expert begins as the MLP of a model without experts (sparse upcycling, arXiv
  2212.05055), and its router is drawn.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.config.attention_settings import ALL_HEADS, MIXTURE
from sparse_dataflow.core.config.layer_groups import split_groups
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import MLP, PROJECTIONS, ROW_PARALLEL
from sparse_dataflow.core.layouts.model_layouts import expert_layout
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.identity import as_identity
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.core.weights.kind import ROUTER, TABLE
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange.equivalent_forms import dense_module
from sparse_dataflow.interchange.width import SPREAD, WIDTHS, head_sources, wider, wider_config


def grown(
    old: ModelConfig, params: dict, new: ModelConfig, key: jax.Array
) -> tuple[ModelConfig, dict]:
    """Returns (config, params) of the shape of `new` and the function of `old`.

    Storage is that of the old model, except that stored blocks become dense where experts are, or
    where the wider model cannot repeat them.

    Args:
      params: with concrete layouts.
      new: config of the larger model.
      key: draws new parameters.

    Raises:
      UserError: the new model cannot begin with this function; names legal values.
    """
    _ = grown_config(old, new)
    # Seeded by the key alone, so that every process grows the same model.
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel().tolist())
    spread = 0.0
    if _widens(old, new):
        old, params = wider(old, params, new, rng)
        spread = SPREAD
    if new.num_layers > old.num_layers:
        old, params = _deeper(old, params, new.num_layers, spread, rng)
    if new.experts and not old.experts:
        old, params = _with_experts(old, params, new, key)
    return old, params


def grown_config(old: ModelConfig, new: ModelConfig) -> ModelConfig:
    """Returns the config that `grown` returns, without the weights.

    Raises:
      UserError: as `grown`, but for layouts of the same density that experts would not have.
    """
    refuse_other_shapes(old, new)
    if _widens(old, new):
        old = wider_config(old, new)
    if new.num_layers > old.num_layers:
        old = _deeper_config(old, new.num_layers)
    return _experts_config(old, new) if new.experts and not old.experts else old


def _widens(old, new):
    return any(getattr(old, name) != getattr(new, name) for name in WIDTHS)


def refuse_other_shapes(old: ModelConfig, new: ModelConfig) -> None:
    """Raises UserError unless each width and the depth of `new` can hold those of `old`."""
    grouped = any(model.kv_heads != model.num_heads for model in (old, new))
    names = ("num_layers", "d_model", "d_ff", "num_heads", *(("kv_heads",) if grouped else ()))
    problems = []
    for name in names:
        before, after = getattr(old, name), getattr(new, name)
        setting = "model.num_kv_heads" if name == "kv_heads" else f"model.{name}"
        words = f"{setting} is {before} in the initial weights and {after} in this run"
        # Norms read the mean and variance over the width.  They stay only if all features are
        # repeated equally often.
        if name == "d_model" and after % before:
            legal = f"multiples of {before}, which keep the mean and variance that norms see"
            problems.append(f"{words} (legal: {legal})")
        elif after < before:
            problems.append(f"{words} (legal: {before} or more)")
    width = old.head_width
    if new.head_width != width:
        heads = f", or model.num_heads={new.d_model // width}" if not new.d_model % width else ""
        problems.append(
            f"the width of a head is {width} in the initial weights and {new.head_width} in this "
            f"run (legal: model.head_dim={width}{heads})"
        )
    # Heads are repeated within their group of key/value heads, so a wider model may lack some
    # although it has more of them.
    if not problems and len(np.unique(head_sources(old, new)[0])) < old.num_heads:
        problems.append(
            f"model.num_heads={new.num_heads} with model.num_kv_heads={new.kv_heads} has no copy "
            f"of some heads of the initial weights, {old.num_heads} with {old.kv_heads} (legal: "
            "more query heads for each key/value head)"
        )
    if not problems and old.qk_norm_scope == ALL_HEADS:
        counts = [np.bincount(heads.ravel()) for heads in head_sources(old, new)]
        if any(len(set(count)) > 1 for count in counts):
            problems.append(
                f"model.qk_norm_scope={ALL_HEADS} averages over the heads (legal: model.num_heads "
                "and model.num_kv_heads times one whole number)"
            )
    if old.num_layers != new.num_layers:
        problems += [
            f"new layers would move model.{name}={value[:60]} (legal: "
            f"model.num_layers={old.num_layers})"
            for name, value in old.mixed_layers.items()
        ]
    if old.scaled_embeddings and old.d_model != new.d_model:
        problems.append(
            f"model.scaled_embeddings scales by the width (legal: model.d_model={old.d_model})"
        )
    if problems:
        raise UserError(f"The initial weights cannot grow into this run: {'; '.join(problems)}.")


def layer_sources(before: int, after: int) -> np.ndarray:
    """Returns the old layer of each new one, int [after]; copies follow their source evenly."""
    # Old layer i begins at i * after // before; a new layer has the last one that began.
    return np.searchsorted(np.arange(before) * after // before, np.arange(after), "right") - 1


def by_layer(multipliers: Sequence[float], num_layers: int) -> tuple[float, ...]:
    """Returns `ModelConfig.density_by_depth` of a model grown to so many layers."""
    if not multipliers:
        return ()
    return tuple(multipliers[i] for i in layer_sources(len(multipliers), num_layers))


def _deeper_config(old, num_layers):
    by_depth = by_layer(old.density_by_depth, num_layers)
    return dataclasses.replace(old, num_layers=num_layers, density_by_depth=by_depth)


def _deeper(old, params, num_layers, spread, rng):
    """Inserts blocks that add nothing to the residual stream."""
    config = _deeper_config(old, num_layers)
    trees = list(stacks.layers(params["blocks"]))
    sources = layer_sources(old.num_layers, num_layers)
    is_new = np.diff(sources, prepend=-1) == 0
    layers = [
        as_identity(config, _varied(config, trees[i], spread, rng)) if new else trees[i]
        for i, new in zip(sources, is_new)
    ]
    blocks = stacks.stacked_layers(config, layers)
    return config, {**params, "blocks": blocks}


def _varied(model, tree, spread, rng):
    """Returns the parameters of a block, or of experts, with varied projections.

    Each weight of a projection is multiplied by a number drawn from 1 - spread to 1 + spread.
    Without this the copies of a feature in a wider model would have equal gradients.
    """
    result = dict(tree)
    for name, module in tree.items():
        if name in PROJECTIONS and name not in ROW_PARALLEL and spread:
            leaves = model.linear(name).weight.leaves()
            result[name] = {
                n: a * rng.uniform(1 - spread, 1 + spread, a.shape).astype(np.float32)
                if n in leaves and leaves[n].role != TABLE
                else a
                for n, a in module.items()
            }
        elif name in ("experts", "shared"):
            result[name] = _varied(model, module, spread, rng)
    return result


def _experts_config(old, new):
    if new.top_k == 1:
        raise UserError(
            "model.top_k=1 multiplies the output of an expert by its router probability, so "
            "experts that begin as the MLP of the initial weights have another function; legal: "
            "model.top_k of 2 or more."
        )
    if new.raw_gates or new.shared_gate or new.shared_expert > 1:
        raise UserError(
            "Experts that begin as the MLP of the initial weights would have another function; "
            "legal: model.raw_gates=no, model.shared_gate=no and model.shared_expert of 0 or 1."
        )
    for name in _stored_in_experts(old, new):
        before, after = old.linear(name), new.linear(name)
        same = (before.block, before.hadamard, before.rank) == (after.block, after.hadamard, 0)
        if not before.weight.stores_blocks or not same or before.density != after.density:
            _refuse_other_layouts(new, name)
    linears = {
        name: spec
        for name, spec in old.linears
        if name not in MLP or name in _stored_in_experts(old, new)
    }
    fields = {name: getattr(new, name) for name in MIXTURE}
    return dataclasses.replace(old, **fields, linears=linears)


def _stored_in_experts(old, new):
    names = (name for name in old.projections if name in MLP)
    return [name for name in names if new.linear(name).weight.stores_blocks]


def _with_experts(old, params, new, key):
    """Puts the MLP in every expert, over the number of experts whose outputs are summed."""
    config, layouts = _experts_config(old, new), stacks.layouts_of(old, params)
    names = [name for name in old.projections if name in MLP]
    stored = _stored_in_experts(old, new)
    for name in stored:
        mask = expert_layout(new, name).mask
        if any(not np.array_equal(layout.mask, mask) for layout in layouts[name]):
            _refuse_other_layouts(new, name)
    share = np.float32(1 / (new.prototypes + new.shared_expert))
    routers = _drawn_routers(config, key)
    layers = []
    for i, tree in enumerate(stacks.layers(params["blocks"])):
        layer, mlp = dict(tree), {}
        for name in names:
            wide = lambda leaf: np.asarray(leaf, np.float32)  # noqa: E731
            module = stacks.map_arrays(wide, layer.pop(name))
            mlp[name] = module if name in stored else dense_module(old, name, module)
        mlp, expert_layouts = stacks.split_layouts(mlp)
        mlp["mlp_out"] = {name: share * leaf for name, leaf in mlp["mlp_out"].items()}
        # Equal experts keep the model's function; their drawn routers make them differ in training.
        copies = lambda leaf: np.broadcast_to(leaf, (new.experts, *leaf.shape))  # noqa: E731
        experts = {ROUTER: routers[i], **merged(jax.tree.map(copies, mlp), expert_layouts)}
        experts |= {"shared": mlp} if new.shared_expert else {}
        layers.append({**layer, "experts": experts})
    blocks = stacks.stacked_layers(config, layers)
    return config, {**params, "blocks": blocks}


def _refuse_other_layouts(new, name):
    raise UserError(
        f"{name} of the experts is block-sparse at density {new.linear(name).density:g} in this "
        "run, and the MLP of the initial weights does not have these blocks; legal: dense experts, "
        "by sparsity.projections of attention alone or sparse-dataflow gpt13b_dense, or initial "
        "weights with the layouts of this run."
    )


def _drawn_routers(config, key):
    """Returns the routers of all layers as `gpt.init` draws them, [layers, d_model, experts]."""

    @jax.jit
    def draw(key):
        groups = split_groups(gpt.init(config, key)["blocks"])
        return jnp.concatenate([group["experts"][ROUTER] for group in groups])

    return np.asarray(draw(key))
