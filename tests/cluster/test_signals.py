"""Signals: one SIGTERM or several end with 75, a second SIGINT at once, whatever is going on."""

import signal
import subprocess
import sys
import textwrap
import time

import pytest
from marks import some

START = """
import atexit, hashlib, os, signal, sys, threading, time
from sparse_dataflow.cluster import signals
from sparse_dataflow.cluster.signals import cleaned_up, ended_by_signals, stop_on_signals
say = lambda text: print(text, flush=True)
atexit.register(time.sleep, 0.6)  # Python takes a while to end.

def long_call():
    say("ready")
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # No handler runs before it returns.

def swallow():
    class Swallowing:
        def __del__(self):
            say("ready")
            time.sleep(60)
    Swallowing()

def swallow_silently():
    try:
        say("ready")
        time.sleep(60)
    except BaseException:
        pass
"""

WAITS = """
with ended_by_signals():
    say("ready")
    time.sleep(60)
"""
TRAINS = """
with ended_by_signals():
    with cleaned_up(lambda: say("cleaned")), stop_on_signals(say) as stop:
        say("ready")
        while not stop():
            time.sleep(0.01)
        time.sleep(0.4)
        say("saved")
    time.sleep(0.3)
    sys.exit(75)
"""


def ended(code, *sent, seconds=30, each_ready=False):
    """Runs a script; sends it (seconds, signal) after its "ready", or after one each; returns
    (status, lines)."""
    script = subprocess.Popen(
        [sys.executable, "-c", START + textwrap.dedent(code)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    read = []

    def ready():
        while (line := script.stdout.readline()) != "ready\n":
            assert line or script.poll() is None, script.stderr.read()
            read.append(line)

    try:
        ready()
        for i, (pause, number) in enumerate(sent):
            if i and each_ready:
                ready()
            time.sleep(pause)
            if script.poll() is None:
                script.send_signal(number)
        out, errors = script.communicate(timeout=seconds)
    finally:
        script.kill()
    return script.returncode, [*"".join(read).splitlines(), *out.splitlines(), *errors.splitlines()]


TERM, HANGUP, INT = signal.SIGTERM, signal.SIGHUP, signal.SIGINT


@pytest.mark.parametrize(
    "pauses",
    [
        (0, 0, 0),
        *(
            pytest.param(pauses, marks=pytest.mark.slow)
            for pauses in ((0.05, 0.1), (0.1, 0.2, 0.2, 0.2))
        ),
    ],
)
@pytest.mark.parametrize("numbers", [pytest.param((TERM,), marks=pytest.mark.slow), (HANGUP, TERM)])
def test_several_signals_of_a_scheduler_end_with_75(pauses, numbers):
    sent = [(pause, numbers[i % len(numbers)]) for i, pause in enumerate(pauses)]
    status, _ = ended(WAITS, *sent)
    assert status == 75


@pytest.mark.parametrize(
    "pauses",
    [
        (0, 0),
        *(
            pytest.param(pauses, marks=pytest.mark.slow)
            for pauses in ((0.1, 0.2, 0.3, 0.3), (0.1, 0.8))
        ),
    ],
)
def test_several_signals_of_a_scheduler_in_training_end_with_75_after_saving(pauses):
    status, lines = ended(TRAINS, *((pause, TERM) for pause in pauses))
    assert status == 75 and lines[-2:] == ["saved", "cleaned"]
    assert sum("stopping: finishing this step" in line for line in lines) == 1


@pytest.mark.parametrize("call", ["swallow()", "swallow_silently()"])
@pytest.mark.parametrize("then", some(["time.sleep(60)", "long_call()"], "long_call()"))
def test_a_signal_whose_exception_was_swallowed_ends_with_75_all_the_same(call, then):
    code = f"""
    signals.UNWINDING_SECONDS = 1.0 if "silently" in "{call}" or "long" in "{then}" else 60
    with ended_by_signals(), cleaned_up(lambda: say("cleaned")):
        {call}
        {then}
    """
    status, lines = ended(code, (0.1, TERM))
    assert status == 75 and "cleaned" in lines, lines
    assert not any("gnored" in line for line in lines)


@pytest.mark.parametrize("call", some(["swallow()", "swallow_silently()"], "swallow_silently()"))
def test_a_training_does_not_begin_after_a_swallowed_signal(call):
    code = f"""
    with ended_by_signals():
        {call}
        with stop_on_signals(say):
            say("trains")
    """
    status, lines = ended(code, (0.1, TERM))
    assert status == 75 and "trains" not in lines


@pytest.mark.parametrize(
    "pauses", [(0.1, 0.1), pytest.param((0.3, 0.5, 0.1), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("block", ["with stop_on_signals(say):", "if True:"])
def test_a_second_ctrl_c_ends_a_long_call_at_once(block, pauses):
    code = f"""
    with ended_by_signals(), cleaned_up(lambda: say("cleaned")):
        {block}
            long_call()
    """
    status, lines = ended(code, *((pause, INT) for pause in pauses), seconds=20)
    assert status == 130 and "cleaned" in lines and "stopped at once" in lines
    assert any("stopping: finishing" in line for line in lines) == ("stop_on" in block)


LONG_STEP = """
import jax
x = jax.numpy.ones((256, 256))
loop = lambda x: jax.lax.fori_loop(0, 10**8, lambda i, x: jax.numpy.tanh(x @ x), x)
step = jax.jit(loop).lower(x).compile()
with ended_by_signals(), cleaned_up(lambda: say("cleaned")):
    with stop_on_signals(say, grace={grace}) as stop:
        say("ready")
        jax.block_until_ready(step(x))
"""


@pytest.mark.parametrize(
    ("grace", "sent", "status"),
    [
        (1000, [(0.3, INT), (0.3, INT)], 130),
        pytest.param(0.5, [(0.1, TERM)], 75, marks=pytest.mark.slow),
        pytest.param(0, [(0.1, HANGUP), (0.1, TERM), (0.1, TERM)], 75, marks=pytest.mark.slow),
        (0.5, [(0.1, INT), (0.1, TERM)], 75),
    ],
)
def test_a_step_of_minutes_does_not_keep_the_process(grace, sent, status):
    left, lines = ended(LONG_STEP.format(grace=grace), *sent, seconds=30)
    assert left == status and "cleaned" in lines and "Traceback" not in "".join(lines)
    assert sum("stopping: finishing this step" in line for line in lines) == 1
    if status == 75:
        assert f"no step ended within {grace:g} seconds" in lines[-1]


STEPS = """
with ended_by_signals():
    with stop_on_signals(say, grace={grace}) as stop:
        say("ready")
        while not stop():
            time.sleep({step})
        time.sleep({save})
        say("saved")
    sys.exit(75)
"""


@pytest.mark.parametrize(
    ("grace", "step", "save"), some([(1.5, 0.4, 0), (0.6, 0.1, 1.2), (0.5, 0.01, 1)], 0.6)
)
def test_a_run_saves_however_long_that_takes_if_a_step_ends_in_time(grace, step, save):
    code = STEPS.format(grace=grace, step=step, save=save)
    status, lines = ended(code, (0.1, TERM), (0.1, TERM))
    assert status == 75 and lines[-1] == "saved", lines


def test_a_second_training_has_its_own_seconds():
    code = """
    with ended_by_signals():
        with stop_on_signals(say, grace=0.1) as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop()
        with stop_on_signals(say, grace=1000) as stop:
            say("ready")
            time.sleep(0.5)
            say("not ended")
    """
    _, lines = ended(code)
    assert "not ended" in lines


def test_a_second_ctrl_c_ends_a_save_at_once():
    status, lines = ended(TRAINS.replace("0.4", "60"), (0.1, INT), (0.3, INT), seconds=20)
    assert status == 130 and "cleaned" in lines and "saved" not in lines


@pytest.mark.parametrize(
    "numbers",
    [
        (TERM, INT),
        *(
            pytest.param(numbers, marks=pytest.mark.slow)
            for numbers in ((INT, TERM), (TERM, INT, TERM))
        ),
    ],
)
def test_a_launcher_that_passes_on_what_the_terminal_sends_too_loses_nothing(numbers):
    status, lines = ended(TRAINS, *((0.1, number) for number in numbers))
    assert status == 75 and "saved" in lines


@pytest.mark.parametrize("late", [0, 0.3])  # Seconds; a busy machine wakes the thread so late.
def test_each_training_has_its_own_first_ctrl_c(late):
    code = f"""
    import select
    waits = select.select
    def wakes_late(*arguments):
        woken = waits(*arguments)
        time.sleep({late})
        return woken
    select.select = wakes_late
    with ended_by_signals():
        for _ in range(3):
            with stop_on_signals(say) as stop:
                say("ready")
                while not stop():
                    time.sleep(0.01)
                say("saved")
        sys.exit(3)
    """
    status, lines = ended(code, *[(0.1, INT)] * 3, each_ready=True)
    assert status == 3 and lines.count("saved") == 3


def test_a_clean_up_that_hangs_does_not_keep_the_process():
    code = """
    with ended_by_signals(), cleaned_up(lambda: time.sleep(600)):
        long_call()
    """
    assert ended(code, (0.1, INT), (0.2, INT), seconds=20)[0] == 130


def test_a_conversation_may_be_interrupted_again_and_again():
    code = """
    with ended_by_signals():
        say("ready")
        for _ in range(4):
            try:
                time.sleep(60)
            except KeyboardInterrupt:
                say("interrupted")
        sys.exit(3)
    """
    status, lines = ended(code, *[(0.2, INT)] * 4)
    assert status == 3 and lines.count("interrupted") == 4


def test_the_signals_of_a_forked_child_are_its_own():
    code = """
    with ended_by_signals():
        for _ in range(3):
            if (child := os.fork()) == 0:
                signal.signal(signal.SIGINT, lambda *_: os._exit(0))
                time.sleep(60)
            time.sleep(0.1)
            os.kill(child, signal.SIGINT)
            os.waitpid(child, 0)
        time.sleep(0.3)
        say("ready")
        sys.exit(3)
    """
    assert ended(code)[0] == 3
