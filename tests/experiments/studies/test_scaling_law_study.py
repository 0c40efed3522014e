"""The scaling-law study: CSVs of runs, and the place of a model in the law."""

import jax
import pytest

from experiments.studies import scaling_law
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.model import gpt
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.run_config import SIZES


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read: No such file"),
        ("", "has no column parameters, sparsity, tokens, loss; legal:"),
        ("parameters,sparsity,tokens\n1,0,1\n", "has no column loss"),
        ("parameters,sparsity,tokens,loss\n1,0,1,2\n1,0,1,x\n", "line 3: loss is 'x', which is no"),
        ("parameters,sparsity,tokens,loss\n1,0,1\n", "line 2: loss is None"),
        ("parameters,sparsity,tokens,loss\n1,2,1,2\n", "Run 1 has sparsity 2; legal"),
    ],
)
def test_a_file_that_is_no_table_of_runs_is_refused(tmp_path, text, words):
    path = tmp_path / "runs.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=words):
        scaling_law.read_runs(path)


def test_held_out_runs_are_told_apart(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("parameters,sparsity,tokens,loss,held_out\n1,0,1,2,False\n1,0,2,2,True\n")
    runs, held_out = scaling_law.read_runs(path)
    assert len(runs) == 2 and held_out.tolist() == [False, True]


def test_parameters_are_the_stored_weights_of_projections():
    model = SIZES["pico"].with_linears(LinearSpec("block_sparse", "cyclic", 0.25, 16), ["qkv"])
    blocks = gpt.init(model, jax.random.key(0))["blocks"]
    weights = sum(
        leaf.size for module in blocks.values() for name, leaf in module.items()
        if name in ("kernel", "values")
    )  # fmt: skip
    assert scaling_law.stored_parameters(model) == weights
