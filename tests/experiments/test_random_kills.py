"""Kills at random moments of one training, in a row, which ends at the bits of an undisturbed one.

make faults ARGS="--kills=200 -k random_kills"
"""

import random
import re
import signal
import time

import pytest
from fault_records import RANDOM_KILLS, Record
from main_job import checkpoint_steps
from pairs import READ, STEP, UPDATE, Pair, same

STEPS_A_KILL = 2
"""About as many as the training comes nearer to its end with each kill."""

NEAR = 32
"""Steps from the end within which a kill comes before the next checkpoint, so no nearer."""

SAVING = r"/checkpoints/\d+\.(saving|pruning)"


def a_kill(draw, pair, steps, processes):
    """(kind, process that is killed, seconds until then or None, options of its start)."""
    made, killed = max(pair.steps(), default=0), draw.randrange(processes)
    saved = pair.folder.exists() and checkpoint_steps(pair.folder, "sparse")
    if made > steps - NEAR:
        kinds = ["steps", "restores"]
    else:
        # Process 0 alone renames and removes files, and the others' arrays are no work of Python.
        files = [] if killed else ["saves", "saves", "files"]
        kinds = ["steps", "evolutions", "moments", *files] + ["restores"] * bool(saved)
    kind = draw.choice(kinds)
    seconds = draw.uniform(1, 10) if kind == "moments" else None
    inside = re.escape(str(pair.folder)) + "/sparse/"
    last = 3 if made > steps - NEAR else 7
    return {
        "steps": (kind, killed, None, {"calls": [(STEP, draw.randint(1, last), "SIGKILL")]}),
        "evolutions": (kind, killed, None, {"calls": [(UPDATE, draw.randint(1, 2), "SIGKILL")]}),
        "restores": (kind, killed, None, {"calls": [(READ, 1, "SIGKILL")]}),
        "saves": (kind, killed, None, {"events": [(SAVING, draw.randint(1, 40), "SIGKILL")]}),
        "files": (kind, killed, None, {"events": [(inside, draw.randint(1, 70), "SIGKILL")]}),
        "moments": (kind, killed, seconds, {}),
    }[kind]


@pytest.mark.nightly
@pytest.mark.parametrize("processes", [1, 2])
def test_random_kills_in_a_row_end_at_the_same_bits(job, tmp_path, pytestconfig, processes):
    """A quarter of the kills are of one of two processes; the other then ends with status 75."""
    total = pytestconfig.getoption("--kills")
    kills = total // 4 if processes == 2 else total - total // 4
    steps, record = STEPS_A_KILL * kills + 2 * NEAR, Record(RANDOM_KILLS[processes])
    with Pair(job, tmp_path / "whole", steps) as whole:
        statuses, _, texts = whole.end(whole.start(processes=processes))
    assert statuses == [0] * processes, texts
    draw, began, counts = random.Random(processes), time.monotonic(), {}
    with Pair(job, tmp_path / "run", steps) as pair:
        for number in range(kills):
            kind, killed, seconds, happening = a_kill(draw, pair, steps, processes)
            started = pair.start(processes=processes, **{f"at_{killed}": happening})
            if seconds:
                time.sleep(seconds)
                started[killed].signal(signal.SIGKILL)
            statuses, _, texts = pair.end(started)
            expected = [-signal.SIGKILL if n == killed else 75 for n in range(processes)]
            assert statuses == expected, (number, kind, killed, statuses, texts)
            counts[kind] = counts.get(kind, 0) + 1
            print(number + 1, kind, killed, max(pair.steps(), default=0), flush=True)
        seconds = (time.monotonic() - began) / kills
        statuses, _, texts = pair.end(pair.start(processes=processes))
    assert statuses == [0] * processes, texts
    words = ", ".join(f"{counts[kind]} {kind}" for kind in sorted(counts))
    record.note(
        f"-9, {kills} times: {words}", None, None, seconds, same(pair.folder, whole.folder, steps)
    )
