"""The reader of final schedules, on the recorded text of a small kernel (v5e, libtpu 0.0.52).

The kernel has three grid steps.  Step i multiplies x [16, 128] by `count[i]` blocks [128, 128] and
copies a block from HBM only where its slot, in a table of four a step, is not negative.
"""

import dataclasses
import pathlib
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.benchmarks.schedules import schedule

TEXT = (pathlib.Path(__file__).parent / "table_kernel_v5e_final_bundles.txt").read_text()
STEPS, ENTRIES, BLOCK_BYTES = 3, 4, 128 * 128 * 2

tables = st.tuples(
    st.lists(st.integers(0, ENTRIES), min_size=STEPS, max_size=STEPS),
    st.lists(st.integers(-1, 7), min_size=STEPS * ENTRIES, max_size=STEPS * ENTRIES),
)


def used(count, slots):
    """The slots that the kernel reads."""
    return np.concatenate([slots[ENTRIES * i : ENTRIES * i + n] for i, n in enumerate(count)])


@given(tables)
def test_cycles_follow_the_tables(drawn):
    count, slots = map(np.array, drawn)
    # Addresses of the text: 0x0-0xa once; 0xb-0x1b and 0x4c-0x57 in every iteration (the pipeline
    # has two more than steps); 0x1c-0x28 and 0x46-0x4b in every step; 0x29-0x45 per block.
    expected = 11 + (STEPS + 2) * (17 + 12) + STEPS * (13 + 6) + 29 * count.sum() + 7
    assert schedule.read_schedule(TEXT, [count, slots]).cycles == expected


@given(tables)
def test_copies_follow_the_tables(drawn):
    count, slots = map(np.array, drawn)
    read = schedule.read_schedule(TEXT, [count, slots])
    copied = (used(count, slots) >= 0).sum()
    assert read.copies == 1 + STEPS + copied  # x once, a window of y each step
    assert read.hbm_bytes == 16 * 128 * 2 + STEPS * 16 * 128 * 4 + copied * BLOCK_BYTES


def test_the_loop_nest_is_found():
    read = schedule.read_schedule(TEXT, [np.array([2, 0, 3]), np.zeros(12, int)])
    outer, inner = read.loops
    assert (outer.first, outer.last, outer.depth) == (0xB, 0x57, 0)
    assert (inner.first, inner.last, inner.depth) == (0x29, 0x45, 1)
    assert (outer.entries, outer.iterations) == (1, STEPS + 2)
    assert (inner.entries, inner.iterations, inner.cycles) == (2, 5, 5 * 29)
    assert read.products == inner.products == outer.products == 5
    assert "0x29-0x45" in read.table()


def test_cores_share_nothing_but_the_text():
    operands = [np.array([1, 1, 1]), np.zeros(12, int)]
    single, double = (schedule.read_schedule(TEXT, operands, cores) for cores in (1, 2))
    assert double.hbm_bytes == 2 * single.hbm_bytes
    assert dataclasses.replace(double, hbm_bytes=0, copies=0) == dataclasses.replace(
        single, hbm_bytes=0, copies=0
    )


def test_spills_are_stores_to_spill_slots():
    store = "  %9_v = vst [vmem:[#allocation77_spill] sm:$0xff] /*vst_source=*/%v1_v1 ;;  %p28_p7"
    text = TEXT.replace("  %p28_p7", store, 1)
    operands = [np.zeros(3, int), np.zeros(12, int)]
    assert schedule.read_schedule(text, operands).spills == 1
    assert schedule.read_schedule(TEXT, operands).spills == 0


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("", "", "not among the operands"),
        ("scmp.le.s32.totalorder %s633_s15", "sfrobnicate.s32 %s633_s15", "sfrobnicate"),
        ("$region24", "$region99", "known target"),
        ("   0x5   :", "   0x7   :", "follows"),
        ("%s134_s18 = sadd.s32 1, ", "%s134_s18 = sadd.s32 0, ", "no end"),
    ],
)
def test_an_unknown_text_is_refused_in_words(old, new, words):
    assert not old or TEXT.count(old) == 1
    operands = [] if not old else [np.ones(3, int), np.zeros(12, int)]
    with pytest.raises(schedule.ScheduleError, match=words):
        schedule.read_schedule(TEXT.replace(old, new) if old else TEXT, operands, limit=1000)


def test_no_text_is_refused():
    with pytest.raises(schedule.ScheduleError, match="no bundles"):
        schedule.read_schedule("")


def test_dumps_are_found_by_name(tmp_path):
    for name in ("17-f.1-01-final_bundles.txt", "17-f.1-00-schedule-analysis_final_bundles.txt"):
        (tmp_path / name).write_text(TEXT)
    assert list(schedule.kernel_dumps(tmp_path)) == ["f.1"]
    assert schedule.kernel_dumps(tmp_path, "other") == {}
    assert re.search(r"--xla_jf_dump_to=here ", schedule.DUMP_FLAGS.format(folder="here"))


def test_a_block_takes_at_least_the_time_of_its_busiest_unit():
    operands = [np.array([4, 4, 4]), np.zeros(12, int)]
    bundles = schedule.read_schedule(TEXT, operands).cycles
    for cycles in (16, 29, 40):  # a block of 29 bundles with one vmatmul
        read = schedule.read_schedule(TEXT, operands, product_cycles=cycles)
        assert read.cycles == bundles + 12 * max(0, cycles - 29)
