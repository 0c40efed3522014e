"""The wheel holds all of the package, and works where there is no source tree."""

import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("sparse_dataflow", "experiments")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, as building leaves folders in its source."""
    copy = tmp_path_factory.mktemp("source")
    files = [p for p in ROOT.iterdir() if p.name in ("setup.cfg", "pyproject.toml", "README.md")]
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
    """Every file of the packages but caches and the results of benchmarks."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*")):
            parts = path.relative_to(ROOT).parts
            if path.is_file() and "__pycache__" not in parts and "results" not in parts:
                yield path


def test_nothing_of_the_packages_is_left_out_and_nothing_else_is_in(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == {str(path.relative_to(ROOT)) for path in sources()}


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Runs Python where only the installed wheel has the packages; returns what it prints."""
    place = tmp_path_factory.mktemp("site")
    options = ["--no-deps", "--no-index", "--quiet", "--no-compile", f"--target={place}"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, str(wheel)], check=True, timeout=600
    )
    environment = os.environ | {
        "PYTHONPATH": str(place),
        "JAX_PLATFORMS": "cpu",
        "XDG_CACHE_HOME": str(place / "cache"),
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

    run.place = place
    return run


SMALL = ("-m", "experiments.gpt13b_sparse", "--scale=pico", "--block=16")


@pytest.mark.slow
def test_installed_elsewhere_it_starts_and_plans(installed, tmp_path):
    probe = "import experiments, sparse_dataflow as s; print(s.__file__, experiments.__file__)"
    paths = installed("-c", probe, cwd=tmp_path).split()
    assert all(path.startswith(str(installed.place)) for path in paths)
    out = installed(*SMALL, "--mesh=fsdp:2,tensor:2", "--describe", cwd=tmp_path)
    assert "4 chips" in out and "sparse" in out


@pytest.mark.nightly
def test_installed_elsewhere_it_trains_and_reports(installed, tmp_path):
    (tmp_path / "texts").mkdir()
    text = "".join(f"def number_{n}():\n    return {n} * {n % 7}\n\n\n" for n in range(3000))
    for name in range(20):
        piece = text[name * 1000 :][:20000]
        (tmp_path / "texts" / f"{name}.txt").write_text(f"# file {name}\n{piece}")
    installed(*SMALL, "--steps=2", "--notwin", "--corpus=texts", "--out=run", cwd=tmp_path)
    assert (tmp_path / "run" / "report.html").exists()
