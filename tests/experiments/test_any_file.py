"""Every file that the project reads, damaged or someone else's, is read or refused with a message.

Never a traceback, a hang, an allocation that the file's own size does not explain, or a path that
leaves the folder.
"""

import contextlib
import dataclasses
import json
import pathlib
import shutil
import signal
import struct
import tracemalloc

import numpy as np
import pytest
from file_damage import damaged
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import ROOT

from experiments.benchmarks.chip_report import chip_data
from experiments.studies import study
from experiments.studies.scaling_law import read_runs
from experiments.studies.structure import design
from sparse_dataflow.commands import command_line
from sparse_dataflow.commands.models import evaluation_report
from sparse_dataflow.commands.request import NAMED
from sparse_dataflow.core.checkpoint.checkpoint import Checkpoints
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.data import tokens
from sparse_dataflow.data.corpora import load_corpus
from sparse_dataflow.data.tokenizer import Tokenizer, gpt2_tokenizer
from sparse_dataflow.evaluation import run_files, trained
from sparse_dataflow.evaluation.run_files import RunRecord
from sparse_dataflow.evaluation.tasks import items
from sparse_dataflow.files import folders, manifest
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import chips
from sparse_dataflow.interchange import huggingface, sparse_form, tensors
from sparse_dataflow.monitoring import goodput
from sparse_dataflow.monitoring.metrics import MetricsWriter, read_metrics
from sparse_dataflow.runs.run_config import SIZES, preset

MOST_MEMORY = 300 * 2**20
HANG = 900
BYTES = Tokenizer(tuple(gpt2_tokenizer().tokens[:256]), (), 257)
ORIGINAL = {
    "version": "1.0",
    "normalizer": {"type": "Lowercase"},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
    "added_tokens": [],
    "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(BYTES.tokens)}, "merges": []},
}
IMPORTED = dataclasses.replace(BYTES, original=json.dumps(ORIGINAL), original_ids=tuple(range(257)))
MODEL = dataclasses.replace(
    SIZES["pico"], linears={"qkv": LinearSpec("block_sparse", density=0.25, block=16)}
)
CONFIG = preset("pico").change(sparsity__projections=("qkv",), sparsity__block=16, run__twin=False)
RECORD = RunRecord(
    "gpt13b_sparse",
    ("python -m experiments.gpt13b_sparse", "--scale=pico"),
    "2026-01-01T00:00:00+00:00",
    {"jax": "0.12.0"},
    "a machine",
    "python_stdlib",
    "0" * 64,
    "1" * 64,
    512,
    {"sparse": 12},
)
HUGGING_FACE = ROOT / "tests" / "interchange"
EVALUATION = {
    "models": {"sparse": {"id": RECORD.identity, "variant": "sparse", "step": 12}},
    "method": "m", "notes": [], "command": "python", "rows": [],
}  # fmt: skip


def adopted(path):
    """Reads a config as `--resume` does."""
    [request] = command_line.arguments(["x", f"--resume={path.parent}"], tuple(NAMED), None)
    request.config()


def record_of(path):
    run_files.read_variants(CONFIG, run_files.read_record(path.parent, CONFIG))


def restored(path):
    """A whole checkpoint whose manifest was made to fit what was changed."""
    folder = path.parent
    facts = {"step": 3, "metric": None}
    (folder / manifest.NAME).unlink(missing_ok=True)
    manifest.write(folder, facts)
    state = {"w": np.zeros((4, 3), np.float32)}
    Checkpoints(folder.parent, config={"a": 1}, read_only=True).restore(state)


def metrics(path):
    read_metrics(path)
    MetricsWriter(path.parent, 2).close()


def written(folder, name, content):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def text(value):
    return json.dumps(value).encode()


def run_of(path):
    return trained.read_config(path.parent)


def evaluated(path):
    return evaluation_report.read(path.parent, RECORD)


def reported(path):
    return evaluation_report.add_to_report(path.parent, EVALUATION)


def result_of(path):
    return study.read_result(path.parent)


def settings_of(path):
    content = path.read_bytes()
    path.unlink()
    folders.claim(path.parent, "study")
    path.write_bytes(content)
    return study.keep_settings(path.parent, preset("pico"), "study")


def documents(path):
    return list(load_corpus(str(path), path.parent / "cache").train)


def token_ids(path):
    path.with_suffix(".bin").touch()
    if path.suffix == ".idx":
        path.with_suffix(".bin").write_bytes(b"\1\0" * 1000)
    ids = load_corpus(str(path.with_suffix(".bin")), path.parent / "cache").ids
    return len(ids.train[:]) + len(ids.validation[:])


