"""Models with their tokenizer, and loading them from run folders."""

import dataclasses
import functools
import hashlib
import itertools
from pathlib import Path

import jax
import numpy as np

from sparse_dataflow.core.checkpoint.checkpoint import Checkpoints
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import PRECISIONS
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.layouts.layout import blocks_text
from sparse_dataflow.core.model import partition
from sparse_dataflow.core.model.partition import trained_and_rest, without_left_out
from sparse_dataflow.core.model.stacks import (
    layout_of_leaf,
    layouts_by_name,
    layouts_by_place,
    split_layouts,
)
from sparse_dataflow.core.optim.by_weight import evaluated
from sparse_dataflow.core.training.phases import phase_before, phases
from sparse_dataflow.core.training.saved_state import (
    SavedProgress,
    abstract_saved_state,
    completed,
    identity,
)
from sparse_dataflow.core.training.transitions import copied_blocks
from sparse_dataflow.core.weights.texts import array_text
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.evaluation.run_files import (
    RunRecord,
    read_config,
    read_record,
    read_tokenizer,
    read_variants,
)
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.json_files import JsonObject
from sparse_dataflow.pruning.omission import whole_params

NEWEST, BEST = "newest", "best"


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A language model: its parameters, which blocks they are, and its tokenizer.

    A pytree whose leaves are the parameters.  Everything else is static, and models of equal
    config, layouts and tokenizer have equal structure.  A model that a function of jax returns has
    no folder, step, record and facts.

    Attributes:
      folder: folder that it was loaded from; empty for none.
      variant: "sparse", "dense" or "narrow".
      model: model config; of a run, in the checkpoint's phase, with a block for each layer.
      params: float32 master weights, with bool masks and with int32 layouts in numpy, which
        programs are specialised to; see `model.gpt`.  They are no leaves of the model.
      tokenizer: tokenizer of the run.
      step: number of optimizer steps.
      training: training config.
      record: what the run was started with; None where there is no run folder.
      facts: checkpoint metadata ("seconds", "bits_per_byte", ...).

    Examples:
        >>> model = sd.init(sd.preset("pico").change(sparsity__block=16), jax.random.key(0))
        >>> state = optax.adam(1e-3).init(model)
        >>> half = jax.tree.map(lambda parameter: parameter / 2, model)
        >>> type(half).__name__, half.tokenizer.decode(half.tokenizer.encode("def"))
        ('Model', 'def')
    """

    folder: Path
    variant: str
    model: ModelConfig
    params: dict
    tokenizer: Tokenizer
    step: int
    training: TrainingConfig
    record: RunRecord | None
    facts: JsonObject

    def __repr__(self):
        lines = [f"Model({self.variant}, step {self.step:,}, {self.tokenizer}"]
        arrays, layouts = split_layouts(self.params)[0], layouts_by_place(self.params)
        for path, array in jax.tree_util.tree_leaves_with_path(arrays):
            layout = layout_of_leaf(self.model, path, layouts)
            text = f"  {jax.tree_util.keystr(path, simple=True, separator='/')}={array_text(array)}"
            # A map over the model may have put anything in place of the arrays.
            if layout and np.ndim(array) > 2 and np.ndim(layout.in_index) > 1:
                *_, stored, block, _ = array.shape
                ins, outs = layout.grid[-2:]
                text += f": {blocks_text(ins, outs, stored, block)}"
            lines.append(text)
        return "\n".join([*lines, ")"])

    @property
    def context(self) -> int:
        """Context length of the training in tokens."""
        return self.training.sequence

    def tree_flatten_with_keys(self) -> tuple[tuple, "_Static"]:
        """See `jax.tree_util.register_pytree_with_keys_class`.

        The key of the parameters names their layouts, so orbax refuses those of other layouts.
        """
        trained, rest = trained_and_rest(self.model, self.params)
        name = f"params_layout_{self._static.layouts[:16]}" if rest else "params"
        return ((jax.tree_util.GetAttrKey(name), trained),), self._static

    @classmethod
    def tree_unflatten(cls, static: "_Static", children: tuple) -> "Model":
        """See `jax.tree_util.register_pytree_with_keys_class`."""
        params = children[0]
        # A transformation may put anything in place of the parameters.
        if static.model.params and isinstance(params, dict):
            params = partition.merged(params, static.model.params)
        model = dataclasses.replace(static.model, params=params)
        # The static part is that of the structure; computing it again would hash all layouts at
        # every step of jax.
        object.__setattr__(model, "_static", static)
        return model

    @functools.cached_property
    def _static(self):
        _, rest = trained_and_rest(self.model, self.params)
        return _Static(
            dataclasses.replace(self, folder=Path(), params=rest, step=0, record=None, facts={})
        )

    @property
    def saved_record(self) -> RunRecord:
        """The record of a model that was loaded from a run folder."""
        assert self.record is not None
        return self.record


class _Static:
    """All of a model but what is trained; compares and hashes by content, once.

    Attributes:
      model: the model, with its layouts and masks alone for parameters; () for none.
      layouts: sha256 (hex) of its layout tables and masks.
    """

    def __init__(self, model: Model):
        self.model = model
        content = hashlib.sha256()
        masks, layouts = split_layouts(model.params)
        leaves = map(jax.tree_util.tree_leaves_with_path, (layouts_by_name(layouts), masks))
        for path, table in itertools.chain(*leaves):
            content.update(f"{path}{table.shape}".encode() + np.asarray(table).tobytes())
        config = (model.variant, model.model, model.training, model.tokenizer.content_hash)
        self.layouts = content.hexdigest()
        self._content = (*config, self.layouts)
        self._hash = hash(self._content)

    def __eq__(self, other):
        return self is other or (isinstance(other, _Static) and self._content == other._content)

    def __hash__(self):
        return self._hash


def load(run_folder: str | Path, variant: str = "", checkpoint: str = NEWEST) -> Model:
    """Loads a variant's model from a checkpoint and verifies all of its bytes.

    Does not change the folder; the run may still be in progress.  The model multiplies in its
    compute dtype, whatever the precision of its training was.  Layers that share a block in the
    checkpoint's phase have copies of it, and what the phase leaves out is put back.  A run of
    adapters has these alone; `interchange.starting_point.load_run` adds the weights that they are
    for.

    Args:
      variant: variant of the run, "sparse" or "dense"; empty for the first.
      checkpoint: "newest", "best" (lowest held-out loss) or a step number.

    Raises:
      UserError: the run, variant, tokenizer or checkpoint is missing or damaged.
    """
    folder = Path(run_folder).expanduser()
    config = read_config(folder)
    record = read_record(folder, config)
    variant = variant or config.variants[0]
    if variant not in config.variants:
        raise UserError(
            f"The run {folder} has no variant {variant!r}; legal: {', '.join(config.variants)}."
        )
    tokenizer = read_tokenizer(folder, record)
    chosen = read_variants(config, record)[variant]
    model, training, evolution = chosen.model, chosen.training, chosen.evolution
    config_identity = identity(model, training, evolution, tokenizer.content_hash)
    path = folder / variant / "checkpoints"
    checkpoints = Checkpoints(path, config=config_identity, completed=completed, read_only=True)
    model_phases = phases(model, evolution, training.steps)

    # Other optimizers' states are not read, so their code is not imported.
    averages = training.optimizer == "schedule_free"
    planned = training if averages else dataclasses.replace(training, optimizer="adamw")

    def template(step, extra):
        state = abstract_saved_state(
            SavedProgress.from_extra(extra, model_phases).phases, planned, step
        )
        if not averages:
            return state._replace(moments=())
        on_host = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), state.moments)
        return state._replace(moments=on_host)

    # Of all moments, those of schedule_free alone decide the weights of an evaluation.
    unread = () if averages else ("moments",)
    restored = checkpoints.restore(template, _step(checkpoints, checkpoint), without=unread)
    if restored is None:
        raise UserError(f"The run {folder} has no checkpoint of {variant} yet: {path} is empty.")
    state, facts = restored
    step = int(state.step)
    shape = model_phases[
        phase_before(SavedProgress.from_extra(facts, model_phases).phases, step)
    ].model
    frozen, layouts = split_layouts(state.state(shape).rest)
    params = evaluated(shape, training, state.moments, state.params)
    if shape.left_out:
        params, frozen = whole_params(shape, params, frozen), without_left_out(frozen)
        shape = shape.with_all_features
    params = partition.merged(params, frozen)
    if shape.shared_layers:
        params = {**params, "blocks": copied_blocks(params["blocks"], shape.num_layers)}
        shape = dataclasses.replace(shape, shared_layers=False)
    return Model(
        folder,
        variant,
        dataclasses.replace(shape.dropless(), precision=PRECISIONS[0]),
        partition.merged(params, layouts),
        tokenizer,
        step,
        training,
        record,
        facts,
    )


def _step(checkpoints, name):
    """Returns the step of checkpoint `name`; None for the newest complete one."""
    if name == NEWEST:
        return None
    if name == BEST:
        return checkpoints.best_step()
    if not name.isdecimal():
        raise UserError(
            f"There is no checkpoint {name!r}; legal: {NEWEST}, {BEST} or a step number."
        )
    return int(name)
