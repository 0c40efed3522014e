"""Attention on TPUs, through jax's splash attention kernels."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas.ops.tpu import splash_attention

from sparse_dataflow.core.config.remat import ATTENTION_OUTPUT
from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.core.ops.attention.dot_product import ALL, Sight

LANES = 128
DTYPES = ("bfloat16", "float32")
MAX_HEAD_DIM = 256
"""The widest head that compiles for every TPU from v4 to v6e; wider ones may exceed VMEM."""

TILES = (512, 256, 128)
"""Tile sizes of queries and keys, in tokens; the largest that divides the queries is used."""


def self_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    window: int = 0,
    cap: float = 0.0,
    documents: jax.Array | None = None,
    bidirectional: bool = False,
    layout: BlockLayout | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Compute `attention_op.self_attention`, with its arguments, without scores; skips tiles
    without a visible key.  `interpret` says whether a CPU interprets the kernels.  The operands are
    bfloat16 or float32, see `splash_refusal`.
    """
    tokens, heads, kv_heads = query.shape[1], query.shape[2], key.shape[2]
    sight = Sight(window, bidirectional, layout)
    kernel = _kernel(np.arange(tokens), 1, heads, kv_heads, sight, cap, interpret)
    return _run(kernel, query, key, value, documents, documents)


