"""Parsers of printed quantities and drawn shapes, to compare the page with the data."""

import re
from xml.etree import ElementTree

import numpy as np

SCALES = {
    "": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18, "Z": 1e21, "Y": 1e24,
    "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50,
    "µs": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "%": 0.01,
}  # fmt: skip


def parse(text: str) -> float:
    """Returns the value of a printed quantity."""
    text = text.replace("FLOP", "").replace("−", "-").replace(",", "")
    terms = re.findall(r"(-?[\d.]+)\s*([A-Za-zµ%]*)", text)
    return sum(float(number) * SCALES[unit] for number, unit in terms)


def paths(picture: str, colour: str) -> list[np.ndarray]:
    """Returns the corners [n, 2] of every sub-path filled with a colour."""
    corners = []
    for element in ElementTree.fromstring(picture).iter("path"):
        if f"fill: var(--{colour})" in element.get("style", ""):
            for sub_path in element.get("d").split("M")[1:]:
                numbers = [float(n) for n in re.findall(r"-?[\d.]+", sub_path)]
                corners.append(np.array(numbers).reshape(-1, 2))
    return corners
