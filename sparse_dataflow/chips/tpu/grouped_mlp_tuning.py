"""Tile sizes of the grouped sparse MLP's TPU kernels, and their VMEM bytes."""

import dataclasses

from sparse_dataflow.chips.tpu.grouped_matmul.tuning import ROWS, divisors, token_tiles
from sparse_dataflow.chips.tpu.matmul.tuning import LANES, budget, device, even


@dataclasses.dataclass(frozen=True)
class MlpForwardTiles:
    """Tiles of the forward pass.

    Attributes:
      tokens: tokens of a step.
      rows: tokens whose hidden activations are computed at once.
    """

    tokens: int
    rows: int


@dataclasses.dataclass(frozen=True)
class MlpBackwardTiles:
    """Tiles of the backward pass.

    Attributes:
      tokens: tokens of a step, the contraction length of the weight gradients.
      chunk: hidden features of one dot.
    """

    tokens: int
    chunk: int


@dataclasses.dataclass(frozen=True)
class GroupedMlpTuning:
    """Tiles of the grouped MLP on one device.

    Attributes:
      forward: tiles of the forward pass.
      backward: tiles of the backward pass.
      vmem_bytes: VMEM limit of a kernel.
      cores: TensorCores of one device (2 on v4 and v5p).
    """

    forward: MlpForwardTiles
    backward: MlpBackwardTiles
    vmem_bytes: int
    cores: int


@dataclasses.dataclass(frozen=True)
class MlpGroup:
    """Features of a group on both sides of the hidden layer.

    Attributes:
      inputs: features of x.
      hidden: features of the hidden layer.
      outputs: features of y.
      products: weights into the hidden layer; 2 with a gate.
    """

    inputs: int
    hidden: int
    outputs: int
    products: int = 1

    @property
    def weights(self) -> int:
        """Number of weights."""
        return self.hidden * (self.products * self.inputs + self.outputs)


def choose_tuning(tokens: int, group: MlpGroup, itemsize: int) -> GroupedMlpTuning | None:
    """Return the tiles of both passes on the target TPU; None if a pass has none that fit VMEM."""
    info = device()
    forward = forward_tiles(tokens, group, itemsize)
    backward = backward_tiles(max(tokens, LANES), group, itemsize)
    if forward is None or backward is None:
        return None
    return GroupedMlpTuning(forward, backward, info.vmem_capacity_bytes, info.num_cores)


def forward_tiles(tokens: int, group: MlpGroup, itemsize: int) -> MlpForwardTiles | None:
    """Return the most tokens that fit VMEM; None if fewer than a register's rows would."""
    features = group.inputs + group.products * group.hidden + group.outputs
    for tile in token_tiles(tokens, 1024, ROWS):
        rows = even(tile, 512 if itemsize == 2 else 128, ROWS)
        # Two buffers of each block, as the next one is copied meanwhile; then float32 sums of
        # `rows`.
        need = 2 * (tile * features + group.weights) * itemsize
        need += rows * (group.hidden * (8 * group.products + itemsize) + group.outputs * 4)
        if need <= budget():
            return MlpForwardTiles(tile, rows)
    return None


def backward_tiles(tokens: int, group: MlpGroup, itemsize: int) -> MlpBackwardTiles | None:
    """Return the most tokens, then the longest chunk, that fit VMEM; None if none fit.

    512 tokens and 1,280 features take fewer cycles than 1,024 and 512: sums of dx are added less
    often.
    """
    for tile in token_tiles(tokens, 512, LANES):
        for chunk in divisors(group.hidden):
            if chunk > 1280 * 2 // itemsize:
                continue
            rows = 6 * group.inputs + 5 * group.outputs + 2 * group.products * group.hidden
            need = (tile * rows + 4 * group.weights) * itemsize + group.weights * 4
            need += tile * (group.inputs * 8 + chunk * 16 * group.products)
            if need <= budget():
                return MlpBackwardTiles(tile, chunk)
    return None
