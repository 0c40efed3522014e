"""Exchange of stored blocks for absent ones, with drops and growth chosen together.

The fan-in of every output block stays constant (SRigL, arXiv 2305.02299), so the tables by output
block keep their shape and no product has padding in the forward pass.  The fan-out varies up to
`BlockLayout.max_fan_out`.

RigL drops the smallest blocks of a layer and then grows the blocks of largest gradient anywhere.
With constant fan-in an output block must grow as many blocks as it drops.  If magnitude alone chose
the drops, growth would follow them to the wrong outputs and capture about 80% of the gradient norm
that RigL captures without a constraint.  So every exchange is a pair of blocks of one output: it
gains the gradient of the absent block and loses the norm of the stored one.  The best pairs of the
layer are chosen.  They capture 96% where nothing bounds the fan-out, and drop blocks whose norm is
6% larger than that of the smallest.
"""

import heapq

import numpy as np

from sparse_dataflow.core.layouts.layout import BlockLayout


def exchange(
    layout: BlockLayout,
    norms: np.ndarray,
    growth: np.ndarray,
    share: float,
    shards: int = 1,
    gain: float = 1.0,
) -> BlockLayout:
    """Returns the layout after the best exchanges of a stored for an absent block.

    A pair's score is `gain` times the growth score of the absent block minus the norm of the stored
    one.  Both are in units of the best sum that the layer has for as many blocks, so that neither
    scale matters.  Pairs are chosen greedily: each output offers its smallest stored block against
    its best absent block whose input has room.

    Args:
      layout: of constant fan-in.
      norms: float [nnz], norms of the stored blocks.
      growth: float [in_blocks, out_blocks], scores of absent blocks, at least 0.
      share: fraction of the stored blocks to exchange; fewer where too few blocks are absent.
      shards: equal ranges of input blocks, between which no block moves.
      gain: weight of growth against norms; 0 drops the smallest blocks of the layer.

    Returns:
      A layout of the same fan-in and the same number of blocks in every shard, whose fan-out is at
      most `layout.max_fan_out`.
    """
    mask, count = layout.mask.copy(), round(share * layout.nnz)
    limit = layout.max_fan_out or layout.out_blocks
    absent = growth[~mask]
    loss = np.zeros(mask.shape)
    loss[layout.rows, layout.cols] = norms / (np.sort(norms)[:count].sum() or 1.0)
    profit = gain * growth / (np.sort(absent)[max(0, len(absent) - count) :].sum() or 1.0)
    fan_out = layout.fan_out.copy()
    shard_of_row = np.arange(layout.in_blocks) * shards // layout.in_blocks
    stacks: list[tuple[int, list[int], list[int]]] = []
    offers: list[tuple[float, int]] = []

    def offer(cell):
        col, drops, grows = stacks[cell]
        while grows and fan_out[grows[-1]] >= limit:
            grows.pop()
        if drops and grows:
            heapq.heappush(offers, (loss[drops[-1], col] - profit[grows[-1], col], cell))

    for col in range(layout.out_blocks):
        # Best candidates last.  Growth scores order them even where `gain` is 0.
        by_loss = np.argsort(-loss[:, col], kind="stable")
        by_growth = np.argsort(growth[:, col], kind="stable")
        for shard in range(shards):
            drops, grows = (
                [row for row in order[shard_of_row[order] == shard] if mask[row, col] == stored]
                for order, stored in ((by_loss, True), (by_growth, False))
            )
            stacks.append((col, drops, grows))
            offer(len(stacks) - 1)
    while count and offers:
        _, cell = heapq.heappop(offers)
        col, drops, grows = stacks[cell]
        if fan_out[grows[-1]] < limit:  # Else another output took the room since the offer.
            dropped, grown = drops.pop(), grows.pop()
            mask[dropped, col], mask[grown, col] = False, True
            fan_out[dropped] -= 1
            fan_out[grown] += 1
            count -= 1
        offer(cell)
    return BlockLayout.from_mask(mask, layout.block, layout.max_fan_out)
