"""Information is no warning, and is printed once, by the package or by the program's logging."""

import subprocess
import sys

import pytest

HEAD = "import logging, sparse_dataflow.files.errors;log = logging.getLogger('sparse_dataflow.x');"


def printed(code):
    done = subprocess.run(
        [sys.executable, "-c", HEAD + code + "log.info('reading 5%%'); log.warning('late')"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    "code, lines",
    [
        ("", ["reading 5%", "warning: late"]),
        ("logging.warning('by accident');",
         ["WARNING:root:by accident", "reading 5%", "warning: late"]),
        ("logging.basicConfig(format='<%(message)s>', level='INFO');", ["<reading 5%>", "<late>"]),
        ("logging.getLogger('sparse_dataflow').setLevel('WARNING');", ["warning: late"]),
        ("from sparse_dataflow.files import output; output.be_quiet();", ["warning: late"]),
    ],
)  # fmt: skip
def test_each_line_is_printed_once(code, lines):
    text = [line.replace("%%", "%") for line in printed(code)]
    assert text == lines
