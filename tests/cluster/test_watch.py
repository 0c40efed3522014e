"""Silent and stalled processes are named; a lost one ends the run."""

import dataclasses
import json
import signal
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from marks import some
from ports import free_port

from sparse_dataflow.cluster import watch
from sparse_dataflow.cluster.watch import Status, Watch
from sparse_dataflow.core.training.clock import Clock

STEPPING = Status("a", "step", "step 7 of sparse", idle=100.0, longest_step=2.0)


def replaced(**changes):
    return dataclasses.replace(STEPPING, **changes)


def test_the_process_that_others_wait_for_is_named_with_host_and_activity():
    statuses = {0: STEPPING, 1: replaced(host="b", activity="data"), 2: STEPPING}
    text = watch.describe(statuses, 30.0)
    assert "process 1 on b is in step 7 of sparse, activity data" in text
    assert "process 0" not in text and "process 2" not in text


def test_all_are_named_if_all_wait_in_a_step():
    assert watch.stalled({0: STEPPING, 1: STEPPING}, 30.0) == [0, 1]


@pytest.mark.parametrize(
    "other",
    [
        replaced(idle=1.0),  # it progresses
        replaced(activity="compile"),
        replaced(activity="report"),
        replaced(activity="start"),
        replaced(longest_step=0.0),  # before its first step
        replaced(longest_step=11.0),  # its steps take as long
    ],
)
def test_no_stall_if_a_process_has_a_reason(other):
    assert watch.describe({0: STEPPING, 1: other}, 30.0) == ""


def test_silence_is_reported_before_a_process_is_lost():
    quiet = replaced(host="b", activity="checkpoint", silent=31.0)
    statuses = {0: replaced(idle=0.0), 1: quiet}
    assert watch.describe(statuses, 30.0) == (
        "process 1 on b has been silent for 31 s, last in step 7 of sparse, activity checkpoint"
    )
    assert watch.lost(statuses, 30.0) == []
    assert watch.lost({**statuses, 1: replaced(silent=301.0)}, 30.0) == [1]


@given(
    st.dictionaries(
        st.sampled_from([field.name for field in dataclasses.fields(Status)]) | st.text(max_size=3),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.none()),
    )
)
def test_any_message_is_a_valid_status(message):
    status = Status.from_message(json.loads(json.dumps(message)), 5.0)
    assert status.silent == 5.0
    assert isinstance(watch.describe({0: STEPPING, 1: status}, 1.0), str)


def test_a_single_process_reports_its_own_stall():
    clock, lines, changed = Clock(), [], threading.Condition()

    def say(text):
        with changed:
            lines.append(text)
            changed.notify()

    clock.record_step(0.001)
    watching = Watch(clock, 1.0, say=say)
    with clock.during("data"), changed:
        assert changed.wait_for(lambda: any("activity data" in text for text in lines), 600)
    go_on = threading.Event()

    def move():
        while not go_on.wait(0.01):
            with clock.during("step"):
                pass

    thread = threading.Thread(target=move)
    thread.start()
    with changed:
        assert changed.wait_for(lambda: "going on after the stall" in lines, 600)
    go_on.set()
    thread.join()
    watching.stop()


MEMBER = """
import sys, threading, time
from sparse_dataflow.cluster import rendezvous, watch
from sparse_dataflow.cluster.watch import Clock
from sparse_dataflow.cluster.watch import Watch

number, port, heartbeat = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
watch.LOST_AFTER = float(sys.argv[4])
group = rendezvous.meet(f"127.0.0.1:{port}", 3, number, {}, 600.0)
clock = Clock()
clock.step = "step 5 of sparse"
with clock.during("data"):
    Watch(clock, heartbeat, group, say=lambda text: print(text, flush=True))
    print("watching", flush=True)
    while True:
        clock.progress += 1
        time.sleep(0.01)
"""


class Members:
    """Three processes that watch each other, by number."""

    def __init__(self, heartbeat, lost_after):
        port = str(free_port())
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", MEMBER, str(n), port, str(heartbeat), str(lost_after)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for n in range(3)
        ]
        for number in range(3):
            self.until(number, "watching")

    def until(self, number, words):
        """Returns the first output line of a process that contains the words."""
        for line in self.processes[number].stdout:
            if words in line:
                return line
        raise AssertionError(f"process {number} ended without saying {words!r}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("stopped", some([0, 2], 2))
def test_a_stopped_process_is_named_in_every_log_and_may_go_on(stopped):
    others = [n for n in range(3) if n != stopped]
    with Members(heartbeat=2.0, lost_after=10_000) as members:
        members.processes[stopped].send_signal(signal.SIGSTOP)
        for number in others:
            line = members.until(number, f"process {stopped} on ")
            assert "has been silent for" in line and "in step 5 of sparse, activity data" in line
        members.processes[stopped].send_signal(signal.SIGCONT)
        for number in others:
            members.until(number, "going on after the stall")
        assert all(process.poll() is None for process in members.processes)


@pytest.mark.slow
def test_a_process_that_stays_silent_ends_all_with_the_status_to_start_again():
    with Members(heartbeat=0.3, lost_after=10) as members:
        members.processes[1].send_signal(signal.SIGSTOP)
        for number in (0, 2):
            members.until(number, "error: process")
            assert members.processes[number].wait(600) == 75
        members.processes[1].send_signal(signal.SIGCONT)
        assert members.processes[1].wait(600) == 75
