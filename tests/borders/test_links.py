"""Links in a folder from elsewhere: what they lead to outside of it is not read."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from places import TESTS

import sparse_dataflow as sd
from sparse_dataflow.data.corpora import load_corpus
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange.named_tokenizers import named_tokenizer

FIXTURES = TESTS / "interchange"
SECRET = "a made-up secret of this test"


@pytest.fixture
def outside(tmp_path):
    path = tmp_path / "private" / "file"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(FIXTURES / "llama", tmp_path / "model")


def cached(model, tmp_path):
    """Returns the model as the cache of the hub's library lays it out."""
    root = tmp_path / "hub" / "models--owner--llama"
    folder = root / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (root / "blobs").mkdir()
    for number, path in enumerate(sorted(model.iterdir())):
        shutil.copy(path, root / "blobs" / str(number))
        (folder / path.name).symlink_to(Path("..", "..", "blobs", str(number)))
    return folder


@pytest.mark.parametrize(
    "name", ["merges.txt", "generation_config.json", "vocab.json", "unused.bin", "sub/file.txt"]
)
@pytest.mark.parametrize("relative", [False, True])
def test_a_link_out_of_a_model_directory_is_refused(model, outside, name, relative):
    link = model / name
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    up = "../" * (1 + name.count("/"))
    link.symlink_to(up + "private/file" if relative else outside)
    for read in (sd.load, named_tokenizer):
        with pytest.raises(UserError, match=r"is a link to .*outside of the folder"):
            read(str(model))


def test_a_link_to_a_folder_or_to_nothing_outside_is_refused(model, outside):
    for target in (outside.parent, "/nothing/of/this/name", "/proc/self/environ"):
        (model / "link").symlink_to(target)
        with pytest.raises(UserError, match="outside of the folder"):
            sd.load(model)
        (model / "link").unlink()


def test_links_inside_and_a_directory_that_is_a_link_are_read(model, tmp_path):
    before = sd.load(model)
    (model / "model.safetensors").rename(model / "weights")
    (model / "model.safetensors").symlink_to("weights")
    (tmp_path / "reached").symlink_to(model)
    assert (tmp_path / "reached" / "model.safetensors").is_symlink()
    assert sd.load(tmp_path / "reached").model == before.model


def test_the_links_of_the_hubs_cache_are_read_and_no_others(model, tmp_path, outside):
    folder = cached(model, tmp_path)
    assert sd.load(folder).model == sd.load(model).model
    for target in (outside, Path("..", "..", "..", "..", "private", "file")):
        (folder / "vocab.json").symlink_to(target)
        with pytest.raises(UserError, match="outside of the folder"):
            sd.load(folder)
        (folder / "vocab.json").unlink()


@pytest.mark.parametrize("name", ["b.txt", "b.jsonl", "deep/b.md"])
def test_a_link_out_of_a_corpus_is_refused(tmp_path, outside, name):
    corpus = tmp_path / "corpus"
    (corpus / "deep").mkdir(parents=True)
    (corpus / "a.txt").write_text("one two\nthree four\n")
    (corpus / name).symlink_to(outside)
    with pytest.raises(UserError, match=r"is a link to .*name a folder that has both"):
        load_corpus(str(corpus), cache_dir=tmp_path / "cache")
    assert not any(SECRET.encode() in p.read_bytes() for p in tmp_path.rglob("cache/*/*.record"))


def test_a_link_out_of_token_files_is_refused(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for path in (tmp_path / "elsewhere.bin", corpus / "a.bin"):
        path.write_bytes((np.arange(100) % 7).astype(np.uint16).tobytes())
    (corpus / "b.bin").symlink_to(tmp_path / "elsewhere.bin")
    with pytest.raises(UserError, match="outside of the folder"):
        load_corpus(str(corpus), cache_dir=tmp_path / "cache")


def test_links_inside_a_corpus_and_to_it_are_read_and_folders_are_named(tmp_path, caplog):
    corpus, other = tmp_path / "corpus", tmp_path / "other"
    corpus.mkdir()
    other.mkdir()
    (other / "c.txt").write_text("unread\n")
    (corpus / "a.txt").write_text("one two\nthree four\n")
    (corpus / "b.txt").symlink_to("a.txt")
    (corpus / "more").symlink_to(other)
    (tmp_path / "reached").symlink_to(corpus)
    loaded = load_corpus(str(tmp_path / "reached"), cache_dir=tmp_path / "cache")
    assert len(loaded.train) + len(loaded.validation) >= 2
    assert "more is a link to the folder" in caplog.text and "is not read" in caplog.text


def test_an_include_of_a_task_file_stays_in_its_folder(tmp_path, outside):
    pytest.importorskip("lm_eval", reason="the extra eval is not installed")
    from sparse_dataflow.evaluation.tasks import task_border

    folder = tmp_path / "tasks"
    folder.mkdir()
    (tmp_path / "private" / "c.yaml").write_text("description: private")
    for name, include in (("link", "b.yaml"), ("up", "../private/c.yaml"), ("root", str(outside))):
        (folder / "a.yaml").write_text(f"task: {name}\ninclude: {json.dumps(include)}")
        (folder / "b.yaml").unlink(missing_ok=True)
        (folder / "b.yaml").symlink_to(tmp_path / "private" / "c.yaml")
        with pytest.raises(UserError, match="outside of its folder"):
            task_border.fields(folder / "a.yaml", folder)
