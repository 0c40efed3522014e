"""The expected loss is the published law's, at the dense size that sparse blocks are worth."""

import pytest

from sparse_dataflow.commands.preflight import settling
from sparse_dataflow.core.training import cost
from sparse_dataflow.planner import expected_loss
from sparse_dataflow.runs.run_config import preset


def models(scale, **changes):
    config = preset(scale).change(**changes)
    return [next(iter(settling.models_of(c).values()))[-1].model for c in (config, config.dense())]


def test_a_dense_model_has_the_loss_of_the_law():
    """By hand for 12.9e9 parameters and 300e9 tokens: 1.8172 + 0.1468 + 0.1321."""
    _, dense = models("13b")
    result = expected_loss.expected(dense, dense, 300e9)
    assert cost.parameter_count(dense) == pytest.approx(12.85e9, rel=0.01)
    assert result.estimate == pytest.approx(2.0961, abs=5e-4)
    assert result.low < result.estimate < result.high


def test_at_one_eighth_a_stored_parameter_is_worth_2_8_dense_ones():
    """docs/evidence/quality.md gives 2.8 (2.4 to 3.9); the embeddings count once."""
    sparse, dense = models("13b")
    embeddings = (sparse.vocab_size + sparse.max_len) * sparse.d_model
    stored = cost.parameter_count(sparse) - embeddings
    sizes = [expected_loss._dense_parameters(sparse, dense, number) for number in range(3)]
    gains = [(size - embeddings) / stored for size in sizes]
    assert gains == pytest.approx([2.4, 2.8, 3.9], rel=0.02)


def test_it_lies_between_a_dense_model_of_the_stored_size_and_one_of_the_shape():
    for scale in ("125m", "1.3b", "13b"):
        sparse, dense = models(scale)
        mine, twin = (expected_loss.expected(m, dense, 20e9) for m in (sparse, dense))
        assert twin.estimate < mine.estimate < mine.high
        more = expected_loss.expected(sparse, dense, 40e9)
        assert more.estimate < mine.estimate


@pytest.mark.parametrize(
    ("scale", "changes"),
    [
        ("3m", {}),
        ("nano", {}),
        ("125m", {"model__vocab_size": 2048}),
        ("1.3b", {"model__experts": 8}),
    ],
)
def test_what_the_laws_do_not_describe_has_none(scale, changes):
    sparse, dense = models(scale, **changes)
    assert expected_loss.expected(sparse, dense, 1e9) is None
