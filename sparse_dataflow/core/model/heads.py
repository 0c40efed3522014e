"""Queries, keys and values of the heads, from the output of one projection.

Shapes in names: B batch, T tokens, K head width.
"""

import jax
import jax.numpy as jnp

from sparse_dataflow.core.ops import dispatch
from sparse_dataflow.core.weights.weight import Linear, named_output

TILE = 8, 128
"""Tokens and features of a tile of a TPU's memory."""


def split(qkv: Linear, y: jax.Array, group: int, width: int) -> list[jax.Array]:
    """Returns queries [B, T, heads, K], keys and values [B, T, kv heads, K].

    Args:
      qkv: the projection, whose bias is added.
      y: its product [B, T, kv heads * (group + 2) * K], ordered [kv head, (its queries..., key,
        value), K].
      group: query heads of a kv head.
      width: K.
    """
    B, T, _ = y.shape
    if dispatch.platform() == "tpu" and T % TILE[0] == 0 and width % TILE[1] == 0:
        return split_tiles(qkv.bias, y, group, width)
    heads = qkv.plus_bias(y).reshape(B, T, -1, group + 2, width)
    if group == 1:
        return list(jnp.moveaxis(heads, 3, 0))
    return [heads[..., :group, :].reshape(B, T, -1, width), heads[..., group, :], heads[..., -1, :]]


def split_tiles(bias: jax.Array | None, y: jax.Array, group: int, width: int) -> list[jax.Array]:
    """Computes `split` in moves of whole tiles.

    With tokens apart by tile, each part of a head is whole tiles, and XLA cuts, moves and adds the
    bias of one part at a time.  Without, it first copies everything into tiles of (query, key,
    value) x K, which are padded.
    """
    B, T, _ = y.shape
    parts = slice(group), slice(group, group + 1), slice(group + 1, group + 2)
    tiles = y.reshape(B, T // TILE[0], TILE[0], -1, group + 2, width)

    def part(cut):
        tile = tiles[..., cut, :].transpose(0, 3, 4, 1, 2, 5)
        heads = tile.reshape(B, -1, T, width)
        if bias is not None:
            rows = bias.astype(y.dtype).reshape(-1, group + 2, width)
            heads += rows[:, cut].reshape(-1, 1, width)
        return named_output(heads.swapaxes(1, 2))

    return [part(cut) for cut in parts]
