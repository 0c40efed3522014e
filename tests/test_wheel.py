"""The wheel has every file of package and experiments; `make package` installs and runs it."""

import pathlib
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("sparse_dataflow", "experiments")
BUILD_FILES = ("setup.cfg", "setup.py", "pyproject.toml", "README.md")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy because the build creates folders in its source."""
    copy = tmp_path_factory.mktemp("source")
    files = [p for p in ROOT.iterdir() if p.name in BUILD_FILES]
    files += [ROOT / "LICENSE", *sources()]
    for path in files:
        target = copy / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    out = tmp_path_factory.mktemp("wheel")
    command = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


def sources():
    """Yields every file of the packages except caches and benchmark results."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*")):
            if path.is_file() and not {"__pycache__", "results"} & {*path.relative_to(ROOT).parts}:
                yield path


def test_the_wheel_has_exactly_the_files_of_the_packages(wheel):
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {str(path.relative_to(ROOT)) for path in sources()}
    inside = {f"sparse_dataflow/{name}" for name in expected if name.startswith("experiments/")}
    assert files == {name for name in expected if not name.startswith("experiments/")} | inside
