"""Names of topologies: legal ones, illegal ones, compact ones, missing compilers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.compile import topologies
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import CHIPS


@pytest.mark.parametrize(
    ("name", "slices", "size", "chip"),
    [
        ("v5p:16x16x12", 1, 3072, "tpu-v5p"),
        ("v5p:8x8x16", 1, 1024, "tpu-v5p"),
        ("v5e:4x4", 4, 64, "tpu-v5e"),
        ("v6e:16x16", 1, 256, "tpu-v6e"),
        ("v5p:1x1x1", 1, 1, "tpu-v5p"),
        ("h200:1", 1, 1, "h200"),
        ("h200:4x8", 1, 32, "h200"),
    ],
)
def test_legal_names(name, slices, size, chip):
    topology = topologies.parse(name, slices)
    assert (topology.size, topology.chip.name) == (size, chip)
    assert topology.platform == ("cuda" if chip == "h200" else "tpu")


@pytest.mark.parametrize(
    ("name", "legal"),
    [
        ("v5e:3x3", "v5e:4x4"),
        ("v5e:4x4x4", "v5e:4x4"),
        ("v5e:32x32", "v5e:16x16"),
        ("v5p:4x4", "v5p:2x2x1"),
        ("v5p:3x4x4", "v5p:4x4x4"),
        ("v5p-8", "v5p:2x2x1"),
        ("v9x:2x2", "h200:1 to h200:8"),
        ("h200:9", "h200:4x8"),
        ("h200:2x4", "h200:4x8"),
        ("h200:0", "h200:4x8"),
        ("", "v5e:4x4"),
    ],
)
def test_illegal_names_are_answered_with_legal_ones(name, legal):
    with pytest.raises(UserError) as refused:
        topologies.parse(name)
    assert f"--topology={name} is unknown" in str(refused.value)
    assert legal in str(refused.value)


def test_only_tpus_have_slices():
    with pytest.raises(UserError, match="legal: --slices=1"):
        topologies.parse("h200:8", slices=2)


@pytest.mark.parametrize(
    ("chip", "number", "name"),
    [
        ("tpu-v5e", 16, "v5e:4x4"),
        ("tpu-v5e", 8, "v5e:2x4"),
        ("tpu-v5p", 1024, "v5p:8x8x16"),
        ("tpu-v5p", 3072, "v5p:12x16x16"),
        ("tpu-v6e", 1, "v6e:1x1"),
        ("h200", 4, "h200:1x4"),
        ("h200", 32, "h200:4x8"),
        ("h200", 12, None),
        ("tpu-v5e", 7, None),
        ("mi250x-gcd", 8, None),
    ],
)
def test_the_most_compact_topology(chip, number, name):
    topology = topologies.compact_topology(CHIPS[chip], number)
    assert name == (topology and topology.name)
    assert topology is None or topology.size == number


@given(st.text(alphabet="v5ep6h20:x1-", max_size=14))
def test_any_name_is_parsed_or_refused(name):
    try:
        assert topologies.parse(name).size >= 1
    except UserError as refused:
        assert "legal: " in str(refused)


@pytest.mark.parametrize(("name", "target"), [("v5e:2x2", "aot-tpu"), ("h200:1", "aot-gpu")])
def test_a_compiler_that_is_not_installed_is_named(name, target, monkeypatch):
    monkeypatch.setattr(topologies.importlib.util, "find_spec", lambda module: None)
    topology = topologies.parse(name)
    assert f"make {target}" in topologies.missing_compiler(topology)
    with pytest.raises(UserError, match=f"--topology={name}: .*make {target}"):
        topologies.devices.__wrapped__(topology)
