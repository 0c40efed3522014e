"""What a kind of weight says of itself, in one class: nobody else knows its arrays.

A kind is a class of weights: a value with arrays, whose class has the facts that everybody else
reads.  They need no array and load no jax, because the planner reads them too.  A kind registers
itself by its key, which is `LinearSpec.kind`.  To add one: write its class, import it in `kinds`,
and test it.

A weight has the sides (in, out).  Its projection is cut over devices by its outputs (columns) or by
its inputs (rows); see `config.projections.ROW_PARALLEL`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from sparse_dataflow.core.config.projections import (
    ADDED_TERMS,
    BLOCK_KINDS,
    KIND_NAMES,
    KINDS,
    PATTERN_NAMES,
    PROJECTIONS,
    LinearSpec,
)
from sparse_dataflow.files.errors import UserError

if TYPE_CHECKING:
    from sparse_dataflow.core.batch import Array
    from sparse_dataflow.core.config.model import ModelConfig

MATRIX, VECTOR, SCALE, NUMBER, TABLE = "matrix", "vector", "scale", "number", "table"
"""Roles of an array: matrices multiply activations, scales and tables are not trained."""

ROLE_AXES = {MATRIX: 2, VECTOR: 1, SCALE: 1, NUMBER: 0, TABLE: 2}
"""Role -> axes of one array, after those of a stack of layers, experts or blocks."""

ABILITIES = {
    "rank": "an added low-rank term",
    "hadamard": "a Hadamard transform",
    "turned_dense": "the rate of a weight that was block-sparse",
    "frozen_int8": "int8 weights under adapters",
    "experts": "experts",
    "quantised_products": "products of fp8 or int8 operands",
    "feature_axis": "the mesh axis feature",
    "tensor_axis": "the mesh axis tensor",
    "block_outputs": "blocks that are not square",
    "evolution": "methods that change which weights are stored",
    "budget": "densities by projection or layer",
    "given": "a given dense weight to begin with",
    "init_from": "weights that a run begins with",
    "sparse_form": "the sparse form of an export",
    "widths": "widths of equal cost",
}
"""What a kind may offer, with its words.  A feature asks for its own by `Weight.require`."""

Axes = tuple[str, ...]
"""Mesh axes that shard one dimension."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What an array of a weight is.

    Attributes:
      role: MATRIX, VECTOR, SCALE, NUMBER or TABLE.
      columns: mesh axes of each dimension of a layer's array, in projections cut by outputs.
      rows: the same in projections cut by inputs.
      input_dim: dimension of the input features; None for none.
      output_dim: dimension that output features order; None for none.
      has_muon: whether Muon updates it, as a matrix.
      is_blocks: whether its first dimension is matrices of their own: stored blocks in the order of
        a layout, or the blocks of a block-diagonal factor.
    """

    role: str
    columns: tuple[Axes, ...] = ()
    rows: tuple[Axes, ...] = ()
    input_dim: int | None = None
    output_dim: int | None = None
    has_muon: bool = False
    is_blocks: bool = False

    def cuts(self, by_rows: bool, has_expert_dim: bool = False) -> tuple[Axes, ...]:
        """Returns the mesh axes of each dimension.

        Args:
          by_rows: whether the projection is cut by inputs.
          has_expert_dim: whether the first dimension is experts, which "fsdp" shards.
        """
        cuts = self.rows if by_rows else self.columns
        if not has_expert_dim:
            return cuts
        # Experts have "fsdp", so "tensor" alone is left for their matrices.
        others = (tuple(axis for axis in axes if axis == "tensor") for axes in cuts)
        return ("fsdp",), *others


BIAS = Leaf(VECTOR, output_dim=0)
"""The bias of a projection, which is of no kind of weight."""

BIAS_NAME = "bias"

EMBEDDINGS = ("tokens", "output", "positions")
ROUTER = "router"
"""Matrices that are of no weight: tables with a row for each token or position, and what chooses
experts, in float32 whatever the compute dtype."""

SIDE = "side"
"""Part of a section whose matrices are those of a side network; see `model.side`."""

LAYOUT = "layout"
"""Which blocks a weight stores: an array of its tree, and a `BlockLayout` or its tables."""

THRESHOLD = "threshold"
"""Level of a `Thresholded` projection, among its arrays."""

LEAF = "leaf"
"""Key of a `Leaf` in the metadata of a dataclass field, which makes the field an array."""

METADATA = {"static": True}
"""Of a field that is part of the tree's structure."""


