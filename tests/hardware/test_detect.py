"""The chip table, jax's device kinds, and the host's memory and rates."""

import dataclasses
import os

import jax
import pytest

from sparse_dataflow.hardware import detect as hardware
from sparse_dataflow.hardware.chips import CHIPS, GIB, KNOWN, UNFITTED


def test_every_documented_chip_has_rates_memory_and_bandwidth():
    gpus = {"a100-40gb", "a100-80gb", "h100", "h100-96gb", "h200", "b200", "gb200"}
    assert gpus | {"mi250x-gcd", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e"} == set(CHIPS)
    recent = {"b300", "gb300", "mi355x", "tpu-7x-core"}
    assert set(UNFITTED) == recent | {"mi300x", "rtx-4090"}
    for name, chip in KNOWN.items():
        assert chip.name == name
        assert 100e12 < chip.peak("bfloat16") < 5e15
        assert chip.peak("float32") <= chip.peak("bfloat16")
        assert 15e9 < chip.memory_bytes < 300e9
        assert 0.5e12 < chip.bandwidth < 10e12
    with pytest.raises(dataclasses.FrozenInstanceError):
        CHIPS["h100"].memory_bytes = 1


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI250X", "mi250x-gcd"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("AMD Instinct MI300X VF", "mi300x"),
        ("TPU v4", "tpu-v4"),
        ("TPU v5 lite", "tpu-v5e"),
        ("TPU v5e", "tpu-v5e"),
        ("TPU v5", "tpu-v5p"),
        ("TPU v5p", "tpu-v5p"),
        ("TPU v6 lite", "tpu-v6e"),
        ("TPU v6e", "tpu-v6e"),
        ("AMD Instinct MI355X", "mi355x"),
        ("TPU7x", "tpu-7x-core"),
    ],
)
def test_device_kinds_of_jax(kind, name):
    assert hardware.chip_of(kind) == KNOWN[name]


@pytest.mark.parametrize(
    "kind",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA GH200 480GB",
        "NVIDIA GB200",
        "NVIDIA GeForce RTX 3090",
        "AMD Instinct MI250",
        "AMD Instinct MI300X HF",
        "TPU v4 lite",
        "TPU7x lite",
        "",
    ],
)
def test_other_kinds_have_no_peak_rather_than_a_guess(kind):
    chip = hardware.chip_of(kind)
    assert chip.name == kind
    assert chip.peak_flops is None and chip.memory_bytes is None and chip.bandwidth is None
    assert chip.peak("bfloat16") is None


class _Device:
    platform = "gpu"

    def __init__(self, kind, stats):
        self.device_kind, self._stats = kind, stats

    def memory_stats(self):
        return self._stats


@pytest.mark.parametrize(
    ("kind", "stats", "memory"),
    [
        ("NVIDIA H200", {"bytes_limit": 92 * GIB}, 100 * GIB),
        ("NVIDIA H200", {"bytes_limit": 2**40}, CHIPS["h200"].memory_bytes),
        ("NVIDIA H200", None, CHIPS["h200"].memory_bytes),
        ("Neuron 3", {"bytes_limit": 23 * GIB}, 25 * GIB),
        ("Neuron 3", {}, None),
    ],
)
def test_detect_takes_memory_from_the_runtime_if_reported(monkeypatch, kind, stats, memory):
    monkeypatch.setattr(jax, "local_devices", lambda: [_Device(kind, stats)])
    chip = hardware.detect()
    assert chip.memory_bytes == memory
    assert chip.peak_flops == hardware.chip_of(kind).peak_flops


def test_detect_measures_a_cpu_once():
    if jax.default_backend() != "cpu":
        pytest.skip("default backend is not a CPU")
    chip = hardware.detect(("float32",))
    assert "core" in chip.name
    assert 1e8 < chip.peak("float32") < 1e15
    assert chip.peak("float16") is None
    assert 1e8 < chip.bandwidth < 1e13
    assert chip.memory_bytes == hardware.host_memory_bytes()
    assert hardware.detect(("float32",)) == chip


def test_host_memory_is_the_lower_of_physical_and_group_limit(monkeypatch):
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit, expected in ((None, physical), (2**20, 2**20), (2**63 - 4096, physical)):
        monkeypatch.setattr(hardware, "cgroup_limit", lambda limit=limit: limit)
        assert hardware.host_memory_bytes() == expected


def _groups(tmp_path, membership, limits):
    for name, text in limits.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    file = tmp_path / "membership"
    file.write_text(membership)
    return hardware.cgroup_limit(file, tmp_path / "cgroup")


def test_version_2_limit_is_the_lowest_of_all_parents(tmp_path):
    limits = {
        "user/job/memory.max": "max",
        "user/memory.max": "4096000",
        "memory.max": "8192000",
        "other/memory.max": "1",
    }
    assert _groups(tmp_path, "0::/user/job\n", limits) == 4096000


def test_version_2_limit_of_a_container_that_sees_only_its_root(tmp_path):
    assert _groups(tmp_path, "0::/kubepods/pod1\n", {"memory.max": "5000"}) == 5000


def test_version_1_limit(tmp_path):
    membership = "9:cpu,cpuacct:/a\n8:memory:/a/b\n0::/\n"
    limits = {
        "memory/a/b/memory.limit_in_bytes": "9223372036854771712",
        "memory/a/memory.limit_in_bytes": "7000",
        "cpu,cpuacct/a/memory.limit_in_bytes": "1",
    }
    assert _groups(tmp_path, membership, limits) == 7000


def test_no_group_no_limit(tmp_path):
    assert _groups(tmp_path, "0::/\n", {"memory.max": "max"}) is None
    assert hardware.cgroup_limit(tmp_path / "absent", tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("cpuinfo", "has"),
    [
        ("processor\t: 0\nflags\t\t: fpu sse2 avx512_bf16 amx\n", True),
        ("flags\t\t: fpu amx_bf16 amx_tile\n", True),
        ("model name\t: an avx512_bf16 name\nflags\t\t: fpu avx512_bf16_other\n", False),
        ("Features\t: fp asimd bf16\n", False),
        ("", False),
    ],
)
def test_only_flags_of_x86_say_that_a_cpu_multiplies_bfloat16(tmp_path, cpuinfo, has):
    path = tmp_path / "cpuinfo"
    path.write_text(cpuinfo)
    assert hardware.has_bfloat16_units(path) is has
    assert not hardware.has_bfloat16_units(tmp_path / "none")
