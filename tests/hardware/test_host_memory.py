"""Freed memory stays in the process where the C library is glibc; nothing happens elsewhere."""

import platform
import subprocess
import sys

import pytest

from sparse_dataflow.hardware import host_memory

# In a process of its own, because malloc stays as it is set.  Counts the page faults of touching
# 64 MiB a second time, after they were freed.
AGAIN = """
import ctypes, resource, sys
from sparse_dataflow.hardware.host_memory import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "keep" else None
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
print(kept, *faults)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_memory_is_used_again_without_page_faults():
    def start(how):
        command = [sys.executable, "-c", AGAIN, how]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    kept, first, second = start("keep")
    assert kept == "True"
    assert int(second) < int(first) / 4
    _, first, second = start("leave")  # What the settings change.
    assert int(second) > int(first) / 4


class Library:
    """A C library whose mallopt notes what it is told and answers `answer`."""

    def __init__(self, answer):
        self.told = []
        self.mallopt = lambda *setting: self.told.append(setting) or answer


@pytest.mark.parametrize("answer", [0, 1])
def test_all_settings_are_made_and_must_be_taken(monkeypatch, answer):
    library = Library(answer)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda name: library)
    assert host_memory.keep_freed_memory() is bool(answer)
    assert len(library.told) == 4


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda name: object())
    assert host_memory.keep_freed_memory() is False


def test_another_system_is_left_alone(monkeypatch):
    library = Library(1)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda name: library)
    assert host_memory.keep_freed_memory() is False
    assert library.told == []
