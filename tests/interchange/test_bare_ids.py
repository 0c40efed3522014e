"""A model of bare token ids (data.tokenizer=none): exports are read back, and texts are refused."""

import importlib.util

import jax
import numpy as np
import pytest

import sparse_dataflow as sd
from sparse_dataflow.commands.models import generate
from sparse_dataflow.data.tokenizer import Tokenizer, id_tokenizer
from sparse_dataflow.evaluation.harness import HarnessLM
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange.serving import run_in_jax

SIZE = 300
IDS = np.random.default_rng(0).integers(0, SIZE, (2, 12), np.int32)


@pytest.fixture(scope="module")
def model():
    config = sd.preset("pico").change(sparsity__block=16)
    return sd.init(config, jax.random.key(0), id_tokenizer(SIZE))


@pytest.fixture(scope="module")
def dense(model, tmp_path_factory):
    return sd.load(sd.save(model, tmp_path_factory.mktemp("dense") / "model", "dense"))


@pytest.mark.parametrize("form", ["dense", "sparse", "gguf"])
def test_an_export_has_the_logits_and_no_text(model, form, tmp_path):
    loaded = sd.load(sd.save(model, tmp_path / "model", form))
    assert loaded.tokenizer == model.tokenizer and not loaded.tokenizer.has_text
    np.testing.assert_allclose(sd.logits(loaded, IDS), sd.logits(model, IDS), rtol=0, atol=2e-5)
    again = sd.load(sd.save(loaded, tmp_path / "again", form))
    assert again.tokenizer.content_hash == model.tokenizer.content_hash


def test_a_program_continues_ids_and_refuses_texts(model, tmp_path, monkeypatch, capsys):
    folder = sd.save(model, tmp_path / "model", "program")
    spec = importlib.util.spec_from_file_location("run_in_jax", folder / "run_in_jax.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    program, prompt = module.Model(folder), IDS[0, :5].tolist()
    [ours] = sd.generate(model, [prompt], max_new_tokens=4)
    assert program.generate([prompt], 4)[0].tolist() == ours.tokens and ours.text == ""
    for arguments, said in ((["a text"], "give token ids, with --ids"), (["--ids", "1 2"], "")):
        monkeypatch.setattr("sys.argv", ["run_in_jax.py", *arguments])
        try:
            given, text = run_in_jax.arguments(folder, program.config, 64)
            assert not said and given.tokens == [1, 2] and text is None
        except SystemExit:
            assert said and said in capsys.readouterr().err


def test_texts_are_refused_wherever_they_enter(model, dense):
    tokenizer = model.tokenizer
    harness = HarnessLM(tokenizer, 8, lambda rows: [])
    for use in (
        lambda: sd.generate(model, ["a text"], max_new_tokens=4),
        lambda: sd.prune(dense, ["a text of some length"] * 99, block=16),
        lambda: harness.tok_encode("a text"),
        *(lambda name=name: getattr(tokenizer, name)(["a text"]) for name in BATCHES),
        *(lambda name=name: getattr(tokenizer, name)("a text") for name in TEXTS),
    ):
        with pytest.raises(UserError, match=r"data\.tokenizer=none.*legal: lists of token ids"):
            use()
    with pytest.raises(UserError, match="legal: lists of token ids"):
        generate.encoded_prompts(model, [""], chat=False)
    assert sd.generate(model, [[]], max_new_tokens=2)[0].text == ""


TEXTS = ("encode", "encode_with_places", "cuts")
BATCHES = ("encode_batch", "encode_documents", "encode_prompts", "encode_chat")


def test_every_way_from_text_to_ids_is_listed():
    ways = {name for name in vars(Tokenizer) if name.startswith("encode") or name == "cuts"}
    assert ways == {*TEXTS, *BATCHES}


def test_pruning_by_batches_of_ids_keeps_the_tokenizer(model, dense, tmp_path):
    sd.prune(dense, [np.tile(IDS, (4, 5))], block=16, density=0.5, out=tmp_path / "pruned")
    assert sd.load(tmp_path / "pruned").tokenizer == model.tokenizer


@pytest.mark.parametrize("size", [1, 2**20 + 1])
def test_as_many_ids_as_there_are_stand_ins_are_legal(size):
    with pytest.raises(UserError, match="legal: 2 to 1,048,576"):
        id_tokenizer(size)