def shard_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    order: np.ndarray,
    shard: jax.Array,
    window: int = 0,
    cap: float = 0.0,
    documents: tuple[jax.Array, jax.Array] | None = None,
    bidirectional: bool = False,
    layout: BlockLayout | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Compute `attention_op.shard_attention`, with its arguments but for `documents`: int32
    [batch, tokens / shards] of the queries, and [batch, tokens] of the keys.
    """
    shards, heads, kv_heads = len(order), query.shape[2], key.shape[2]
    sight = Sight(window, bidirectional, layout)
    kernel = _kernel(order.reshape(-1), shards, heads, kv_heads, sight, cap, interpret)
    if sight == ALL:
        return _run(kernel, query, key, value, *(documents or (None, None)))

    # All devices run one program, but each shard has other tiles to skip.  So the tables of all
    # shards are constants, and each device slices its own by the traced number.
    def shard_slice(array, axis):
        size = array.shape[axis] // shards
        return lax.dynamic_slice_in_dim(array, shard * size, size, axis)

    def sliced(info):
        # Tables [heads, tiles of queries, tiles of keys], but for the positions of the queries.
        tables = {
            name: shard_slice(getattr(info, name), 1)
            for name in ("data_next", "mask_next", "block_mask")
            if getattr(info, name) is not None
        }
        return info._replace(**tables, q_sequence=shard_slice(info.q_sequence, 0))

    infos = map(sliced, (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info))
    kernel = type(kernel)(*infos, **kernel.kwargs)
    return _run(kernel, query, key, value, *(documents or (None, None)))


def splash_refusal(
    query: jax.Array, layout: BlockLayout | None = None, is_shard: bool = False
) -> str:
    """Return why the kernels cannot run operands like `query`; empty if they can."""
    _, tokens, _, width = query.shape
    if query.dtype not in DTYPES:
        return f"the splash kernels need {' or '.join(DTYPES)}, not {query.dtype}."
    if tokens % LANES:
        return f"the splash kernels need a multiple of {LANES} tokens, not {tokens}."
    if width > MAX_HEAD_DIM:
        return f"the splash kernels need a head_dim of at most {MAX_HEAD_DIM}, not {width}."
    if layout is not None and layout.block % LANES:
        return (
            f"the splash kernels need blocks of a multiple of {LANES} tokens, not {layout.block}."
        )
    if layout is not None and is_shard and tokens % (2 * LANES):
        return f"the splash kernels need a multiple of {2 * LANES} tokens a shard, not {tokens}."
    return ""


def _run(kernel, query, key, value, documents, key_documents):
    batch, tokens, heads, width = query.shape
    # The kernel does not scale; scaling rounds unless sqrt(width) is a power of two.
    query = (query.astype(jnp.float32) / math.sqrt(width)).astype(query.dtype)
    q, k, v = (array.swapaxes(1, 2) for array in (query, key, value))
    segments = None
    if documents is not None:
        segments = splash_attention.SegmentIds(q=documents, kv=key_documents)
    if k.shape[1] == heads:
        return jax.vmap(kernel)(q, k, v, segments).swapaxes(1, 2)
    # [batch, kv heads, queries of each, tokens, width]: a kernel has the queries of one key head.
    grouped = q.reshape(batch, k.shape[1], -1, tokens, width)
    # Key heads of a sequence share its documents.
    row_kernel = jax.vmap(kernel, in_axes=(0, 0, 0, None))
    return jax.vmap(row_kernel)(grouped, k, v, segments).reshape(q.shape).swapaxes(1, 2)


_NONE, _ALL = np.array([[False]]), np.array([[True]])


class _Mask(splash_attention.CausalMask):
    """The mask of a `Sight`, of queries in any order.

    Building a kernel asks of every tile whether any and whether all of it is seen, and a long
    sequence has many.  So a tile that is seen whole or not at all has one element.
    """

    def __init__(self, positions, sight):
        tokens = len(positions)
        super().__init__((tokens, tokens))
        self.sight = sight
        # Least and largest distance from a query back to a key that it sees.
        after = sight.window - 1 if sight.window else tokens
        self.least, self.largest = -after if sight.bidirectional else 0, after
        self.q_sequence = np.asarray(positions, np.int32)
        self.ends = {}  # Tile of queries -> its first and last position.

        def seen(query, key):
            return (query - key >= self.least) & (query - key <= self.largest)

        self.mask_function = seen

    def __getitem__(self, index):
        rows, columns = index
        first, end, _ = columns.indices(self.shape[1])
        tile = rows.start, rows.stop
        layout = self.sight.layout
        if tile not in self.ends:
            queries = self.q_sequence[rows]
            self.ends[tile] = int(queries.min()), int(queries.max())
        lowest, highest = self.ends[tile]
        # Distances from a query back to a key, over all pairs of the tile.  Queries may lie apart,
        # as in two chunks of a zig-zag shard: then the bounds are wide, and the pairs are compared.
        nearest, farthest = lowest - (end - 1), highest - first
        if farthest < self.least or nearest > self.largest:
            return _NONE
        # A tile is in one block of queries and one of keys, see `_kernel`.
        if layout is not None and not layout.mask[first // layout.block, lowest // layout.block]:
            return _NONE
        if nearest >= self.least and farthest <= self.largest:
            return _ALL
        return self.mask_function(self.q_sequence[rows][:, None], np.arange(first, end)[None])

    def __eq__(self, other):
        return (
            isinstance(other, _Mask)
            and self.sight == other.sight
            and np.array_equal(self.q_sequence, other.q_sequence)
        )

    def __hash__(self):
        return hash((self.sight, self.q_sequence.tobytes()))


def _kernel(positions, shards, heads, kv_heads, sight, cap, interpret):
    """Return the kernel of all heads, or of the query heads of one key/value head."""
    lengths = [len(positions) // shards]
    if sight.layout is not None:
        # Chunks of a zig-zag shard begin at multiples of a half of it.
        lengths += [sight.layout.block, lengths[0] // 2 if shards > 1 else 0]
    tile = next(tile for tile in TILES if not any(length % tile for length in lengths))
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    sizes: dict[str, Any] = {f"block_{name}": tile for name in names}
    grouped = kv_heads < heads
    make = splash_attention.make_splash_mqa if grouped else splash_attention.make_splash_mha
    mask: Any = _Mask(positions, sight)
    if sight == ALL:  # All shards are alike, and the tables of several need a tile that is cut.
        shards, mask = 1, splash_attention.FullMask((len(positions) // shards, len(positions)))
    masks = [mask] * (heads // kv_heads if grouped else heads)
    # The mask's tables must be concrete, even inside a trace.
    with jax.ensure_compile_time_eval():
        return make(
            splash_attention.MultiHeadMask(masks),
            block_sizes=splash_attention.BlockSizes(**sizes),
            head_shards=1,
            q_seq_shards=shards,
            attn_logits_soft_cap=cap or None,
            residual_checkpoint_name=ATTENTION_OUTPUT,
            interpret=interpret,
        )
