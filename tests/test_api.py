"""The public API: small, quick to import, documented, and good for a training in memory."""

import inspect
import itertools
import random
import subprocess
import sys

import numpy as np
import pytest
from sparse_dataflow.config.training import TrainingConfig

import sparse_dataflow as sd


def test_importing_it_imports_nothing_else():
    # Where typing is imported the interpreter's own modules vary; those of packages do not.
    probe = "import sys, sparse_dataflow; print(*(m for m in ('jax', 'numpy') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("name", sd.__all__)
def test_every_name_is_there_and_says_what_it_takes_and_raises(name):
    thing = getattr(sd, name)
    doc = inspect.getdoc(thing)
    assert doc and name in dir(sd) and thing.__name__ == name
    if inspect.isfunction(thing):
        for section in ("Args:", "Raises:"):
            assert section in doc or not inspect.signature(thing).parameters, (name, section)
    elif dataclass_fields := getattr(thing, "__dataclass_fields__", None):
        assert all(f"{field}:" in doc for field in dataclass_fields)


def test_there_are_about_a_dozen_and_no_others():
    assert 10 <= len(sd.__all__) <= 14 and sd.__all__ == sorted(sd.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        sd.nothing  # noqa: B018


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder, draw = tmp_path_factory.mktemp("texts"), random.Random(0)
    for number in range(8):
        lines = [f"word{draw.randrange(30)} and {draw.randrange(9)}\n" for _ in range(300)]
        (folder / f"{number}.txt").write_text("".join(lines))
    return folder


def small(**changes):
    config = sd.ModelConfig(1, 32, 2, 64, vocab_size=300, max_len=16)
    return config.with_linears(sd.LinearSpec("block_sparse", "monarch", 0.5, 16), **changes)


def test_a_training_in_memory_learns_tells_and_writes(texts, tmp_path):
    seen = []
    training = TrainingConfig(30, batch=4, sequence=16, learning_rate=1e-2)
    trained = sd.train(
        small(), training, str(texts), eval_every=10, on_step=seen.append, cache_dir=tmp_path
    )
    assert [p.step for p in seen] == list(range(1, 31))
    assert [p.step for p in seen if p.bits_per_byte is not None] == [10, 20, 30]
    assert seen[-1].loss < seen[0].loss - 0.5
    assert trained.facts["bits_per_byte"] == seen[-1].bits_per_byte < seen[9].bits_per_byte
    assert all(a.seconds <= b.seconds for a, b in itertools.pairwise(seen))
    [written] = sd.generate(trained, [trained.tokenizer.encode("word")], max_new_tokens=5)
    assert len(written.tokens) == 5 and np.isin(written.tokens, range(300)).all()


def test_what_cannot_be_trained_is_refused_in_words(texts, tmp_path):
    with pytest.raises(sd.UserError, match="sequence 32 is longer than the model's max_len 16"):
        sd.train(small(), TrainingConfig(1, 4, 32), str(texts), cache_dir=tmp_path)
    with pytest.raises(sd.UserError, match="too small for byte-level BPE"):
        tiny = sd.ModelConfig(1, 32, 2, 64, vocab_size=100, max_len=16)
        sd.train(tiny, TrainingConfig(1, 4, 16), str(texts), cache_dir=tmp_path)
