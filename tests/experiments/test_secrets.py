"""A run that is given secrets by mistake keeps them out of all that it prints and writes."""

import functools
import re

import pytest
from main_job import PICO

SECRETS = {
    "HF_TOKEN": "hf_QzWvSecretOne",
    "MY_API_KEY": "QzWvSecretTwo",
    "DB_PASSWORD": "QzWvSecret3",
}


def found_in(folder):
    """Files below with a piece of a secret in them."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [path for path in files if re.search(rb"QzWv|hunter2222", path.read_bytes())]


@pytest.mark.slow
def test_no_secret_reaches_the_run_folder_or_the_terminal(job, tmp_path):
    start = functools.partial(job.start, environment=SECRETS, whole=True)
    flags = *PICO, "--steps=2", "--notwin", f"--corpus={job.corpus}"
    run = start(*flags, f"--out={tmp_path / 'run'}", log=tmp_path / "run.log")
    assert run.wait() == 0, run.text
    # Of no use to one process, and stored with all other settings.
    stored = start(
        *flags,
        f"--out={tmp_path / 'stored'}",
        "--set=parallel.coordinator=https://me:hunter2222@host:1?token=QzWvSecretOne",
        "--set=parallel.processes=1",
        "--set=parallel.process=0",
        log=tmp_path / "stored.log",
    )
    assert stored.wait() == 2 and "parallel.coordinator holds a password" in stored.text
    corpus = "--corpus=https://me:hunter2222@host/x?api_key=QzWvSecretTwo"
    refused = start(corpus, log=tmp_path / "refused.log")
    assert refused.wait() == 2
    assert "***" in refused.text
    assert found_in(tmp_path) == []
