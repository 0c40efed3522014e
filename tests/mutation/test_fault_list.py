import pytest
from mutation import fault_list

FAULTS = fault_list.read()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_still_applies(fault):
    assert fault.source() != (fault_list.ROOT / fault.file).read_text(encoding="utf-8")
    assert all((fault_list.ROOT / test.partition("::")[0]).exists() for test in fault.tests)
    assert fault.why


def test_every_room_has_faults():
    package = fault_list.ROOT / "sparse_dataflow"
    rooms = {path.parent.name for path in package.glob("*/__init__.py")}
    assert rooms - {fault.file.split("/")[1] for fault in FAULTS} == set()


def test_many_faults_are_spread_over_the_core():
    rooms = {"/".join(fault.file.split("/")[1:-1][:2]) for fault in FAULTS}
    assert len(FAULTS) >= 60
    assert len(rooms) >= 16
