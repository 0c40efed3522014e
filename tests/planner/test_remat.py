"""The choice of kept, recomputed and offloaded blocks against every plan, and cases by hand."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_dataflow.core.config import remat as texts
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.planner import remat
from sparse_dataflow.planner.remat import BlockCosts

GIB = 2**30


def block(layers=8, transfer=1.0, copied=0.0, fixed=10.0, forward=1.0):
    return BlockCosts(
        layers=layers,
        forward=forward,
        backward=2.0,
        recompute={"none": 0.0, "keep": 0.25, "full": 1.0, "offload": 0.25},
        fixed=fixed,
        saved={"none": 8.0, "keep": 4.0, "full": 1.0, "offload": 0.0},
        offloaded=4.0,
        transfer=transfer,
        copied=copied,
    )


@st.composite
def costs(draw, layers):
    number = lambda most: draw(st.floats(0, most))  # noqa: E731
    saved = sorted(number(100) for _ in range(3))
    recompute = sorted(number(5) for _ in range(2))
    return BlockCosts(
        layers=layers,
        forward=number(5),
        backward=number(10),
        recompute=dict(zip(texts.KINDS, (0.0, *recompute, recompute[0]))),
        fixed=number(200),
        saved=dict(zip(texts.KINDS, (*reversed(saved), 0.0))),
        offloaded=saved[1],
        transfer=draw(st.none() | st.floats(0.001, 20)),
        copied=number(50),
    )


@settings(deadline=None, max_examples=30)
@given(st.data(), st.integers(1, 12), st.floats(1, 1500), st.floats(0, 1500))
def test_no_uniform_plan_that_fits_is_faster_and_no_limit_is_exceeded(data, layers, limit, host):
    models = [data.draw(costs(layers)) for _ in range(data.draw(st.integers(1, 2)))]
    kinds = [k for k in texts.KINDS if k != "offload" or all(m.transfer for m in models)]
    fitting = [
        plan
        for plan in (remat.uniform(models, kind) for kind in kinds)
        if plan.device_bytes <= limit and plan.host_bytes <= host
    ]
    try:
        plan = remat.choose(models, limit, host)
    except UserError:
        assert not fitting
        return
    assert plan.device_bytes <= limit and plan.host_bytes <= host
    assert len(plan.kinds) == layers == len(texts.kinds(plan.text, layers))
    assert all(plan.seconds <= each.seconds * (1 + 1e-12) for each in fitting)
    assert remat.estimate(models, texts.loops(plan.text, layers)) == plan


def test_no_plan_of_few_blocks_in_one_loop_is_faster():
    """Every order of every kind, where one loop may have all blocks: 4**4 plans."""
    model = block(layers=4, transfer=2.0)
    every = [
        remat.estimate([model], ((kinds, 1),)) for kinds in itertools.product(texts.KINDS, repeat=4)
    ]
    for limit in range(12, 44):
        best = min((p.seconds for p in every if p.device_bytes <= limit), default=None)
        if best is not None:
            assert remat.choose([model], limit).seconds <= best


def test_transfers_overlap_with_the_blocks_of_their_own_iteration():
    """A copy of 3 s: one block computes 1 s forward, 2.25 s backward; three compute 3 and 6.25."""
    alone = remat.estimate([block(transfer=3.0)], ((("offload",), 6),))
    assert alone.seconds == pytest.approx(6 * (0.25 + 2 + 0.75))
    spread = remat.estimate([block(transfer=3.0)], ((("offload", "none", "none"), 2),))
    assert spread.seconds == pytest.approx(2 * 0.25)
    assert spread.device_bytes == 10 + 2 * 16 + 4 and spread.host_bytes == 8


def test_a_fast_link_offloads_and_a_slow_link_recomputes():
    budget = 10 + 8 * 2.5
    assert "offload" in remat.choose([block(transfer=0.01)], budget).kinds
    for transfer in (100.0, None):
        kinds = remat.choose([block(transfer=transfer)], budget).kinds
        assert "offload" not in kinds and "full" in kinds


def test_two_loops_over_the_depth_pay_for_their_copy_of_the_parameters():
    (whole,) = [remat.estimate([block(copied=7.0)], ((("full", "none"), 4),))]
    split = remat.estimate([block(copied=7.0)], ((("full",), 4), (("none",), 4)))
    assert split.device_bytes - whole.device_bytes == 7


def test_a_limit_that_nothing_meets_names_the_nearest_that_is_met():
    model = block(fixed=2.341 * GIB)
    with pytest.raises(UserError, match=r"nearest feasible limit, 2\.35GiB") as refused:
        remat.choose([model], GIB)
    named = float(re.search(r"limit, ([\d.]+)GiB", str(refused.value))[1])
    assert remat.choose([model], named * GIB).device_bytes <= named * GIB


@given(st.data(), st.integers(1, 3), st.integers(1, 3))
def test_loops_of_any_part_have_its_kinds(data, first, second):
    pattern = st.lists(st.sampled_from(texts.KINDS), min_size=1, max_size=4).map(tuple)
    terms = ((data.draw(pattern), first), (data.draw(pattern), second))
    kinds = tuple(k for pattern, repeats in terms for k in pattern * repeats)
    text, layers = texts.text(terms), len(kinds)
    assert texts.kinds(text, layers) == kinds
    start = data.draw(st.integers(0, layers - 1))
    stop = data.draw(st.integers(start + 1, layers))
    loops = texts.loops(text, layers, range(start, stop))
    assert tuple(k for p, repeats in loops for k in p * repeats) == kinds[start:stop]
    assert text in texts.KINDS or texts.loops(text, layers) == terms


@pytest.mark.parametrize(
    "text", ["", "kept", "full:0", "full:", "none:2,", "full+some:2", "3:full"]
)
def test_texts_that_are_not_legal_name_what_is(text):
    with pytest.raises(UserError, match=r"Legal: none, keep, full, offload, or counts"):
        texts.terms(text)


def test_counts_that_are_not_the_models_name_it():
    with pytest.raises(UserError, match=r"has 5 blocks, and the model 6; .*add up to 6"):
        texts.kinds("full:2,none:3", 6)
    with pytest.raises(UserError, match="pattern of 9 blocks; legal: 1 to 8"):
        texts.terms("+".join(["full"] * 9) + ":1")
