"""A run writes its folder and the cache, and nothing else, as containers expect."""

import re
import shutil
import subprocess
import sys

import pytest
from main_job import PICO

CREATES = re.compile(
    r'open(?:at)?\(.*?"(?P<opened>[^"]+)".*?O_CREAT|'
    r'(?:mkdir(?:at)?|mknod(?:at)?|creat)\(.*?"(?P<made>[^"]+)".*= 0|'
    r'(?:rename(?:at2?)?|link(?:at)?|symlink(?:at)?)\(.*".*?".*"(?P<moved>[^"]+)".*= 0'
)
CALLS = (
    "open,openat,creat,mkdir,mkdirat,mknod,mknodat,rename,renameat,renameat2,link,linkat,symlink,"
    "symlinkat"
)
SYSTEM = ("/dev/", "/proc/", "/sys/")


def test_the_calls_that_create_files_are_found():
    lines = (
        '7 openat(AT_FDCWD, "/a/b", O_WRONLY|O_CREAT|O_TRUNC, 0666) = 3',
        '7 mkdir("/a/c", 0777) = 0',
        '7 rename("/a/x", "/a/d") = 0',
        '7 openat(AT_FDCWD, "/a/e", O_RDONLY) = 3',
        '7 mkdir("/a/f", 0777) = -1 EEXIST (File exists)',
    )
    assert created("\n".join(lines)) == {"/a/b", "/a/c", "/a/d"}


def created(trace):
    """Paths that the calls of a trace created."""
    found = (CREATES.search(line) for line in trace.splitlines())
    return {next(filter(None, match.groups())) for match in found if match}


@pytest.mark.slow
def test_nothing_is_written_outside_the_run_folder_and_the_cache(job, tmp_path):
    """Home, the folder of temporary files and the current folder stay empty; where strace is, every
    file that the run creates is listed."""
    places = {name: tmp_path / name for name in ("home", "temporary", "current", "cache", "runs")}
    for place in places.values():
        place.mkdir()
    trace = tmp_path / "trace"
    strace = [shutil.which("strace"), "-f", "-qq", "-e", f"trace={CALLS}", "-o", str(trace)]
    environment = {n: v for n, v in job.environment.items() if not n.startswith("JAX_COMPILATION")}
    environment |= {"HOME": str(places["home"]), "XDG_CACHE_HOME": str(places["cache"])}
    environment |= {"TMPDIR": str(places["temporary"]), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [
            *(strace if strace[0] else []),
            *(sys.executable, "-m", "experiments.gpt13b_sparse", *PICO, "--steps=2", "--notwin"),
            *(f"--corpus={job.corpus}", f"--out={places['runs'] / 'run'}"),
        ],
        env=environment,
        cwd=places["current"],
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr
    assert (places["runs"] / "run" / "report.html").exists() and list(places["cache"].iterdir())
    for name in ("home", "temporary", "current"):
        assert not list(places[name].rglob("*")), name
    if strace[0]:
        legal = (str(places["runs"]), str(places["cache"]), *SYSTEM)
        paths = created(trace.read_text(errors="replace"))
        assert len(paths) > 20
        assert not [path for path in paths if path.startswith("/") and not path.startswith(legal)]