def examples(path):
    return list(load_corpus(str(path), path.parent / "cache", examples=True).train)


def templated(path):
    """A Hugging Face directory with a chat template, which renders a conversation."""
    folder = path.parent / "model"
    shutil.copytree(HUGGING_FACE / "llama", folder)
    shutil.copy(path, folder / path.name)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    template = huggingface.read(folder).tokenizer.chat_template
    return template and template.answers(messages)


def gguf_text(words):
    return struct.pack("<Q", len(words)) + words


def gguf_content():
    """A file of llama.cpp with two keys and a tensor."""
    keys = gguf_text(b"general.architecture") + struct.pack("<I", 8) + gguf_text(b"llama")
    keys += gguf_text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2)
    keys += gguf_text(b"one") + gguf_text(b"two")
    tensor = gguf_text(b"output.weight") + struct.pack("<IQQIQ", 2, 32, 2, 8, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 2) + keys + tensor
    return head + bytes(-len(head) % 32) + bytes(68)


def llama_cpp(path):
    file = tensors.opened_gguf(path)
    return [tensors.Tensors(path.parent, [path]).read(n, file.shape(n)) for n in file.places]


def exported(path):
    return sparse_form.read_config(path.parent)


def counted(path):
    return goodput.seconds_by_category(goodput.read(path), 1.0)


ROWS = b'{"kind": "train", "step": 1, "loss": 2.0}\n{"kind": "eval", "step": 1}\n'
ATTEMPT = {"attempt": 1, "began": 1, "elapsed": 2, "seconds": {"step": 1}, "ended": True}
CHIP = (
    b'name = "x"\nbfloat16_tflops = 100\nmemory_gb = 80\nbandwidth_gb_s = 2000\n'
    b"[network]\nisland = 8\nfast_gb_s = 300\nslow_gb_s = 50\n"
)
INDEX = b"MMIDIDX\0\0" + struct.pack("<QBQQ4i4qq", 1, 8, 4, 1, *[250] * 4, *range(0, 2000, 500), 0)
STUDY = (
    b'trials = [2]\nshares = [1.0]\n[settings]\n"model.num_layers" = 1\n[budgets]\ntiny = 2e9\n'
    b"[space]\nrate = [1e-3]\n[arms.dense.settings]\n"
)
RUNS = b"parameters,sparsity,tokens,loss\n1000,0.5,2000,3.1\n3000,0.5,2000,3.0\n"
EXTRA = {
    "extra": {"config": {"a": 1}, "seconds": 1.0, "starts": [0]},
    "state": {"w": {"shape": [4, 3], "dtype": "float32"}},
}
REPORT = {"title": "t", "command": "c", "variants": [{"name": "sparse"}], "layouts": []}
CHIP_REPORT = chip_data.to_json(
    chip_data.ChipReport(
        chip_data.ChipFacts("abacus", "cpu", 8), "nano", 0.125, "c", "d", {"jax": "1"},
        (chip_data.RowResult("block", "t", "c", "done", (chip_data.Measure("l", 2.0),)),),
    )
)  # fmt: skip
EXAMPLE = text({"prompt": "one", "answer": "two"}) + b"\n"
OTHER_EXAMPLE = text({"prompt": "three", "answer": "four"}) + b"\n"
TEMPLATE = {
    "eos_token": "<e>",
    "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
}
QUESTION = {"context": "c", "choices": ["a", "b"], "answer": 1}
EXPORT = {"format": sparse_form.FORMAT, "model": MODEL.to_json()}
READERS = {
    "config.json": ("config.json", text(CONFIG.to_json()), adopted),
    "run.json": ("run.json", text(RECORD.to_json()), record_of),
    "tokenizer.json": ("tokenizer.json", BYTES._canonical(), Tokenizer.load),
    "tokenizer.json, imported": ("tokenizer.json", IMPORTED._canonical(), Tokenizer.load),
    "metrics.jsonl": ("metrics.jsonl", ROWS, metrics),
    "goodput.jsonl": ("goodput.jsonl", text(ATTEMPT), counted),
    "evaluation.json": ("evaluation.json", text(EVALUATION), evaluated),
    "report.json": ("report.json", text(REPORT), reported),
    "chip report": ("report.json", text(CHIP_REPORT), chip_data.read),
    "hardware TOML": ("chip.toml", CHIP, chips.read),
    "study TOML": ("study.toml", STUDY, design.read),
    "study CSV": ("runs.csv", RUNS, read_runs),
    "study result.json": ("result.json", text({"loss": 1.0}), result_of),
    "study settings.json": ("settings.json", text(preset("pico").to_json()), settings_of),
    "task file": ("task.jsonl", text(QUESTION) + b"\n", items.read_items),
    "corpus of JSON lines": ("corpus.jsonl", text({"text": "one two " * 9}) + b"\n", documents),
    "examples": ("examples.jsonl", EXAMPLE + OTHER_EXAMPLE, examples),
    "chat template": ("tokenizer_config.json", text(TEMPLATE), templated),
    "token ids": ("train.bin", np.arange(3000, dtype="<u2").tobytes(), token_ids),
    "index of token ids": ("train.idx", INDEX, token_ids),
    "corpus of text": ("corpus.txt", "d\u00e9 j\u00e0 vu ".encode() * 9, documents),
    "file of llama.cpp": ("model.gguf", gguf_content(), llama_cpp),
    "sparse export's config.json": ("config.json", text(EXPORT), exported),
    "checkpoint extra.json": ("3/extra.json", text(EXTRA), restored),
}
WHOLE_ELSEWHERE = ("report.json", "checkpoint extra.json")
"""Files of which these are only a part, so that even whole they are refused here."""


