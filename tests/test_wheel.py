"""The wheel has every file of package and experiments, and works without the source tree."""

import os
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


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A function that runs Python with only the installed wheel and returns its output."""
    folder = tmp_path_factory.mktemp("site")
    options = ["--no-deps", "--no-index", "--quiet", "--no-compile", f"--target={folder}"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, str(wheel)], check=True, timeout=600
    )
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "JAX_PLATFORMS": "cpu",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }

    def run(*command, cwd):
        done = subprocess.run(
            [sys.executable, "-P", *command],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run.folder = folder
    return run


SMALL = ("-m", "sparse_dataflow", "train", "--scale=pico", "--block=16")


@pytest.mark.slow
def test_the_installed_wheel_starts_and_describes_a_plan(installed, tmp_path):
    probe = "import sparse_dataflow as s; print(s.__file__)"
    assert installed("-c", probe, cwd=tmp_path).startswith(str(installed.folder))
    assert not (installed.folder / "experiments").exists()
    script = [str(installed.folder / "bin" / "sparse-dataflow"), "train", "--help"]
    assert installed(*script, cwd=tmp_path).startswith("usage: sparse-dataflow train [")
    out = installed(*SMALL, "--mesh=fsdp:2,tensor:2", "--describe", cwd=tmp_path)
    assert "4 chips" in out and "sparse" in out


@pytest.mark.nightly
def test_the_installed_wheel_trains_and_reports(installed, tmp_path):
    (tmp_path / "texts").mkdir()
    text = "".join(f"def number_{n}():\n    return {n} * {n % 7}\n\n\n" for n in range(3000))
    for name in range(20):
        piece = text[name * 1000 :][:20000]
        (tmp_path / "texts" / f"{name}.txt").write_text(f"# file {name}\n{piece}")
    installed(*SMALL, "--steps=2", "--notwin", "--corpus=texts", "--out=run", cwd=tmp_path)
    assert (tmp_path / "run" / "report.html").exists()
