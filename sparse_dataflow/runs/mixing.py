"""Which features of a model can influence each other through its layers."""

import math

import numpy as np

from sparse_dataflow.core.config.layer_groups import layer_linear
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import MLP
from sparse_dataflow.core.layouts.model_layouts import projection_layout


def isolated_components(model: ModelConfig) -> int:
    """Returns into how many parts the initial layouts cut the residual stream.

    Features of two parts meet in no layer, so the parts are models of their own between embedding
    and output layer.  Norms do not count: they share only the scale of the features.  1 is a model
    that mixes all features.
    """
    import scipy.sparse.csgraph  # Takes long to import, and is needed once a run.

    sparse = model.sparse_projections
    if not sparse or model.experts:  # A router reads all features, and scales all.
        return 1
    # The largest unit that no boundary of a head or a block cuts: all features of one unit have the
    # same links.
    unit = math.gcd(
        model.d_model, model.d_ff, model.head_width, *(model.linear(n).block for n in sparse)
    )
    stream, hidden = np.arange(model.d_model // unit), np.arange(model.d_ff // unit)
    labels, count = stream, len(stream)
    for layer in range(model.stored_layers):
        links = []
        heads = len(stream) + np.arange(model.kv_heads)
        first = len(stream) + len(heads)
        for name in model.projections:
            ends = first + hidden if name in MLP else _head_units(model, name, heads, unit)
            sides = (ends, stream) if name in ("attn_out", "mlp_out") else (stream, ends)
            links += _links(model, name, layer, unit, *sides)
        whole = first + len(hidden)
        links.append((stream, whole + labels))  # What earlier layers have mixed.
        start, stop = (np.concatenate(side) for side in zip(*links))
        shape = (whole + len(stream),) * 2
        graph = scipy.sparse.coo_array((np.ones(len(start), bool), (start, stop)), shape)
        components = scipy.sparse.csgraph.connected_components(graph, directed=False)[1]
        # Numbered anew from 0, as each layer's graph has its own nodes.
        labels = np.unique(components[stream], return_inverse=True)[1]
        count = len(np.unique(labels))
        if count == 1:
            break
    return count


def _head_units(model, name, heads, unit):
    """Returns the head of each unit of features of a projection of the attention: queries, keys
    and values of a head meet in its scores."""
    group, width = model.num_heads // model.kv_heads, model.head_width // unit
    vectors_per_head = {"qkv": group + 2, "k": 1, "v": 1}.get(name, group)
    return np.repeat(heads, vectors_per_head * width)


def _links(model, name, layer, unit, inputs, outputs):
    """Returns pairs of arrays: nodes that a projection links with each other."""
    spec = layer_linear(model, name, layer)
    if not spec.weight.stores_blocks or spec.rank:
        return [
            (inputs, np.full_like(inputs, outputs[0])),
            (outputs, np.full_like(outputs, inputs[0])),
        ]
    layout, size = projection_layout(model, name, layer), spec.block // unit
    rows, columns = (
        nodes[index[:, None] * size + np.arange(size)]
        for nodes, index in ((inputs, layout.rows), (outputs, layout.cols))
    )
    links = [
        # Stars in place of all pairs: one node of a block is linked with all of the other side.
        (rows.ravel(), np.repeat(columns[:, 0], size)),
        (columns.ravel(), np.repeat(rows[:, 0], size)),
    ]
    # A transform mixes whole groups of inputs before the blocks read them.
    if spec.hadamard > unit:
        first = np.arange(len(inputs)) // (spec.hadamard // unit) * (spec.hadamard // unit)
        links.append((inputs, inputs[first]))
    return links
