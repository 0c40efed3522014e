"""What takes long before the first step is said, and can be interrupted."""

import gzip
import signal
import socket

import pytest
from main_job import PICO
from pairs import until


def test_a_corpus_of_blank_lines_without_end_says_what_it_waits_for(job, tmp_path):
    """A million bytes of it are a billion lines."""
    corpus = tmp_path / "blank.jsonl.gz"
    corpus.write_bytes(gzip.compress(b"\n" * 10**7) * 100)
    run = job.start(*PICO, "--steps=2", f"--corpus={corpus}", f"--out={tmp_path / 'run'}")
    assert_said_and_ended(run, f"still reading {corpus} after ")


@pytest.fixture
def silent_endpoint():
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_hub_that_does_not_answer_is_named(job, tmp_path, silent_endpoint):
    environment = {"HF_ENDPOINT": silent_endpoint, "HF_HOME": str(tmp_path / "home")}
    flags = [*PICO, "--steps=2", "--corpus=hf:owner/name", f"--out={tmp_path / 'run'}"]
    run = job.start(*flags, environment=environment)
    assert_said_and_ended(run, "still listing hf:owner/name on the hub after ")


def assert_said_and_ended(run, line):
    until(lambda: line in run.stderr, [run])
    assert line in run.stderr, run.stderr
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.stderr
    assert "Traceback" not in run.stderr
