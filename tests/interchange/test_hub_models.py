"""Models by their name on the hub: one commit, one copy, one sentence where there is none."""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub
import jax
import numpy as np
import pytest
from fake_hub import FakeHub
from marks import some

import sparse_dataflow as sd
from sparse_dataflow.commands.models import load_model
from sparse_dataflow.commands.request import Request
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import hub_models, starting_point
from sparse_dataflow.interchange.hub_models import HubName, hub_name
from sparse_dataflow.interchange.named_tokenizers import named_tokenizer

FIXTURES = Path(__file__).parent
NAME = "owner/llama"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with a model, which the library of this process takes for the real one."""
    server = FakeHub(tmp_path / "hub")
    shutil.copytree(FIXTURES / "llama", tmp_path / "hub" / NAME)
    monkeypatch.chdir(tmp_path)
    starting_point.read.cache_clear()
    with server.used_here(monkeypatch, tmp_path / "cached"):
        yield server
    server.close()
    starting_point.read.cache_clear()


def equal(left, right):
    return jax.tree.all(jax.tree.map(np.array_equal, left, right))


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("hf:Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("hf:gpt2", HubName("gpt2")),
        ("a_b/c.d@refs/pr/3", HubName("a_b/c.d", "refs/pr/3")),
        ("hf:gpt2@e7da7f2", HubName("gpt2", "e7da7f2")),
        ("hf://meta-llama/Llama-3.2-1B", HubName("meta-llama/Llama-3.2-1B")),
        ("hf://o/n@v1.0", HubName("o/n", "v1.0")),
        ("https://huggingface.co/o/n", HubName("o/n")),
        ("https://huggingface.co/o/n/tree/main", HubName("o/n", "main")),
        ("https://hf.co/o/n/?library=transformers", HubName("o/n")),
        *(
            (path, None)
            for path in (
                "gpt2", "./a/b", "/a/b", "a/b/c", "~/a", "a/b/", "gs://bucket/model", "../a/b",
                "https://huggingface.co/datasets/o/n", "hf://datasets/o/n/file.json", ".a/b",
            )
        ),
    ],
)  # fmt: skip
def test_names_are_told_from_paths_and_addresses(text, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub_name(text) == expected


@pytest.mark.parametrize("text", ["hf:", "hf:a/b/c", "hf:../x", "hf:a b/c", "hf:a/b@", "hf:a/-b"])
def test_an_illegal_name_is_refused_with_the_legal_form(text):
    with pytest.raises(UserError, match=r"no name of a model on the hub; legal: hf:OWNER/NAME"):
        hub_name(text)


@pytest.mark.parametrize("text", ["", " ", "\t\n"])
def test_an_empty_name_is_refused_as_such(text):
    for read in (hub_models.local_folder, sd.load):
        with pytest.raises(UserError, match=r"^The name of a model is empty; legal: a "):
            read(text)


@pytest.mark.parametrize("text", some([NAME, f"hf:{NAME}", f"hf:{NAME}@main"], f"hf:{NAME}@main"))
def test_a_name_gives_the_model_of_the_directory(hub, text):
    expected = sd.load(FIXTURES / "llama")
    model = sd.load(text)
    assert equal(model.params, expected.params) and model.model == expected.model
    assert model.tokenizer.content_hash == expected.tokenizer.content_hash
    assert sd.preset(text).model == sd.preset(FIXTURES / "llama").model
    config = Request(changes={"run.init_from": text}).config()
    assert config.run.init_from == text and config.model.d_model == expected.model.d_model


def test_the_record_of_a_run_names_the_commit(hub):
    start = starting_point.read(NAME)
    commit = hub.revision(NAME)
    assert start.provenance["path"] == f"hf:{NAME}@{commit}"
    # The branch moves; what a run began with does not.
    (hub.folder / NAME / "extra.json").write_text("{}")
    starting_point.read.cache_clear()
    requests = len(hub.requests)
    again = starting_point.read_again(start.provenance, "run", "train adapters of")
    assert again.provenance == start.provenance and equal(again.params, start.params)
    assert len(hub.requests) == requests  # A commit that the cache has needs no network.
    assert starting_point.read(NAME).provenance["path"] != start.provenance["path"]


def test_a_revision_gives_its_own_files(hub):
    other = hub.folder / f"{NAME}@v2"
    shutil.copytree(FIXTURES / "mistral", other)
    assert sd.load(f"{NAME}@v2").model.d_model == sd.load(FIXTURES / "mistral").model.d_model
    commit = hub.revision(f"{NAME}@v2")
    folder = hub_models.fetched(HubName(NAME, commit))
    assert folder.name == commit
    shards = sorted(p.name for p in folder.glob("*.safetensors"))
    assert shards == sorted(p.name for p in (FIXTURES / "mistral").glob("model-*.safetensors"))
    with pytest.raises(UserError, match="it has no such revision"):
        sd.load(f"{NAME}@v3")


def test_one_copy_of_the_weights_and_no_subfolders_are_fetched(hub):
    folder = hub.folder / NAME
    extra = ("consolidated.safetensors", "pytorch_model.bin", "onnx/model.onnx",
             "original/params.json", "onnx/config.json", "adapter.safetensors")  # fmt: skip
    for name in extra:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"0" * 1000)
    local = hub_models.fetched(HubName(NAME))
    files = {p.relative_to(local).as_posix() for p in local.rglob("*") if p.is_file()}
    expected = {p.name for p in (FIXTURES / "llama").iterdir() if p.is_file()}
    expected -= {"expected.safetensors"}
    assert files == expected


@pytest.mark.parametrize("folder_is_model", [True, False])
def test_a_folder_of_that_name_wins(hub, tmp_path, caplog, folder_is_model):
    if folder_is_model:
        shutil.copytree(FIXTURES / "llama", tmp_path / NAME)
        sd.load(NAME)
        assert f"{NAME} is the folder here; hf:{NAME} is the model on the hub" in caplog.text
    else:
        (tmp_path / "owner").mkdir()
        with pytest.raises(UserError):
            sd.load(NAME)
    assert not hub.requests
    assert sd.load(f"hf:{NAME}").step == 0


@pytest.mark.parametrize(
    "status, code, words",
    [
        (401, "GatedRepo", "gives access on request"),
        (403, "GatedRepo", "gives access on request"),
        (401, "", r"log in with `hf auth login`"),
        (403, "", r"log in with `hf auth login`"),
        (404, "RepoNotFound", "no such model, or it is private"),
    ],
)
@pytest.mark.parametrize("place", some(["api", "model.safetensors", "config.json"], "api"))
def test_a_refusal_of_the_hub_is_one_sentence(hub, status, code, words, place):
    hub.failures, hub.codes = {place: status}, {status: code}
    with pytest.raises(UserError, match=words) as caught:
        sd.load(NAME)
    assert str(caught.value).startswith(f"hf:{NAME} cannot be fetched")


def test_a_name_that_the_hub_does_not_have_is_refused(hub):
    with pytest.raises(UserError, match=r"^hf:owner/nothing cannot be fetched: .*no such model"):
        sd.load("owner/nothing")


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda f: f.joinpath("model.safetensors").rename(f / "pytorch_model.bin"),
         "no model.safetensors; pytorch_model.bin is not read, .* convert it"),
        (lambda f: f.joinpath("model.safetensors").rename(f / "q4.gguf"),
         r"q4\.gguf is a file of llama\.cpp, .* its own path"),
        (lambda f: f.joinpath("tokenizer.json").unlink(), "has no tokenizer"),
        (lambda f: f.joinpath("tokenizer.json").write_text('{"model": {"type": "Unigram"}}'),
         r"tokenizer\.json cannot be read"),
        (lambda f: f.joinpath("tokenizer.json").write_text("{"), r"tokenizer\.json cannot be read"),
        (lambda f: f.joinpath("config.json").unlink(), "has no config.json"),
        (lambda f: f.joinpath("config.json").write_text('{"model_type": "t5"}'),
         "model of type 't5'"),
        (lambda f: f.joinpath("config.json").write_text("{"), "is damaged"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_read_is_refused_before_its_weights(hub, change, words):
    change(hub.folder / NAME)
    with pytest.raises(UserError, match=words):
        sd.load(NAME)
    assert hub.bytes_of(".safetensors") == hub.bytes_of(".bin") == 0


def test_a_download_that_breaks_goes_on_where_it_broke(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1)  # Of 10 MB.
    size = (hub.folder / NAME / "model.safetensors").stat().st_size
    hub.cut = {"model.safetensors": size // 2 + 1}
    assert equal(sd.load(NAME).params, sd.load(FIXTURES / "llama").params)
    ranges = [r for _, path, r, _ in hub.requests if path.endswith("model.safetensors")]
    assert f"bytes={size // 2 + 1}-" in ranges


def test_a_file_of_another_size_than_the_hub_says_is_refused(hub, monkeypatch):
    rows = FakeHub.sizes
    monkeypatch.setattr(FakeHub, "sizes", lambda *a: {**rows(*a), "model.safetensors": 7})
    with pytest.raises(UserError, match=r"bytes and not 7 as on the hub|has 7 bytes of weights"):
        sd.load(NAME)


@pytest.mark.parametrize(
    "file", some(["model.safetensors", "tokenizer.json", "config.json"], "model.safetensors")
)
def test_a_file_of_another_checksum_than_the_hub_lists_is_refused(hub, file, tmp_path):
    content = (hub.folder / NAME / file).read_bytes()
    hub.lfs[file] = {"sha256": hashlib.sha256(content + b"x").hexdigest()}
    with pytest.raises(UserError, match=f"{file} of .* has another SHA-256"):
        sd.load(NAME)
    assert not any(path.exists() for path in (tmp_path / "cached").rglob(file))
    hub.lfs[file] = {"sha256": hashlib.sha256(content).hexdigest()}
    assert sd.load(NAME)


def alone(hub, cache, name, **environment):
    """A process of its own that loads a model by its name."""
    script = f"import sys, sparse_dataflow as sd\ntry:\n sd.load({name!r})\n" \
        "except sd.UserError as error:\n sys.exit(str(error))"  # fmt: skip
    environment = {
        **os.environ, "HF_ENDPOINT": hub if isinstance(hub, str) else hub.endpoint,
        "HF_HUB_CACHE": str(cache), "JAX_PLATFORMS": "cpu", **environment,
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stderr=subprocess.PIPE, text=True
    )


def test_files_that_a_killed_download_finished_are_not_fetched_again(hub, tmp_path):
    shutil.copytree(FIXTURES / "mistral", hub.folder / "owner" / "shards")
    hub.cut = {"00002-of-00003.safetensors": 100}  # A second for each 100 bytes.
    process = alone(hub, tmp_path / "cached", "owner/shards")
    first = "model-00001-of-00003.safetensors"
    end = time.monotonic() + 60
    while not list((tmp_path / "cached").rglob(first)) and time.monotonic() < end:
        time.sleep(0.05)
    process.kill()
    process.communicate()
    with pytest.raises(UserError, match="the cache has not all of it"):
        _offline(hub, "owner/shards")
    hub.cut = {}
    hub.requests.clear()
    assert equal(sd.load("owner/shards").params, sd.load(FIXTURES / "mistral").params)
    assert hub.bytes_of(first) == 0 and hub.bytes_of("00003-of-00003.safetensors") > 0


def _offline(hub, name):
    """Loads a model while the hub answers nothing."""
    before, hub.failures = hub.failures, {"api": 503, "json": 503, "safetensors": 503}
    try:
        return sd.load(name)
    finally:
        hub.failures = before


def test_the_cache_is_used_without_a_network_and_says_so(hub, tmp_path, caplog):
    shutil.copytree(FIXTURES / "mistral", hub.folder / "owner" / "shards")
    expected = sd.load(NAME)
    assert equal(_offline(hub, NAME).params, expected.params)
    assert f"hf:{NAME} is read from the cache, commit {hub.revision(NAME)}" in caplog.text
    with pytest.raises(UserError, match=r"the hub cannot be reached .* has not all of it"):
        _offline(hub, "owner/shards")


@pytest.mark.parametrize("switch", some(["HF_HUB_OFFLINE", "HF_ENDPOINT"], "HF_ENDPOINT"))
def test_the_cache_is_used_by_the_librarys_own_switch_and_without_a_network(hub, tmp_path, switch):
    sd.load(NAME)
    value = "1" if switch == "HF_HUB_OFFLINE" else _closed()
    process = alone(hub, tmp_path / "cached", NAME, **{switch: value})
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "is read from the cache" in errors


def _closed():
    """The address of a port that nothing listens on."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}"


def test_a_hub_that_never_answers_is_given_up(tmp_path, monkeypatch):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setattr(hub_models, "SECONDS", 0.5)
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        with pytest.raises(UserError, match=r"^hf:o/n cannot be fetched, as the hub cannot be"):
            hub_models.fetched(HubName("o/n"))


def test_a_tokenizer_by_name_is_that_of_the_model(hub):
    given = named_tokenizer(NAME)
    assert given.content_hash == sd.load(FIXTURES / "llama").tokenizer.content_hash
    assert named_tokenizer(f"hf:{NAME}").content_hash == given.content_hash


def test_a_command_takes_a_name(hub, tmp_path):
    model = load_model.load(load_model.ModelOptions(run=NAME))
    folder = sd.save(model, tmp_path / "exported", form="dense")
    before, after = (
        json.loads((f / "config.json").read_text()) for f in (FIXTURES / "llama", folder)
    )
    assert after["hidden_size"] == before["hidden_size"]
