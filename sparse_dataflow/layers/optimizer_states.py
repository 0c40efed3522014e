"""Optimizer states at new layouts: what belongs to a stored block follows it."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.tree_util import tree_leaves_with_path, tree_map_with_path

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.layers.axis_names import placed
from sparse_dataflow.layers.block_arrays import moved
from sparse_dataflow.layers.layout_state import MARK, contradicts, is_mark, table_mark
from sparse_dataflow.layers.paths import keys_of, names_of

_LEGAL = (
    "an nnx.Optimizer, the optax state of nnx.state(model, nnx.Param), a list or dict of these, or "
    "None"
)


class CarriedState:
    """The state of one or several optimizers at new layouts, before it takes effect.

    Args:
      model: the model, at its old layouts.
      optimizer: nnx.Optimizers and optax states, in any containers.
      changes: {path of a layer: its change}.
      keys: {path of a layer: (old key, new key)} of entries that name a static layout.

    Raises:
      UserError: an array belongs to a layer and its axis of stored blocks is not known, or nothing
        of the state belongs to the layers.
    """

    def __init__(self, model: nnx.Module, optimizer: object, changes: dict, keys: dict):
        self._matched = False
        self._changes = {tuple(map(str, path)): change for path, change in changes.items()}
        self._keys = {tuple(map(str, path)): pair for path, pair in keys.items()}
        self._optimizers: list[tuple[nnx.Optimizer, object, list]] = []
        is_node = lambda node: isinstance(node, nnx.Pytree)  # noqa: E731
        nodes = [leaf for leaf in jax.tree.leaves(optimizer, is_leaf=is_node) if is_node(leaf)]
        for node in nodes:
            if not isinstance(node, nnx.Optimizer):
                raise UserError(f"A {type(node).__name__} is no optimizer; legal: {_LEGAL}.")
            arrays: list[tuple[nnx.Variable, object]] = []
            state = self._carried(node.opt_state, _Probe(model, node), arrays)
            self._optimizers.append((node, state, arrays))
        self._whole = optimizer
        if not nodes:
            self._whole = self._carried(optimizer, None)
        elif len(nodes) < len(jax.tree.leaves(optimizer, is_leaf=is_node)):
            states = jax.tree.map(lambda n: None if is_node(n) else n, optimizer, is_leaf=is_node)
            states = self._carried(states, None)
            self._whole = jax.tree.map(
                lambda old, new: old if is_node(old) else new, optimizer, states, is_leaf=is_node
            )
        carried = [self._whole if not nodes else [], [state for _, state, _ in self._optimizers]]
        if not self._matched and any(np.size(leaf) > 1 for leaf in jax.tree.leaves(carried)):
            names = ", ".join(".".join((*path, "values")) for path in self._changes)
            raise UserError(
                f"The optimizer's state has arrays and none of them is of {names}; legal: {_LEGAL}."
            )

    def apply(self) -> object:
        """Changes the nnx.Optimizers in place, and returns what was passed, at the new layouts.

        Variables of an nnx.Optimizer stay the same objects, so handles that share them see it.
        """
        for optimizer, state, arrays in self._optimizers:
            for variable, array in arrays:
                variable.set_value(array)
            if self._keys:
                optimizer.opt_state = nnx.data(state)
        return self._whole

    def _carried(self, state, probe, arrays=None):
        """Returns a state at the new layouts.

        If `arrays` is a list, the result has the variables of `state`, and the list gets each of
        them that changes, with its new array.
        """

        def carry(path, leaf):
            if not isinstance(leaf, nnx.Variable):
                return carry_array(path, leaf)
            value = leaf.get_value()  # An array, or for `optax.sm3` a list of them.
            new = tree_map_with_path(lambda keys, array: carry_array((*path, *keys), array), value)
            if arrays is None:
                return leaf.copy(new)
            if any(a is not b for a, b in zip(jax.tree.leaves(value), jax.tree.leaves(new))):
                arrays.append((leaf, new))
            return leaf

        def carry_array(path, leaf):
            match = self._layer_of(path)
            if match is None or np.size(leaf) <= 1:  # A count, or a place holder.
                return leaf
            self._matched = True
            change, kind, rest = match
            if kind == MARK:
                return _new_mark(leaf, change)
            axis = _block_axis(path, rest, leaf, change, probe)
            return leaf if axis is None else moved(leaf, change.sources, axis)

        is_variable = lambda node: isinstance(node, nnx.Variable)  # noqa: E731
        return self._renamed(tree_map_with_path(carry, state, is_leaf=is_variable))

    def _layer_of(self, path):
        """Returns (change, "values" or the mark, keys inside of its entry) of a leaf, or None."""
        names = names_of(path)
        best = None
        for layer, change in self._changes.items():
            for kind in ("values", MARK):
                suffix = (*layer, kind)
                # From the end: an optimizer's own keys stand in front of a path of parameters, and
                # behind it.
                for end in range(len(names), len(suffix) - 1, -1):
                    if names[end - len(suffix) : end] == suffix:
                        # The longest match: the path of one layer may end as that of another does.
                        if best is None or len(suffix) > best[0]:
                            best = len(suffix), change, kind, keys_of(path)[end:]
                        break
        return best and best[1:]

    def _renamed(self, tree, prefix=()):
        """Returns a tree with the keys of new static layouts, in states and dicts of parameters."""

        def new_key(path):
            for layer, (old, new) in self._keys.items():
                if tuple(map(str, path))[-len(layer) - 1 :] == (*layer, old):
                    return new
            return path[-1]

        def rename(path, node):
            start = (*prefix, *names_of(path))
            if isinstance(node, nnx.State):
                flat = []
                for inner, leaf in nnx.to_flat_state(node):
                    key = new_key((*start, *inner))
                    named = leaf if key == inner[-1] else _named(leaf, key)
                    flat.append(((*inner[:-1], key), named))
                return nnx.from_flat_state(flat)
            if type(node) is dict:
                return {
                    new_key((*start, key)): self._renamed(value, (*start, str(key)))
                    for key, value in node.items()
                }
            return node

        is_mapping = lambda node: isinstance(node, nnx.State) or type(node) is dict  # noqa: E731
        return tree_map_with_path(rename, tree, is_leaf=is_mapping)


class _Probe:
    """Shapes of an optimizer's state by the number of stored blocks of each layer."""

    def __init__(self, model, optimizer):
        self._params = nnx.state(model, optimizer.wrt)
        self._optimizer = optimizer

    def shapes(self, path: tuple, blocks: int) -> dict[tuple, tuple]:
        """Returns {names of a leaf: its shape} if the layer at `path` stored so many blocks."""

        def resize(key, leaf):
            shape = list(leaf.shape)
            if names_of(key) == (*path, "values"):
                shape[-3] = blocks
            return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

        params = tree_map_with_path(resize, self._params)
        state = jax.eval_shape(self._optimizer.tx.init, params)
        return {names_of(key): leaf.shape for key, leaf in tree_leaves_with_path(state)}


