"""The memory of pruning a directory: its formula, and a measurement at toy size."""

import json

import pytest
from exit_status import exit_status

from experiments import prune_memory
from experiments.benchmarks import pruning_bytes
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.runs.families import FAMILIES


def llama(layers, width, hidden, **more):
    heads = max(1, width // 64)
    shape = dict(vocab_size=512, max_len=64) | FAMILIES["llama"] | more
    return ModelConfig(layers, width, heads, hidden, **shape)


@pytest.mark.parametrize(
    ("width", "hidden", "tokens", "layer", "projection", "streams"),
    [
        # By hand: 16 (4 d² + 3 d f), 72 f² + 80 f d, 16 tokens d; 136 f² of few.
        (1024, 2816, 1024, 205_520_896, 801_636_352, 16_777_216),
        (4096, 11008, 65536, 3_238_002_688, 12_331_778_048, 4_294_967_296),
        (64, 64, 10, 458_752, 884_736, 10_240),
    ],
)
def test_the_formula_has_the_parts_of_the_page(width, hidden, tokens, layer, projection, streams):
    sizes = pruning_bytes.host_bytes(llama(2, width, hidden), tokens)
    assert sizes == {
        "programs": 6e8, "layer": layer, "projection": projection, "streams": streams
    }  # fmt: skip
    assert sizes == pruning_bytes.host_bytes(llama(40, width, hidden), tokens)


def test_the_formula_alone_measures_nothing(tmp_path, capsys):
    flags = "--only_formula=yes", "--width=128", "--hidden=256", f"--keep={tmp_path / 'kept'}"
    assert exit_status(prune_memory, *flags) == 0
    assert "| projection | 0.012 |" in capsys.readouterr().out
    assert not (tmp_path / "kept").exists()


def test_a_width_that_is_no_multiple_of_a_head_is_refused(capsys):
    assert exit_status(prune_memory, "--width=100") == 2
    assert "legal: multiples of 64" in capsys.readouterr().err


@pytest.mark.slow
def test_a_small_model_is_drawn_pruned_and_measured(tmp_path, capsys):
    flags = "--layers=2", "--width=64", "--hidden=128", "--tokens=512", "--block=1x16"
    assert exit_status(prune_memory, *flags, f"--keep={tmp_path}") == 0
    [path] = tmp_path.iterdir()
    result = json.loads(path.read_text())
    measured = result["measured"]
    assert result["parameters"] == 2 * (4 * 64**2 + 3 * 64 * 128)
    # The rest is Python and jax, which are most of the memory of a toy.
    assert 0 < measured["peak_bytes"] - measured["before_bytes"] < 4e8
    assert measured["peak_bytes"] < 1.5 * result["formula"]["sum"]
    assert "of the formula" in capsys.readouterr().out
