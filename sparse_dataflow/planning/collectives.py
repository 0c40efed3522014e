"""Seconds of collectives by the alpha-beta model over islands of fast links.

Over g chips (g - 1) / g of the gathered bytes move through each chip, in log2 g hops (recursive
doubling; Thakur, Rabenseifner and Gropp 2005, section 4).  Over several islands it is hierarchical:
each chip first meets those of its island, then crosses with its share of the bytes.  All functions
take numpy arrays and broadcast.
"""

import numpy as np

from sparse_dataflow.hardware.chips import Network
from sparse_dataflow.planning.efficiency import Efficiency


def gather_seconds(size, chips, near, network: Network, efficiency: Efficiency, axes=1):
    """Seconds to gather `size` bytes on every chip of a group, or to reduce and scatter them.

    Args:
      size: bytes of the gathered array.
      chips: in the group.
      near: those of the group that share an island; chips / near islands take part.
      network: the links.
      efficiency: the fractions of the links' rates that are reached.
      axes: of a torus over which the group lies.
    """
    near = np.minimum(near, chips)
    islands = chips / near
    rate = network.fast * np.clip(axes, 1, network.axes)
    if network.pair:
        rate = np.where(near <= 2, network.pair, rate)
    inside = (near - 1) / near * size / (rate * efficiency.fast_link)
    inside = inside + np.log2(near) * network.fast_latency
    across = (islands - 1) / islands * (size / near) / (network.slow * efficiency.slow_link)
    return inside + across + np.log2(islands) * network.slow_latency


def reduce_seconds(size, chips, near, network: Network, efficiency: Efficiency, axes=1):
    """Seconds of an all-reduce of `size` bytes: a reduce-scatter, then a gather."""
    return 2 * gather_seconds(size, chips, near, network, efficiency, axes)


def send_seconds(size, near, network: Network, efficiency: Efficiency):
    """Seconds to send `size` bytes to a neighbour, in the same island where `near` is true."""
    fast = size / (network.fast * efficiency.fast_link) + network.fast_latency
    slow = size / (network.slow * efficiency.slow_link) + network.slow_latency
    return np.where(near, fast, slow)
