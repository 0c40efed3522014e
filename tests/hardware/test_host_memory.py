"""Freed memory stays in the process with glibc; nothing changes elsewhere."""

import platform
import subprocess
import sys

import pytest

from sparse_dataflow.hardware import detect

# Runs in its own process, because malloc keeps its settings. Counts the page faults of touching
# 64 MiB a second time, after freeing them.
AGAIN = """
import ctypes, resource, sys
from sparse_dataflow.hardware.detect import keep_freed_memory
accepted = keep_freed_memory() if sys.argv[1] == "keep" else None
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = libc.memset.argtypes = None
faults = []
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory = ctypes.c_void_p(libc.malloc(2**26))
    libc.memset(memory, 1, ctypes.c_size_t(2**26))
    libc.free(memory)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(accepted, *faults)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_memory_is_used_again_without_page_faults():
    def start(how):
        command = [sys.executable, "-c", AGAIN, how]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    accepted, first, second = start("keep")
    assert accepted == "True"
    assert int(second) < int(first) / 4
    _, first, second = start("leave")  # Without the settings.
    assert int(second) > int(first) / 4


class Library:
    """A C library whose mallopt records its settings and returns `answer`."""

    def __init__(self, answer):
        self.settings = []
        self.mallopt = lambda *setting: self.settings.append(setting) or answer


@pytest.mark.parametrize("answer", [0, 1])
def test_all_settings_must_be_accepted(monkeypatch, answer):
    library = Library(answer)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(detect.ctypes, "CDLL", lambda name: library)
    assert detect.keep_freed_memory() is bool(answer)
    assert len(library.settings) == 4


def test_another_c_library_is_unchanged(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(detect.ctypes, "CDLL", lambda name: object())
    assert detect.keep_freed_memory() is False


def test_another_system_is_unchanged(monkeypatch):
    library = Library(1)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(detect.ctypes, "CDLL", lambda name: library)
    assert detect.keep_freed_memory() is False
    assert library.settings == []
