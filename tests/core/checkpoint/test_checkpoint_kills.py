"""Saves that the system interrupts: a full disk, a kill, a death between two file operations."""

import errno
import os
import threading
from pathlib import Path

import pytest
from checkpoint_states import in_new_process, saved, small_state

from sparse_dataflow.files import manifest
from sparse_dataflow.files.errors import UserError


def test_a_full_disk_loses_nothing(tmp_path):
    """A file size limit makes the system refuse writes, as a full disk does."""
    output = in_new_process(
        """
        import os, resource, sys
        import checkpoint_states as t
        from absl import logging
        from sparse_dataflow.files.errors import UserError
        logging.set_verbosity(logging.INFO)
        folder = t.Path(sys.argv[1])
        checkpoints = t.saved(folder, [1, 2], keep=1)
        big = {"w": t.jax.random.normal(t.jax.random.key(0), (100_000,))}
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
        for step in (3, 4):
            assert checkpoints.save(step, big, {})
            try:
                checkpoints.wait() if step == 3 else checkpoints.save(5, big, {})
            except UserError as error:
                print("ERROR", error)
            else:
                raise SystemExit("the failure was not raised")
            checkpoints.wait()
            assert os.listdir(folder) == ["2"], os.listdir(folder)
        assert checkpoints.save(6, t.small_state(6), {"position": 6})
        checkpoints.wait()
        assert t.restored_step(folder) == 6
        """,
        tmp_path,
    )
    assert (
        f"ERROR The checkpoint of step 3 could not be written to {tmp_path} (File too large); "
        "the last finished one is step 2"
    ) in output
    assert "Traceback" not in output and "orbax/" not in output


@pytest.mark.parametrize("failing", ["rename", "manifest", "mkdir"])
def test_a_failed_save_prunes_nothing(tmp_path, monkeypatch, failing):
    checkpoints = saved(tmp_path, [1], keep=1)

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if failing == "manifest":
            patch.setattr(manifest, "write", refuse)
        else:
            patch.setattr(Path, failing, refuse)
        with pytest.raises(UserError, match=r"\(No space left on device\); .* is step 1"):
            checkpoints.save(2, small_state(2), {})
            checkpoints.wait()
    checkpoints.wait()  # Raised once.
    assert os.listdir(tmp_path) == ["1"]
    saved(tmp_path, [2], keep=1)
    assert os.listdir(tmp_path) == ["2"]


def test_a_save_whose_folder_was_replaced_meanwhile_is_not_finished(tmp_path, monkeypatch):
    """As a disk that is lost leaves the place where it was mounted: some files are not there."""
    checkpoints = saved(tmp_path / "here", [1])
    wait = checkpoints._orbax.wait_until_finished

    def lose():
        wait()
        if threading.current_thread().name != "finish-checkpoint":
            return
        (tmp_path / "here").rename(tmp_path / "away")
        (tmp_path / "here" / "2.saving" / "state").mkdir(parents=True)

    monkeypatch.setattr(checkpoints._orbax, "wait_until_finished", lose)
    with pytest.raises(UserError, match="step 2 could not be written"):
        checkpoints.save(2, small_state(2), {})
        checkpoints.wait()
    assert os.listdir(tmp_path / "here") == []


KILLS = """
import itertools, os, random, signal, sys, time
import checkpoint_states as t

folder, whole = t.Path(sys.argv[1]), t.Path(sys.argv[2])

def last_whole():
    return int(whole.read_text()) if whole.exists() else 0

def go_on(steps, last_event=None):
    "Checks that no finished save is lost, then saves; dies before file operation `last_event`."
    if last_event is not None:
        remaining = itertools.count(last_event, -1)

        def die(event, arguments):
            opens = event == "open" and str(folder) in str(arguments[0])
            changes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
            if (opens or changes) and next(remaining) == 0:
                os._exit(9)

        sys.addaudithook(die)
    checkpoints = t.Checkpoints(folder, keep=2, config=t.CONFIG)
    restored = checkpoints.restore(t.abstract(t.small_state(0)))
    step = 0
    if restored is not None:
        step = int(restored[0]["step"])
        t.assert_same_bits(restored[0], t.small_state(step))
    assert step >= last_whole(), (step, last_whole())
    for step in range(step + 1, step + 1 + steps):
        checkpoints.save(step, t.small_state(step), {"position": step})
        checkpoints.wait()
        temporary = whole.with_suffix(".new")
        temporary.write_text(str(step))
        temporary.replace(whole)

def in_a_child(act):
    child = os.fork()
    if child:
        return child
    code = 3
    try:
        act()
        code = 0
    except BaseException:
        import traceback
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
"""


@pytest.mark.slow
def test_kill_9_at_any_time_loses_no_finished_checkpoint(tmp_path):
    """Kills after a random time: at start, cleaning, restoring, writing, hashing and pruning."""
    output = in_new_process(
        KILLS
        + """
draw = random.Random(0)
kinds, longest = [], 0.9
for kill in range(100):
    if kill >= 10 and last_whole():
        break
    child = in_a_child(lambda: go_on(10**6))
    time.sleep(draw.uniform(0.1, longest))
    longest *= 1 if last_whole() else 1.3  # A busy machine needs longer for a save.
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), status
    kinds += [name.partition(".")[2] for name in os.listdir(folder)]
assert "damaged" not in kinds, kinds
t.restored_step(folder)
print("LAST", t.restored_step(folder), last_whole())
""",
        tmp_path / "checkpoints",
        tmp_path / "whole",
    )
    restored, recorded = map(int, output.split("LAST")[1].split())
    assert restored >= recorded > 0, output


def test_death_before_any_file_operation_loses_no_finished_checkpoint(tmp_path):
    """Dies before the n-th file operation of Python, for n over a whole save."""
    output = in_new_process(
        KILLS
        + """
deaths = 0
for event in itertools.count(0, 5):
    child = in_a_child(lambda: go_on(1, event))
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) == 0:
        break
    assert os.waitstatus_to_exitcode(status) == 9, status
    deaths += 1
assert not [name for name in os.listdir(folder) if "damaged" in name]
print("LAST", t.restored_step(folder), last_whole(), deaths)
""",
        tmp_path / "checkpoints",
        tmp_path / "whole",
    )
    restored, recorded, deaths = map(int, output.split("LAST")[1].split())
    assert restored >= recorded > 0 and deaths > 10, output
