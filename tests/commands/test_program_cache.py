"""Compiled programs are kept for later processes, and never cost more than compiling."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from places import ROOT

from sparse_dataflow.commands import program_cache
from sparse_dataflow.data import cache
from sparse_dataflow.hardware.processor import processor

NAMES = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_enable_compilation_cache",
)


@pytest.fixture(autouse=True)
def no_programs(tmp_path, monkeypatch):
    """Ends jax's use of a cache of compiled programs, and restores it."""
    before = {name: getattr(jax.config, name) for name in NAMES}
    jax.config.update(NAMES[0], None)
    jax.config.update(NAMES[2], True)
    compilation_cache.reset_cache()
    monkeypatch.setattr(cache, "FOLDER", tmp_path / "cache")
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def programs():
    return list((cache.FOLDER / program_cache.PROGRAMS).rglob("jit*-cache"))


@pytest.mark.parametrize("factor", [17.5, 18.25, 19.125])
def test_compiled_programs_are_kept_in_the_cache_folder(factor):
    program_cache.keep_programs()
    jax.jit(lambda x: x * factor)(1.0)
    assert programs()
    assert jax.config.jax_compilation_cache_max_size == program_cache.MOST_BYTES


def test_a_folder_of_programs_that_jax_has_is_not_changed(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    program_cache.keep_programs()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
    assert not (tmp_path / "cache").exists()


DAMAGES = {
    "empty": lambda content: b"",
    "zeros": lambda content: bytes(len(content)),
    "short": lambda content: content[:-9],
    "a flipped bit": lambda content: content[:99] + bytes([content[99] ^ 1]) + content[100:],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_program_is_compiled_again(damage, caplog):
    program_cache.keep_programs()
    jax.jit(lambda x: x * 3.5)(1.0)
    whole = {path: path.read_bytes() for path in programs()}
    for path, content in whole.items():
        path.write_bytes(damage(content))
    jax.clear_caches()
    assert jax.jit(lambda x: x * 3.5)(2.0) == 7.0
    assert "compiled again" in caplog.text
    assert [path for path in whole if path.read_bytes() != damage(whole[path])]
    caplog.clear()
    jax.clear_caches()
    assert jax.jit(lambda x: x * 3.5)(2.0) == 7.0 and not caplog.text


@pytest.mark.parametrize("flags", ["fpu sse avx2", "fpu sse avx2 avx512f", "fp asimd sve"])
def test_processors_with_other_instructions_share_no_programs(monkeypatch, flags):
    here = processor()
    key = "Features" if "asimd" in flags else "flags"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: f"model : x\n{key}\t: {flags}\n")
    other = processor()
    assert other != here
    monkeypatch.setattr(
        Path, "read_text", lambda *_, **__: f"{key}: {' '.join(reversed(flags.split()))}"
    )
    assert processor() == other


@pytest.mark.parametrize(("processes", "platform", "kept"), [
    (1, "gpu", True), (2, "gpu", False), (16, "gpu", False), (2, "tpu", True), (2, "cpu", True),
])  # fmt: skip
def test_several_processes_on_gpus_keep_none_by_themselves(monkeypatch, processes, platform, kept):
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    program_cache.keep_programs()
    assert bool(jax.config.jax_compilation_cache_dir) == kept


def test_a_cache_folder_that_cannot_be_written_keeps_none(tmp_path):
    (tmp_path / "cache").write_text("a file")
    program_cache.keep_programs()
    assert jax.config.jax_compilation_cache_dir is None


@pytest.mark.slow
def test_processes_share_the_folder_at_once(tmp_path):
    script = (
        "from sparse_dataflow.commands import program_cache; import jax\n"
        "program_cache.keep_programs()\n"
        "for n in range(8): jax.jit(lambda x: x * (n + 0.5))(1.0)\n"
    )
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(tmp_path),
        "JAX_PLATFORMS": "cpu",
    }
    start = [
        subprocess.Popen([sys.executable, "-W", "error", "-c", script], env=environment)
        for _ in range(3)
    ]
    assert [process.wait() for process in start] == [0, 0, 0]
    assert len(list(tmp_path.rglob("jit*-cache"))) >= 8
