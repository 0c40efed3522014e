"""The models of a study, and their training steps as programs that share states."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from sparse_dataflow.compile import programs as described
from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors.executor import SINGLE_DEVICE
from sparse_dataflow.core.ops import dispatch
from sparse_dataflow.core.training import cost
from sparse_dataflow.core.training.step import initial_state, jitted_train_step
from sparse_dataflow.runs.run_config import SIZES, preset
from sparse_dataflow.runs.variants import variant

from .. import steps
from .program_pool import Lower

DENSITY = 0.125


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Shapes and times of a study.

    Attributes:
      scale: of the training step.
      block: side of its blocks.
      few, many: layers of the two programs whose difference is the time of layers.
      batch, sequence: tokens of its step.
      state_dtype: dtype of its optimizer state.
      dtype: compute dtype.
      rounds: timed rounds.
      product: side of the dense product of the first row.
      copied: bytes of the array that the first row copies.
      decoded: scale whose tokens are decoded.
      trained: scale that is trained on text.
      train_batch: sequences of its step.
      train_seconds: of each training.
      loss_seconds: between two held-out losses.
      width_step: the narrow dense model's width is a multiple of it.
      text_bytes: most bytes of text.
    """

    scale: str = "13b"
    block: int = 128
    few: int = 4
    many: int = 12
    batch: int = 2
    sequence: int = 2048
    state_dtype: str = "bfloat16"
    dtype: str = "bfloat16"
    rounds: int = 5
    product: int = 8192
    copied: int = 2**31
    decoded: str = "1.3b"
    trained: str = "350m"
    train_batch: int = 16
    train_seconds: float = 70.0
    loss_seconds: float = 10.0
    width_step: int = 64
    text_bytes: int = 45 * 2**20


REHEARSAL = Sizes(
    scale="pico", block=16, few=1, many=3, batch=2, sequence=64, state_dtype="float32",
    dtype="float32", rounds=2, product=256, copied=2**22, decoded="pico", trained="pico",
    train_batch=2, train_seconds=1.0, loss_seconds=0.4, width_step=16, text_bytes=2**21,
)  # fmt: skip
"""Every row in about half a minute of a CPU."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model whose training step is timed.

    Attributes:
      sparse: whether its projections are block-sparse at DENSITY.
      changes: settings by path, on top of full remat.
      without: ops that do without the kernels of the platform, see `dispatch.without`.
    """

    sparse: bool
    changes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    without: tuple[str, ...] = ()

    def model(self, sizes: Sizes, layers: int | None = None) -> ModelConfig:
        """Returns the model; of the scale's own depth if `layers` is None.

        Raises:
          UserError: a setting, or its value, does not exist here.
        """
        config = _config(sizes, sizes.scale).change(
            model__num_layers=layers or SIZES[sizes.scale].num_layers
        )
        changes = {path.replace(".", "__"): value for path, value in self.changes.items()}
        return variant(config.change(**changes), "sparse" if self.sparse else "dense").model

    def name(self, name: str, layers: int) -> str:
        """Returns the name of its program of so many layers."""
        return f"{name}, {layers} layers"


def step_training(sizes: Sizes) -> TrainingConfig:
    """Returns the training settings of a timed step."""
    return _config(sizes, sizes.scale).training


def _config(sizes, scale):
    config = preset(scale, compute_dtype=sizes.dtype).change(
        model__remat="full",
        training__batch=sizes.batch,
        training__sequence=sizes.sequence,
        training__state_dtype=sizes.state_dtype,
        training__steps=1,
        sparsity__density=DENSITY,
        sparsity__block=sizes.block,
    )
    return config.without_auto()


def step_shapes(model: ModelConfig, training: TrainingConfig) -> tuple:
    """Returns the shapes of a step's state without its rest, the rest, batch and rate."""
    return described.abstract_arguments(SINGLE_DEVICE, model, training, changing=False)[0]


def fresh_state(model: ModelConfig, training: TrainingConfig) -> tuple:
    """Returns (state without its rest, the rest) as a step takes them."""
    state = initial_state(model, training)
    rest = SINGLE_DEVICE.place_layouts(state.rest, model, changing=False)
    return state._replace(rest=()), rest


def lowered_step(
    model: ModelConfig, training: TrainingConfig, without: tuple[str, ...] = ()
) -> jax.stages.Lowered:
    """Returns a training step of one device, lowered from shapes alone; see `Case.without`."""
    arguments = step_shapes(model, training)
    with dispatch.without(*without):
        return jitted_train_step(model, training, SINGLE_DEVICE, arguments[0]).lower(*arguments)


def step_programs(sizes: Sizes, name: str, case: Case, *depths: int) -> dict[str, Lower]:
    """Returns the programs of a case; none where it has a setting that does not exist here."""
    training = step_training(sizes)
    return {
        case.name(name, layers): functools.partial(
            lowered_step, case.model(sizes, layers), training, case.without
        )
        for layers in depths
    }


class States:
    """Training states on the device, which programs of equal weights share: a step of one goes on
    where a step of the other ended."""

    def __init__(self, sizes: Sizes):
        self._sizes = sizes
        self._states: dict[tuple[bool, int], list] = {}

    def run(self, case: Case, layers: int, program: Any) -> Callable[[], Any]:
        """Returns a function that runs one step and returns its report."""
        key, training = (case.sparse, layers), step_training(self._sizes)
        model = dataclasses.replace(case.model(self._sizes, layers), remat="full")
        if key not in self._states:
            self._states[key] = list(fresh_state(model, training))
        shared = self._states[key]
        batch = Batch.from_windows(steps.random_tokens(model, training))
        rate = np.float32(steps.LEARNING_RATE)

        def run():
            shared[0], report = program(shared[0], shared[1], batch, rate)
            return report.loss

        return run


def trained_models(sizes: Sizes) -> dict[str, ModelConfig]:
    """Returns the models that are trained on bytes: dense, sparse, and narrow of equal FLOPs."""
    config = dataclasses.replace(
        _config(sizes, sizes.trained), training=trained_training(sizes)
    ).change(model__remat="none")
    sparse, dense = (variant(config, name, 256).model for name in ("sparse", "dense"))
    return {"dense": dense, "narrow": _narrow(sizes, dense, sparse), "sparse": sparse}


def trained_training(sizes: Sizes) -> TrainingConfig:
    """Returns the training settings on text."""
    training = _config(sizes, sizes.trained).training
    return dataclasses.replace(training, batch=sizes.train_batch, state_dtype="float32")


def _narrow(sizes, dense, sparse):
    """Returns the dense model, of a width that a chip's tiles like, whose tokens cost nearest to
    the FLOPs of the sparse one's."""

    def flops(model):
        return cost.flops_per_token(model, sizes.sequence).total

    head = dense.head_width if dense.head_width % sizes.width_step == 0 else sizes.width_step
    widths = range(head, dense.d_model + 1, head)
    models = [
        dataclasses.replace(dense, d_model=width, d_ff=4 * width, num_heads=width // head)
        for width in widths
    ]
    return min(models, key=lambda model: abs(flops(model) - flops(sparse)))