class Weight:
    """A matrix [in, out] in some stored form, and the facts of its kind.

    Attributes:
      kind: key of the kind; "" for a wrapper and for another stored form of a kind.
      words: plural for messages, such as "block-sparse weights".
      is_pattern: whether `sparsity.pattern` may name the kind, which then has no pattern of blocks.
      stores_blocks: whether it has a `BlockLayout` for each layer: `sparsity.kind` may name it.
      has_mask: whether it is a whole kernel under a mask; see `Masked`.
      is_partial: whether it is a part of a dense weight, from which and to which it can turn.
      offers: of ABILITIES.
    """

    kind: ClassVar[str] = ""
    words: ClassVar[str] = ""
    is_pattern: ClassVar[bool] = False
    stores_blocks: ClassVar[bool] = False
    has_mask: ClassVar[bool] = False
    is_partial: ClassVar[bool] = False
    offers: ClassVar[frozenset[str]] = frozenset()

    # Numpy arrays leave `x @ w` to the weight.
    __array_ufunc__ = None

    def __rmatmul__(self, x: "Array") -> Any:
        """Returns x W: [..., in] -> [..., out], in the dtype of x."""
        raise NotImplementedError

    def __repr__(self):
        from sparse_dataflow.core.weights.texts import text_of

        return text_of(self)

    @property
    def input_groups(self) -> tuple[int, int]:
        """(groups, run) of the input features, if products take every group, of runs of so many
        features, one by one; (1, 0) if they take all features in their order."""
        return 1, 0

    def times_zeros(self, x: "Array") -> "Array":
        """Returns `x @ self` for an x with many zeros, which a kind may skip."""
        return x @ self

    def expert_products(self, x: "Array", tiles: "Array") -> "Array":
        """Multiplies the rows of each expert with its weight, [experts, ...] of a stack.

        Args:
          x: [rows, in], in equal tiles.
          tiles: int32 [tiles], the expert of each.

        Returns:
          [rows, out].
        """
        raise NotImplementedError

    def dense(self) -> "Array":
        """Returns W, [..., in, out], of concrete layouts."""
        raise NotImplementedError

    def columns(self, outputs: Any) -> "Array":
        """Returns the weights of some outputs, [len(outputs), in]."""
        return self.dense()[..., outputs].T

    def map_stored(self, function: "Callable[[Weight], Weight]") -> "Weight":
        """Replaces the innermost weight, which no wrapper is."""
        return function(self)

    @classmethod
    @functools.cache
    def leaves(cls) -> dict[str, Leaf]:
        """Returns the arrays of the class by name."""
        fields: Any = dataclasses.fields(cls)  # type: ignore[arg-type]
        return {field.name: field.metadata[LEAF] for field in fields if LEAF in field.metadata}

    @classmethod
    def form(cls, spec: LinearSpec) -> "type[Weight]":
        """Returns the class that stores a weight of the kind: itself, or another stored form."""
        return cls

    @classmethod
    def project(cls, arrays: Mapping[str, "Array"]) -> "dict[str, Array]":
        """Returns the trained arrays that an update may have made illegal, as legal ones; {} for a
        kind whose every value is legal.

        It is called behind each update, whatever the optimizer, and where a state is restored.

        Args:
          arrays: all of a weight by name, of a stack, in jax or numpy.
        """
        return {}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, object], precision: str) -> "Weight":
        """Returns a weight of arrays by name; others are left alone.

        Args:
          precision: of the product's operands; see `ModelConfig`.
        """
        given = {**arrays, "precision": precision}
        names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: given[name] for name in names})

    @classmethod
    def shapes(cls, spec: LinearSpec, sides: tuple[int, int]) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the arrays of a layer by name; of blocks, about as many."""
        raise NotImplementedError

    @classmethod
    def stored(cls, spec: LinearSpec, sides: tuple[int, int]) -> float:
        """Returns the trained numbers of a layer's weight, before they are rounded to arrays."""
        return cls.numbers(spec, sides, set(ROLE_AXES) - {TABLE})

    @classmethod
    def numbers(cls, spec: LinearSpec, sides: tuple[int, int], roles: Collection[str]) -> int:
        """Returns the numbers of a layer's arrays of some roles."""
        leaves = cls.leaves()
        shapes = cls.shapes(spec, sides).items()
        return sum(math.prod(shape) for name, shape in shapes if leaves[name].role in roles)

    @classmethod
    def check(cls, name: str, spec: LinearSpec, sides: tuple[int, int]) -> None:
        """Raises UserError if a projection, by its name, cannot be stored so."""

    @classmethod
    def inner_width(cls, spec: LinearSpec, sides: tuple[int, int]) -> int:
        """Returns the features between the products of a weight; 0 for a single product."""
        return 0

    @classmethod
    def input_row(cls, spec: LinearSpec, sides: tuple[int, int]) -> int:
        """Returns the numbers that are stored for one input, in a row that a product of a token may
        skip; 0 if they are not in a row."""
        return 0

    @classmethod
    def row_width(cls, spec: LinearSpec) -> int:
        """Returns the outputs of a row in which a CPU can decode the weight; see `rows`.  0 for
        weights that are not rows."""
        return 0

    @classmethod
    def table_bytes(cls, spec: LinearSpec, sides: tuple[int, int]) -> float:
        """Returns the bytes of what is stored of a layer's layout."""
        return 0.0

    @classmethod
    def draw(
        cls,
        spec: LinearSpec,
        sides: tuple[int, int],
        gain: float,
        normal: "Callable[[tuple[int, ...], float], Array]",
        layout: object = None,
    ) -> "dict[str, Array]":
        """Returns new arrays, whose outputs have the variance gain² for inputs of variance 1.

        Args:
          normal: shape, standard deviation -> normal numbers.
          layout: the `BlockLayout` of a kind that stores blocks.
        """
        raise NotImplementedError

    @classmethod
    def matrices(cls, spec: LinearSpec, sides: tuple[int, int]) -> list[tuple[int, int]]:
        """Returns the shapes of the matrices that Muon orthogonalises; all as many times."""
        shapes = cls.shapes(spec, sides)
        return [(shapes[n][-2], shapes[n][-1]) for n, leaf in cls.leaves().items() if leaf.has_muon]

    @classmethod
    def read_share(
        cls, leaf: str, spec: LinearSpec, sides: tuple[int, int], has_muon: bool
    ) -> float:
        """Returns the inputs that an output of an array sums, as a share of the weight's inputs.

        Learning rates follow from it; see `optimizers.learning_rate_multipliers`.
        """
        return 1.0

    @classmethod
    def muon_inputs(cls, matrix: tuple[int, int], sides: tuple[int, int]) -> int:
        """Returns the inputs of the matrix whose update Muon scales the rate for."""
        return matrix[0]

    @classmethod
    def update_scales(cls, params: Mapping[str, "Array"]) -> "dict[str, Array]":
        """Returns factors of Muon's updates by array, [..., 1, 1], so that W moves as a dense one
        does; {} for none.  Takes numpy and jax arrays, before the update."""
        return {}

    @classmethod
    def describe(cls, spec: LinearSpec, sides: tuple[int, int]) -> str:
        """Returns what a model card says of a projection; "" for nothing."""
        return ""

    @classmethod
    def row(cls, spec: LinearSpec, sides: tuple[int, int]) -> tuple[str, str, str]:
        """Returns grid, density and what is stored, for the table of a run's projections."""
        return f"{sides[0]}x{sides[1]}", cls.kind, ""

    @classmethod
    def require(cls, ability: str, feature: str, legal: str = "") -> None:
        """Refuses a feature that the kind does not offer.

        Args:
          ability: of ABILITIES.
          feature: words that begin the sentence, such as "model.precision=int8".
          legal: what is legal instead; the kinds that offer it if empty.

        Raises:
          UserError: naming the kind and what is legal.
        """
        assert ability in ABILITIES, ability
        if ability in cls.offers:
            return
        legal = legal or ", ".join(k.words for k in KINDS.values() if ability in k.offers)
        raise UserError(f"{feature} does not go with {cls.words}; legal: {legal}.")