def _block_axis(path, rest, leaf, change, probe):
    """Returns the axis of stored blocks of an optimizer's array, or None if it has none.

    An array of the rank of `values` has its axes, or ones in their place.  In a list with an array
    for each axis, as of `optax.sm3`, the place says which.  Otherwise the optimizer's `init` says
    which axis follows the number of blocks.
    """
    stored, axis = change.layer.values.shape, change.layer.values.ndim - 3
    shape = np.shape(leaf)
    if len(shape) == len(stored) and not rest:
        if shape[: axis + 1] == stored[: axis + 1]:
            return axis
        if all(size in (1, full) for size, full in zip(shape, stored)):
            return None
    place = getattr(rest[0], "idx", getattr(rest[0], "key", None)) if len(rest) == 1 else None
    if isinstance(place, int) and place < len(stored) and shape == (stored[place],):
        return 0 if place == axis else None
    name, blocks = ".".join(names_of(path)), stored[axis]
    if probe is not None and len(shape) != len(stored):
        layer = tuple(map(str, change.path))
        candidates = set()
        # The state is made for layouts with one block less and one more: the axis whose size
        # follows is that of blocks, even where another axis has the same size.
        for other in {max(1, blocks - 1), blocks + 1} - {blocks}:
            new = probe.shapes(layer, other).get(names_of(path), ())
            differ = [a for a, (m, n) in enumerate(zip(shape, new)) if m != n]
            fits = len(new) == len(shape) and all(
                shape[a] == blocks and new[a] == other for a in differ
            )
            candidates.add((differ[0] if differ else None) if fits and len(differ) < 2 else "")
        if len(candidates) == 1 and "" not in candidates:
            return candidates.pop()
    raise UserError(
        f"The optimizer state {name} has shape {tuple(shape)} and the layer stores {blocks} blocks "
        f"of {stored[-1]}, so its axis of blocks is not known; legal: the state of this layout in "
        "an nnx.Optimizer, or a new optimizer after the change."
    )


def _new_mark(mark, change):
    """Returns an optimizer's copy of a mark for the new tables.

    An average of the parameters has a mark; moments have zeros, or what moved all parameters.
    """
    copy, layout = np.asarray(mark), change.layer.stored_layout
    old = np.asarray(table_mark(layout))
    if copy.shape != old.shape or not is_mark(copy).all() or contradicts(copy, layout):
        return mark
    marks = np.stack([table_mark(new) for new in change.layouts])
    new = np.broadcast_to(marks, (old.size // old.shape[-1], old.shape[-1])).reshape(old.shape)
    # What has scaled the optimizer's copy of the old mark scales the new one.
    scale = np.mean(copy, -1, keepdims=True) / np.mean(old, -1, keepdims=True)
    return placed(jnp.asarray(new * scale, copy.dtype), mark)


def _named(leaf, name):
    """Returns an optimizer's variable of a layout's name, under another name."""
    if not isinstance(leaf, nnx.Variable):
        return leaf
    return type(leaf)(leaf.get_raw_value(), **leaf.get_metadata() | {"layout": name})
