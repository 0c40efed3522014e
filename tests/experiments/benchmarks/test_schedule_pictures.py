import re
from xml.etree import ElementTree

import numpy as np
import pytest

from experiments.benchmarks.schedule_pictures import ACTIONS, MAX_TICKS, schedule_picture
from experiments.benchmarks.schedules_page import schedules_page
from sparse_dataflow.pipeline import action_tables


def cells(picture, colour):
    """Returns the left edges [n] of the cells in a colour, without the legend."""
    lefts = []
    for element in ElementTree.fromstring(picture).iter("path"):
        if f"fill: var(--{colour})" in element.get("style", ""):
            points = re.findall(r"(-?[\d.]+) (-?[\d.]+)", element.get("d"))
            lefts.append(min(float(x) for x, _ in points))
    return lefts[:-1]


@pytest.mark.parametrize("recompute", [False, True])
def test_every_action_is_a_cell_at_its_tick(recompute):
    schedule = action_tables.make("interleaved", 2, 4, 2, recompute)
    picture = schedule_picture(schedule, "key")
    for category, action in enumerate(ACTIONS):
        lefts = cells(picture, f"category{category}")
        ticks = np.nonzero(schedule.action == action)[1]
        assert len(lefts) == len(ticks)
        if len(ticks):
            width = (max(lefts) - min(lefts)) / (max(ticks) - min(ticks))
            start = min(lefts) - width * min(ticks)
            np.testing.assert_allclose(lefts, start + width * ticks, atol=0.1)
    numbers = [element.text for element in ElementTree.fromstring(picture).iter("text")]
    assert numbers.count("4") == 2 * 2 * (3 + recompute)
    assert "2 stages of 2 chunks each, 4 micro-batches" in picture


def test_the_picture_of_a_long_schedule_is_truncated():
    schedule = action_tables.make("1f1b", 2, 400)
    picture = schedule_picture(schedule, "key")
    assert schedule.ticks > MAX_TICKS
    width = float(ElementTree.fromstring(picture).get("width"))
    assert width < 1200 and f"{schedule.ticks} ticks" in picture


def test_the_page_has_all_pictures_and_needs_no_network():
    samples = [action_tables.make(name, 2, 4) for name in action_tables.RULES]
    page = schedules_page(samples)
    for schedule in samples:
        assert f"{schedule.name}: 2 stages, 4 micro-batches" in page
    assert page.count("<svg") == len(samples) and "--category0: #332288" in page
    assert not re.search(r"(src|href)=.?http|url\(http|<script", page)