class Wrapper(Weight):
    """A weight that changes the product of its `base`."""

    base: Weight

    def dense(self) -> "Array":
        """See `Weight`; W of the base, where the wrapper does not change it."""
        return self.base.dense()

    def map_stored(self, function: Callable[[Weight], Weight]) -> Weight:
        return dataclasses.replace(self, base=self.base.map_stored(function))  # type: ignore[type-var]


Kind = TypeVar("Kind", bound=type[Weight])

CLASSES: list[type[Weight]] = []
"""All registered classes of weights."""

ON_REGISTER: list[Callable[[type[Weight]], None]] = []
"""Functions of each new class of weights; `weight` registers it as a pytree."""


def register(weight: Kind) -> Kind:
    """Registers a kind of weight by its key, as a decorator.

    Raises:
      UserError: it lacks a fact, another class has its key, or every projection may have an array
        of the name of one of its arrays.
    """
    leaves = weight.leaves()
    _check_names(weight)
    if weight.kind in KINDS:
        raise UserError(f"The kind of weight {weight.kind!r} is registered twice.")
    bases = weight.__mro__[: weight.__mro__.index(Weight)]
    # Of the class and its own bases: what `Weight` says is a default or a refusal.
    defined = {name for base in bases for name in vars(base)}
    needed = ["kind", "words", "__rmatmul__", "dense", "shapes", "draw"]
    needed += ["expert_products"] * ("experts" in weight.offers)
    absent = [name for name in needed if name not in defined]
    if absent:
        raise UserError(f"The kind of weight {weight.kind!r} lacks {', '.join(absent)}.")
    if unknown := weight.offers - set(ABILITIES):
        raise UserError(
            f"The kind of weight {weight.kind!r} offers {', '.join(sorted(unknown))}; legal: "
            f"{', '.join(ABILITIES)}."
        )
    for axis in ("tensor", "feature"):
        cuts = [axes for leaf in leaves.values() for axes in (*leaf.columns, *leaf.rows)]
        if f"{axis}_axis" in weight.offers and not any(axis in axes for axes in cuts):
            raise UserError(
                f"The kind of weight {weight.kind!r} offers {axis}_axis and cuts no array over "
                f"{axis}; legal: {axis} in `Leaf.columns` and `Leaf.rows` of an array, or no such "
                "offer."
            )
    KINDS[weight.kind] = weight
    KIND_NAMES.append(weight.kind)
    if weight.is_pattern:
        PATTERN_NAMES.append(weight.kind)
    elif weight.stores_blocks:
        BLOCK_KINDS.append(weight.kind)
    return register_form(weight)


