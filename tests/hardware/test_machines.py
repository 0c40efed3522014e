"""Names of machines as people write them, and those that are refused."""

import pytest

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import machines


@pytest.mark.parametrize(
    ("text", "chip", "count", "price"),
    [
        ("h100:8", "h100", 8, None),
        ("h100", "h100", 1, None),
        ("a100:8@1.5", "a100-80gb", 8, 1.5),
        ("a100-40gb:8@1", "a100-40gb", 8, 1.0),
        ("h200:4x8", "h200", 32, None),
        ("MI300X:8", "mi300x", 8, None),
        ("rtx4090", "rtx-4090", 1, None),
        # Google's names of v4 and v5p count cores, of which a chip has two.
        ("v4-8", "tpu-v4", 4, None),
        ("v5p-8", "tpu-v5p", 4, None),
        ("v5p-64", "tpu-v5p", 32, None),
        ("v5litepod-64", "tpu-v5e", 64, None),
        ("v5e-64", "tpu-v5e", 64, None),
        ("v6e-64@2.7", "tpu-v6e", 64, 2.7),
        ("v5p:16", "tpu-v5p", 16, None),
        ("v5p:2x2x1", "tpu-v5p", 4, None),
        ("tpu-v5e:256", "tpu-v5e", 256, None),
        ("GB300:72@4", "gb300", 72, 4.0),
        ("v7x-8", "tpu-7x-core", 8, None),
        ("ironwood:8", "tpu-7x-core", 8, None),
    ],
)
def test_a_machine_has_the_chips_of_its_name(text, chip, count, price):
    machine = machines.parse(text)
    assert (machine.chip.name, machine.count, machine.price) == (chip, count, price)
    again = machines.parse(machine.name)
    assert (again.chip, again.count) == (machine.chip, machine.count)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("v5p-7", "counts cores, 2 a chip; legal: even numbers, or v5p:7"),
        ("v5p-8:2", "names the number of chips twice"),
        ("2xh100", "matches no chip; legal: a100-40gb"),
        ("h100:", "legal: KIND:NUMBER, as in h100:8"),
        ("h100:0", "has 0 chips; legal: 1 to"),
        ("h100:8@0", "price of 0"),
        ("h100:8@free", "legal: KIND:NUMBER"),
        ("h100:999999", "legal: 1 to"),
        ("", "legal: KIND:NUMBER"),
        ("mine.toml:8", "--chips=mine.toml does not exist"),
    ],
)
def test_other_names_are_refused_with_the_legal_ones(text, words):
    with pytest.raises(UserError) as refused:
        machines.parse(text)
    assert words in str(refused.value)


def test_a_file_describes_a_chip(tmp_path):
    path = tmp_path / "Mine.toml"
    path.write_text('name = "mine"\nbfloat16_tflops = 100\nmemory_gb = 48\nbandwidth_gb_s = 900\n')
    machine = machines.parse(f"{path}:2@0.5")
    assert (machine.chip.name, machine.count, machine.price) == ("mine", 2, 0.5)


def test_a_list_has_every_machine():
    chosen = machines.parse_all("a100:8,v5p-8, h100:8@2")
    assert [m.name for m in chosen] == ["a100-80gb:8", "tpu-v5p:4", "h100:8"]
