"""A training state in host memory, and views of its sections.

The state has the structure of every executor, with numpy arrays as leaves. Blocks are stacked by
layer group (see `config.layer_groups`); the view of a block is its slice of each stack.
"""

import functools

import jax
import numpy as np

from sparse_dataflow.core.config.layer_groups import group_index, layer_groups, split_groups
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.identity import as_identity
from sparse_dataflow.core.model.partition import ArrayTree, merged, trained_and_rest
from sparse_dataflow.core.optim import by_weight
from sparse_dataflow.core.optim.optimizers import TrainState, with_steps_left
from sparse_dataflow.core.training import step

EMBED, HEAD = "embed", "head"
Section = str | int
"""EMBED, HEAD, or the number of a block."""


def section_name(section: Section) -> str:
    """Returns the name of a section for messages."""
    return f"block {section}" if isinstance(section, int) else section


def all_sections(blocks: int) -> list[Section]:
    """Returns all sections in the order of execution."""
    return [EMBED, *range(blocks), HEAD]


def view(tree: dict, section: Section) -> ArrayTree:
    """Returns views of one section of a tree like the params; writes go to the tree."""
    if isinstance(section, int):
        return layer_view(tree.get("blocks", {}), section)
    return tree.get(section, {})  # Sections may have no parameter to train.


def layer_view(stacked: object, layer: int) -> ArrayTree:
    """Returns views of one layer of blocks that are stacked by layer group."""
    for group in split_groups(stacked):
        leaves = jax.tree.leaves(group)
        if not leaves or layer < len(leaves[0]):
            # With `...`, a stack of numbers gives a view as well, and no copy.
            return jax.tree.map(lambda stack, i=layer: stack[i, ...], group)
        layer -= len(leaves[0])
    raise IndexError("no such layer")


def depth_of(params: dict) -> int:
    """Returns the number of blocks with parameters."""
    groups = split_groups(params.get("blocks", ()))
    return sum(len(jax.tree.leaves(group)[0]) for group in groups)


_NO_MOMENTS: dict[str, dict] = {EMBED: {}, "blocks": {}, HEAD: {}}


def count_of(moments: tuple) -> int:
    """Returns the number of updates of a state of AdamW or Muon; 0 where weights count theirs."""
    # All entries with moments were updated together; so the first one's count is that of all.
    return next((int(entry.count) for entry in moments if hasattr(entry, "mu")), 0)


def moment_trees(moments: tuple) -> tuple[dict, dict]:
    """Returns the first and second moments; or the states of each weight, and an empty tree."""
    for entry in moments:
        if hasattr(entry, "mu"):
            return entry.mu, entry.nu
        if isinstance(entry, by_weight.WeightStates):
            return entry.states, _NO_MOMENTS
    raise ValueError("an optimizer state without moments")


def with_moments(moments: tuple, count: int, mu: dict, nu: dict) -> tuple:
    """Returns the optimizer state with another count and other trees of `moment_trees`."""

    # By what an entry has, not by its place: clipping, schedules and masks add entries around the
    # moments.
    def replaced(entry):
        if isinstance(entry, by_weight.WeightStates):
            return by_weight.WeightStates(mu)
        if hasattr(entry, "mu"):
            return entry._replace(count=np.asarray(count, np.int32), mu=mu, nu=nu)
        return entry

    return tuple(map(replaced, moments))


def abstract_state(model: ModelConfig, training: TrainingConfig) -> TrainState:
    """Returns the shapes and dtypes of the state; its layouts are the model's, in numpy."""
    # Only shapes: a draw would allocate the whole model on the device, which the relay exists to
    # avoid.
    return step.abstract_state(model, training).with_layouts(model)


def zeros(model: ModelConfig, training: TrainingConfig) -> tuple[dict, dict, dict]:
    """Returns zeroed (params, mu, nu); the system allocates their pages at the first write."""
    shapes = abstract_state(model, training)
    trees = shapes.params, *moment_trees(shapes.moments)
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), trees)


def fresh_state(
    model: ModelConfig,
    training: TrainingConfig,
    trees: tuple[dict, dict, dict] | None = None,
    starting_blocks: int | None = None,
) -> TrainState:
    """Initializes the state of `training.step.initial_state` section by section in host memory.

    Args:
      training: gives the seed.
      trees: zeroed (params, mu, nu) to fill; `zeros` if None.
      starting_blocks: blocks from this index on start as the identity (see `model.identity`), so
        that they join a growing network without changing its function.
    """
    params, mu, nu = trees or zeros(model, training)
    shapes = abstract_state(model, training)
    others, layouts = stacks.split_layouts(shapes.rest)
    rest = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), others)
    init_key, key = jax.random.split(jax.random.key(training.seed))
    keys = gpt.init_keys(model, init_key)

    def fill(section, section_tree):
        """Writes one section of the parameters, a tree of the model with it alone."""
        drawn_trees = trained_and_rest(model, section_tree, training.frozen_scale)
        for tree, drawn in zip((params, rest), drawn_trees, strict=True):
            if tree and drawn:
                _fill(view(tree, section), view(drawn, 0 if isinstance(section, int) else section))

    # A section at a time on the device, with the keys of `gpt.init`, so that the state has the bits
    # of one that was drawn whole.
    for section in (EMBED, HEAD):
        fill(section, {"blocks": {}, section: _initializer(model, section)(keys[section])})
    for number in range(model.stored_layers):
        # Groups may differ in shapes (densities, attention), so a block is drawn with its group's
        # model.
        group_model = layer_groups(model)[group_index(model, number)].model
        block = _initializer(group_model, "block")(keys["blocks"][number])
        # Layers that join later add nothing at first; see `DepthSchedule`.
        if starting_blocks is not None and number >= starting_blocks:
            block = as_identity(model, block)
        fill(number, {"blocks": jax.tree.map(lambda leaf: leaf[None], block)})
    # Moments that start as zeros are zeros already. Other optimizers may start elsewhere, such as
    # at a copy of the parameters.
    if not training.is_built_in:
        for each in all_sections(model.stored_layers):
            tree = view(params, each)
            if isinstance(each, int):
                stacked = {"blocks": jax.tree.map(lambda leaf: leaf[None], tree)}
                states = view(by_weight.init(model, training, stacked, each), 0)
            else:
                states = by_weight.init(model, training, {each: tree})[each]
            _fill(view(mu, each), states)
    moments = with_steps_left(training, with_moments(shapes.moments, 0, mu, nu))
    rest = merged(rest, layouts)
    return TrainState(np.zeros((), np.int32), params, moments, key, rest)


def copied_state(state: TrainState, trees: tuple[dict, dict, dict]) -> TrainState:
    """Copies params and moments of a state into the trees (params, mu, nu); returns that state."""
    given = state.params, *moment_trees(state.moments)
    jax.tree.map(lambda to, leaf: np.copyto(to, leaf), trees, given)
    params, mu, nu = trees
    after = with_moments(state.moments, count_of(state.moments), mu, nu)
    return state._replace(params=params, moments=after)


def training_key(training: TrainingConfig) -> jax.Array:
    """Returns the PRNG key of every state of a training."""
    # The second half of the split of `fresh_state`: keys are not stored in the files.
    return jax.random.split(jax.random.key(training.seed))[1]


@functools.cache
def _initializer(model, section):
    return jax.jit(lambda key: gpt.init_section(model, section, key))


def _fill(views, values):
    jax.tree.map(lambda to, leaf: np.copyto(to, np.asarray(leaf)), views, jax.device_get(values))