def register_form(weight: Kind) -> Kind:
    """Registers a class that no spec names, such as another stored form; see `Weight.form`."""
    _check_names(weight)
    CLASSES.append(weight)
    for seen in ON_REGISTER:
        seen(weight)
    return weight


def register_term(setting: str) -> Callable[[Kind], Kind]:
    """Returns a decorator that registers a term: a wrapper whose arrays are stored beside those of
    its base, and whose facts are said as those of a kind.

    Args:
      setting: the field of a `LinearSpec` that adds the term where it is not 0.
    """

    def registered(weight: Kind) -> Kind:
        register_form(weight)
        ADDED_TERMS[setting] = weight
        return weight

    return registered


def _check_names(weight):
    # The arrays of a weight, of its added term, its bias and its threshold lie side by side.
    reserved = {BIAS_NAME, THRESHOLD, *([] if weight.stores_blocks else [LAYOUT])}
    reserved.update(*(term.leaves() for term in ADDED_TERMS.values()))
    if names := reserved & weight.leaves().keys():
        raise UserError(
            f"The array {min(names)!r} of {weight.__name__} has a name that projections use for "
            f"something else; legal: other names than {', '.join(sorted(reserved))}."
        )


def with_term(spec: LinearSpec, weight: Weight, arrays: Mapping[str, object]) -> Weight:
    """Returns a weight with the added term of its spec; the weight itself for none."""
    if spec.term is None:
        return weight
    return spec.term(weight, **{name: arrays[name] for name in spec.term_leaves})


def leaf_of(model: "ModelConfig", path: tuple) -> Leaf | None:
    """Returns what the array at a `jax.tree_util` path is; None if it is of no weight.

    A weight lies in a projection: norms and embeddings may have arrays of the same names.  The
    index tables of a layout are arrays of one leaf.
    """
    *above, key = path[:-1] if len(path) > 1 and hasattr(path[-1], "name") else path
    projection = getattr(above[-1], "key", None) if above else None
    if projection not in PROJECTIONS:
        return None
    return model.linear(projection).leaves.get(getattr(key, "key", ""))


def is_free_matrix(path: tuple) -> bool:
    """Returns whether the array at a path is a matrix of no weight that multiplies activations: a
    router, or one of a side network."""
    return path[-1].key == ROUTER or (len(path) > 1 and getattr(path[-2], "key", "") == SIDE)


def array_path(path: tuple) -> tuple:
    """Returns the `jax.tree_util` path of an array in the params from its path in their weights:
    without the fields that hold a weight, such as its base."""
    last = len(path) - 1
    return tuple(key for i, key in enumerate(path) if i == last or not hasattr(key, "name"))
