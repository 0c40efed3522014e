"""Energy counters, from a folder of power zones and a driver's library of the test's own."""

import sys
import types

import pytest

from experiments.benchmarks import energy

RANGE = 262_143_328_850


@pytest.fixture
def zone(tmp_path):
    """zone(NAME, its name file, microjoules) writes a power zone."""

    def write(folder, name, count):
        path = tmp_path / folder
        path.mkdir(exist_ok=True)
        (path / "name").write_text(f"{name}\n")
        (path / "energy_uj").write_text(f"{count}\n")
        (path / "max_energy_range_uj").write_text(f"{RANGE}\n")

    return write


@pytest.fixture
def driver(monkeypatch):
    """driver(GPU names, error) makes a `pynvml`; its counters can be changed."""

    def install(*names, error=None):
        def handle_of(uuid):
            return ["GPU-first", "GPU-second"].index(uuid)

        def count(handle):
            if error:
                raise error
            return library.counters[handle]

        library = types.SimpleNamespace(
            counters=[1000 * (i + 1) for i in range(len(names))],
            running=0,
            nvmlInit=lambda: setattr(library, "running", library.running + 1),
            nvmlShutdown=lambda: setattr(library, "running", library.running - 1),
            nvmlDeviceGetCount=lambda: len(names),
            nvmlDeviceGetHandleByIndex=lambda index: range(len(names))[index],
            nvmlDeviceGetHandleByUUID=handle_of,
            nvmlDeviceGetName=lambda handle: names[handle],
            nvmlDeviceGetTotalEnergyConsumption=count,
        )
        monkeypatch.setitem(sys.modules, "pynvml", library)
        return library

    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    return install


def test_packages_are_added_and_zones_within_or_beside_them_are_not(zone, tmp_path):
    def at(microjoules):
        for number in (0, 1):
            zone(f"intel-rapl:{number}", f"package-{number}", microjoules)
            for inner, name in enumerate(("core", "dram")):
                zone(f"intel-rapl:{number}:{inner}", name, 5 * microjoules)
        zone("intel-rapl:2", "psys", 7 * microjoules)
        zone("intel-rapl-mmio:0", "package-0", 3 * microjoules)
        return energy.read("cpu", tmp_path)

    (tmp_path / "intel-rapl").mkdir()  # The control type has no counter.
    before, after = at(1_000_000), at(3_500_000)
    assert after.source == "RAPL"
    assert after.joules_since(before) == pytest.approx(2 * 2.5)


def test_a_counter_restarts_at_its_range(zone, tmp_path):
    zone("intel-rapl:0", "package-0", RANGE - 1_000_000)
    before = energy.read("cpu", tmp_path)
    zone("intel-rapl:0", "package-0", 2_000_000)
    assert energy.read("cpu", tmp_path).joules_since(before) == pytest.approx(3.0)


def test_a_counter_that_stands_still_or_is_new_tells_nothing(zone, tmp_path):
    zone("intel-rapl:0", "package-0", 5)
    before = energy.read("cpu", tmp_path)
    assert energy.read("cpu", tmp_path).joules_since(before) is None
    assert before.joules_since(None) is None
    zone("intel-rapl:1", "package-1", 5)
    assert energy.read("cpu", tmp_path).joules_since(before) is None


def test_a_package_that_may_not_be_read_leaves_no_sum(zone, tmp_path, monkeypatch):
    for number in (0, 1):
        zone(f"intel-rapl:{number}", f"package-{number}", 5)
    read_text = type(tmp_path).read_text

    def refuse(path, *arguments, **options):
        if path.match("intel-rapl:1/energy_uj"):
            raise PermissionError(13, "Permission denied", str(path))
        return read_text(path, *arguments, **options)

    monkeypatch.setattr(type(tmp_path), "read_text", refuse)
    assert energy.read("cpu", tmp_path) is None


@pytest.mark.parametrize("content", ["", "many", "-"])
def test_a_counter_of_other_content_tells_nothing(zone, tmp_path, content):
    zone("intel-rapl:0", "package-0", content)
    assert energy.read("cpu", tmp_path) is None


def test_machines_without_counters_say_one_word(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert energy.read("cpu", tmp_path / "missing") is None
    assert energy.read("gpu") is None and energy.read("tpu") is None
    assert energy.source("gpu") == energy.source("tpu") == "not told"


@pytest.mark.parametrize(
    ("visible", "gpu"), [(None, 0), ("1", 1), ("1,0", 1), ("GPU-second", 1), ("GPU-first", 0)]
)
def test_the_first_gpu_of_this_process_is_read(driver, monkeypatch, visible, gpu):
    library = driver("H200", "H200")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    before = energy.read("gpu")
    library.counters[gpu] += 2500
    library.counters[1 - gpu] += 9999
    after = energy.read("gpu")
    assert after.source == energy.source("gpu") == "NVML"
    assert after.joules_since(before) == pytest.approx(2.5)
    assert library.running == 0


def test_different_gpus_are_read_only_in_the_order_of_the_bus(driver, monkeypatch):
    driver("T400", "H200")
    assert energy.read("gpu") is None
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert energy.read("gpu").counts == {"0": 1_000_000}


@pytest.mark.parametrize("visible", ["", "-1", "7", "MIG-of-a-gpu"])
def test_a_gpu_that_the_driver_does_not_know_tells_nothing(driver, monkeypatch, visible):
    library = driver("H200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert energy.read("gpu") is None and library.running == 0


def test_an_error_of_the_driver_tells_nothing(driver):
    library = driver("V100", error=RuntimeError("Not Supported"))
    assert energy.read("gpu") is None and library.running == 0
