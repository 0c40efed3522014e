"""The command `prune`."""

import jax
import pytest

import sparse_dataflow as sd
from experiments import prune
from sparse_dataflow.files.errors import UserError

WORDS = "The planner says which layout is the fastest on this machine, and why it is so. "


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"{number} " + WORDS * 20)
    return folder


def options(**changes):
    return prune.Options(**{"tokens": 512, "rounds": 1, "block": "1x16", **changes})


def test_a_file_is_pruned_with_the_time_left(tmp_path, texts, capfd):
    model = sd.init(sd.preset("pico").dense(), jax.random.key(0))
    folder = sd.save(model, tmp_path / "dense", form="gguf")
    prune.main(options(run=str(folder / "model.gguf"), texts=str(texts), out=str(tmp_path / "out")))
    lines = capfd.readouterr()
    layers = model.model.num_layers
    assert f"layer 1 of {layers} is done, " in lines.err and " left" in lines.err
    assert "largest held-out error" in lines.out
    pruned = sd.load(tmp_path / "out")
    assert pruned.model.linear("mlp_in").density == 0.5
    with pytest.raises(UserError, match="exists already"):
        prune.main(options(run=str(folder), texts=str(texts), out=str(tmp_path / "out")))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"out": ""}, "--out"),
        ({"texts": ""}, "--texts"),
        ({"run": ""}, "--run"),
        ({"run": "nowhere"}, "nowhere"),
    ],
)
def test_what_is_missing_is_named(tmp_path, texts, changes, words):
    whole = {"run": "R", "texts": str(texts), "out": str(tmp_path / "out")}
    with pytest.raises(UserError, match=words):
        prune.main(options(**{**whole, **changes}))


def test_so_many_tokens_of_texts_are_read(tmp_path):
    model = sd.init(sd.preset("pico").dense(), jax.random.key(0))
    with pytest.raises(UserError, match="tokens=0"):
        sd.prune(model, [WORDS], tokens=0)
    with pytest.raises(UserError, match="fewer than 10 tokens"):
        sd.prune(model, [WORDS * 9], tokens=5)