@contextlib.contextmanager
def bounded():
    """Ends what hangs, and refuses what allocates more than any of these files is worth."""

    def hang(number, frame):
        raise AssertionError(f"it took more than {HANG} seconds")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(HANG)
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", [name for name in READERS if name not in WHOLE_ELSEWHERE])
def test_what_was_written_is_read(name, tmp_path):
    file, content, read = READERS[name]
    with bounded():
        read(written(tmp_path, file, content))


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=12, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_what_nobody_wrote_is_read_or_refused_in_words(name, data, tmp_path_factory):
    check(name, data, tmp_path_factory)


@pytest.mark.nightly
@pytest.mark.parametrize("name", READERS)
@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_much_that_nobody_wrote(name, data, tmp_path_factory):
    check(name, data, tmp_path_factory)


def check(name, data, tmp_path_factory):
    """Draws a content for one of READERS, and has it read."""
    file, content, read = READERS[name]
    folder = tmp_path_factory.mktemp("any", numbered=True)
    path = written(folder, file, data.draw(damaged(content)))
    try:
        with bounded():
            read(path)
    except UserError as error:
        words = str(error)
        assert words and "Traceback" not in words and len(words) < 20_000
    shutil.rmtree(folder)


def edited(folder, file, content):
    """A copy of a Hugging Face directory in which one file has another content."""
    name, _, file = file.partition("/")
    copy = pathlib.Path(shutil.copytree(HUGGING_FACE / name, folder / name))
    (copy / file).write_bytes(content)
    return copy


@pytest.mark.parametrize(
    "file",
    [
        "gpt2/config.json", "gpt2/tokenizer.json", "gpt2/model.safetensors", "opt/vocab.json",
        "opt/merges.txt", "llama/config.json", "qwen3/config.json",
        "mistral/model.safetensors.index.json",
    ],
)  # fmt: skip
@settings(max_examples=6, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_hugging_face_directory_that_nobody_wrote(file, data, tmp_path_factory):
    content = (HUGGING_FACE / file).read_bytes()
    folder = tmp_path_factory.mktemp("any", numbered=True)
    # The header of a safetensors file says where all else lies.
    changed = damaged(content[:4096], 0).map(lambda head: head + content[4096:])
    path = edited(folder, file, data.draw(changed if "safe" in file else damaged(content)))
    try:
        with bounded():
            huggingface.read(path)
    except UserError as error:
        assert str(error)
    shutil.rmtree(folder)


@settings(max_examples=15, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_prepared_tokens_that_nobody_wrote_are_made_again(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("any", numbered=True)
    (folder / "text.jsonl").write_text("".join(f'{{"text": "a b c {n}"}}\n' for n in range(200)))
    cache = folder / "cache"
    corpus = load_corpus(str(folder / "text.jsonl"), cache)
    # A copy: the files themselves are mapped into memory.
    right = np.array(tokens.prepare_tokens(corpus, BYTES, cache).train.tokens)
    for path in sorted((cache / "tokens").rglob("train.*")):
        if data.draw(st.booleans()):
            path.write_bytes(data.draw(damaged(path.read_bytes())))
    with bounded():
        again = tokens.prepare_tokens(corpus, BYTES, cache)
    np.testing.assert_array_equal(again.train.tokens, right)
    shutil.rmtree(folder)
