"""Queries, keys and values of heads, cut from the output of one projection in whole tiles.

Shapes in names: B batch, T tokens, K head width.
"""

import jax

from sparse_dataflow.core.weights.weight import named_output

TILE = 8, 128
"""Tokens and features of a tile of a TPU's memory."""


def split(bias: jax.Array | None, y: jax.Array, group: int, width: int) -> list[jax.Array] | None:
    """Returns queries [B, T, heads, K], keys and values [B, T, kv heads, K], with the bias.

    None if heads are not whole tiles. With tokens apart by tile, XLA cuts, moves and adds the bias
    of one part at a time. Without, it first copies everything into tiles of (query, key, value) x
    K, which are padded.

    Args:
      bias: of the projection; None for none.
      y: its product [B, T, kv heads * (group + 2) * K], ordered [kv head, (its queries..., key,
        value), K].
      group: query heads of a kv head.
      width: K.
    """
    B, T, _ = y.shape
    if T % TILE[0] or width % TILE[1]:
        return None
    parts = slice(group), slice(group, group + 1), slice(group + 1, group + 2)
    tiles = y.reshape(B, T // TILE[0], TILE[0], -1, group + 2, width)

    def part(cut):
        # [B, kv heads, parts, T / 8, 8, K] -> [B, heads, T, K].
        heads = tiles[..., cut, :].transpose(0, 3, 4, 1, 2, 5).reshape(B, -1, T, width)
        if bias is not None:
            rows = bias.astype(y.dtype).reshape(-1, group + 2, width)
            heads += rows[:, cut].reshape(-1, 1, width)
        return named_output(heads.swapaxes(1, 2))

    return [part(cut) for cut in parts]
