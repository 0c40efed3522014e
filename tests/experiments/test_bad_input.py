"""What a user can get wrong: refused with a message before any work, and nothing is left behind."""

import json
import shutil

import pytest
from main_job import PICO, checkpoint_steps, rows, write_corpus

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.files.errors import UserError


@pytest.fixture
def new(refused, job, tmp_path):
    """new(flag, ...): a new run is refused, and leaves no folder."""

    def new(*arguments, **options):
        corpus = [] if any("corpus" in a for a in arguments) else [f"--corpus={job.corpus}"]
        before = sorted(tmp_path.rglob("*"))
        error = refused(*PICO, "--steps=2", *corpus, *arguments, **options)
        assert sorted(tmp_path.rglob("*")) == before
        return error

    return new


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--block=48"], ["block", "48", "128", "legal", "16", "32", "64"]),
        (["--block=256"], ["block", "256", "128", "legal"]),
        (["--density=0.01"], ["Density 0.01", "legal", "1/8 (0.125)"]),
        (["--pattern=cyclic", "--density=0.3"], ["Density 0.3", "legal", "1/8 (0.125)"]),
        (
            ["--set=training.sequence=65"],
            ["training.sequence=65", "64", "model.positions=rotary"],
        ),
        (
            ["--set=training.micro_batches=3"],
            ["training.micro_batches=3", "8", "legal: 1, 2, 4, 8"],
        ),
        (
            ["--batch=6", "--set=training.micro_batches=4"],
            ["training.micro_batches=4", "1, 2, 3, 6"],
        ),
        (["--corpus=nowhere/"], ["nowhere"]),
        (["--corpus=./nowhere"], ["nowhere", "does not exist", ".txt", ".jsonl"]),
        (["--corpus=python_stdlb"], ["python_stdlb", "python_stdlib"]),
        (["--scale=13b"], ["--scale=13b needs", "GiB are usable", "the largest scale that fits"]),
        (
            ["--scale=13b", "--batch=1"],
            ["--scale=13b needs", "the largest scale that fits is --scale="],
        ),
        (
            ["--evolution=rigl"],
            ["evolution.every=100", "--evolution=rigl", "step 1 of 2", "legal"],
        ),
        (
            ["--evolution=rigl", "--set=evolution.every=1", "--density=1"],
            ["rigl", "density 1", "below 1"],
        ),
        (["--evolution=set", "--density=0.3"], ["Density 0.3", "legal", "1/8 (0.125)"]),
        (["--evolution=gradual", "--density=1"], ["gradual", "density 1 stores every block"]),
        (
            ["--evolution=low_rank_tail", "--set=sparsity.rank=4"],
            ["low_rank_tail", "sparse_to_dense"],
        ),
        (["--evolution=gradual"], ["3 phases", "2 steps", "--steps"]),
    ],
)
def test_illegal_flags(new, arguments, words):
    error = new(*arguments)
    assert all(word in error for word in words), error


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, ["has no .txt, .md", ".parquet file"]),
        ({"a.csv": b"text"}, ["has no .txt, .md", ".parquet file"]),
        ({"a.txt": b"", "b.txt": b" \n"}, ["empty", "hold no text"]),
        ({"a.txt": b"text", "b.txt": b"caf\xe9"}, ["b.txt", "not UTF-8", "byte 3"]),
        ({"a.jsonl": b'{"text": "yes"}\n{"words": "no"}\n'}, ["a.jsonl, line 2", '"text"']),
        ({"a.txt": b"too short to fill a window\n" * 3}, ["too few", "64"]),
    ],
)
def test_corpora_that_cannot_be_trained_on(new, tmp_path, files, words):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    error = new(f"--corpus={folder}")
    assert all(word in error for word in words), error


def test_a_run_folder_that_cannot_be_made(new, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for name in ("file", "file/run", "file/deeper/run"):
        error = new(f"--out={tmp_path / name}")
        assert f"{tmp_path / name} cannot be written" in error and "--out" in error


def test_refused_runs_remove_only_what_they_made(new, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("keep")
    new("--block=48", f"--out={mine}")
    new("--block=48", f"--out={mine / 'deep' / 'deeper'}")
    assert [p.name for p in mine.iterdir()] == ["notes.txt"]


def test_a_width_that_heads_do_not_divide():
    with pytest.raises(UserError, match=r"d_model 100 .* num_heads 3; legal head counts: 1, 2, 4"):
        ModelConfig(1, 100, 3, 400, 300, 8)


@pytest.fixture
def resumed(refused, copy):
    """resumed(flag, ...): going on with the copy is refused, and changes no file of it."""

    def resumed(*arguments, **options):
        contents = lambda: {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()}  # noqa: E731
        before = contents()
        error = refused(f"--resume={copy}", *arguments, **options)
        assert contents() == before
        return error

    return resumed


def test_flags_that_contradict_the_run(resumed):
    error = resumed("--density=0.5", "--steps=20")
    assert "--density=0.5 (saved: 0.25)" in error and "--steps=20 (saved: 12)" in error
    assert "a run of gpt13b_sparse" in resumed(experiment="gpt13b_dense")


def test_a_resumed_folder_that_is_none(refused, undisturbed, tmp_path):
    (tmp_path / "empty").mkdir()
    for name, words in (("empty", "not a run folder"), ("nowhere", "does not exist; no run is in")):
        assert words in refused(f"--resume={tmp_path / name}")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("config", lambda c: "{", ["config.json is damaged"]),
        ("config", lambda c: "\x00\xff", ["config.json is damaged"]),
        ("config", lambda c: [], ["config.json is damaged"]),
        ("config", lambda c: c | {"training": 3}, ["config.json is damaged"]),
        ("config", lambda c: changed(c, "sparsity", "density", "much"), ["density", "number"]),
        ("config", lambda c: changed(c, "sparsity", "density", 7), ["density=7", "(0, 1]"]),
        ("config", lambda c: changed(c, "model", "norm", "none"), ["norm=none", "layernorm"]),
        ("config", lambda c: {k: v for k, v in c.items() if k != "data"}, ["damaged", "data"]),
        ("config", lambda c: changed(c, "run", "twin", False), ["run.json is damaged", "steps"]),
        ("config", lambda c: {"flags": {}, "variants": {}}, ["older sparse_dataflow"]),
        ("config", lambda c: changed(c, "training", "batch", 4), ["training.batch is 8 there"]),
        ("config", lambda c: changed(c, "training", "seed", 1), ["training.seed is 0 there"]),
        ("run", lambda c: "{", ["run.json is damaged"]),
        ("run", lambda c: c | {"corpus": 3}, ["run.json is damaged"]),
        ("run", lambda c: c | {"steps": {"sparse": 12}}, ["run.json is damaged"]),
        ("run", lambda c: c | {"steps": {"sparse": 12, "dense": -1}}, ["run.json is damaged"]),
        ("run", lambda c: c | {"tokenizer": "0" * 64}, ["tokenizer", "000000000000", "--resume"]),
        ("run", lambda c: c | {"corpus_hash": "0"}, ["has changed since"]),
        (
            "run",
            lambda c: c | {"experiment": "gpt13b_dense"},
            ["a run of gpt13b_dense", "--resume"],
        ),
        ("run", lambda c: c | {"experiment": "x; rm"}, ["run.json is damaged"]),
    ],
)
def test_a_config_or_record_that_was_changed(resumed, copy, file, change, words):
    path = copy / f"{file}.json"
    fields = change(json.loads(path.read_text()))
    text = fields if isinstance(fields, str) else json.dumps(fields)
    path.write_text(text, encoding="latin-1")
    error = resumed()
    assert all(word in error for word in words), error


def test_checkpoints_of_another_model_are_refused_before_anything_is_written(resumed, copy):
    """Those of the second model are read after those of the first, whose files stay."""
    shutil.rmtree(copy / "dense" / "checkpoints")
    shutil.copytree(copy / "sparse" / "checkpoints", copy / "dense" / "checkpoints")
    assert "another config" in resumed()


def changed(config, part, name, value):
    config[part][name] = value
    return config


@pytest.mark.parametrize("content", [None, b"{", b"\xff\xfe", b"[]", b"other"])
def test_a_tokenizer_that_was_changed(resumed, copy, content):
    path = copy / "tokenizer.json"
    if content is None:
        path.unlink()
    elif content == b"other":
        fields = json.loads(path.read_text())
        fields["merges"][0], fields["merges"][1] = fields["merges"][1], fields["merges"][0]
        path.write_text(json.dumps(fields))
    else:
        path.write_bytes(content)
    error = resumed()
    assert "tokenizer" in error
    assert "cannot be read" in error or "is not the one" in error


def test_a_corpus_that_changed_since(refused, copy, tmp_path):
    corpus = write_corpus(tmp_path / "corpus", seed=1)
    config = json.loads((copy / "config.json").read_text())
    config["data"]["corpus"] = str(corpus)
    (copy / "config.json").write_text(json.dumps(config))
    error = refused(f"--resume={copy}")
    assert f"corpus {corpus} has changed since {copy} was started" in error
    assert checkpoint_steps(copy, "sparse") == [6, 9, 12]


@pytest.mark.slow
def test_damaged_metrics_are_passed_over(job, copy):
    """They are a record only: a run goes on without the rows that are lost."""
    (copy / "sparse" / "metrics.jsonl").write_bytes(b"\x00\xff\n[]\n{}\n")
    path = copy / "dense" / "metrics.jsonl"
    path.write_text(path.read_text().replace('"loss"', '"loss', 1))
    done = job.resume(copy)
    assert done.returncode == 0 and "damaged; skipped" in done.stderr, done.stderr
    assert [row["kind"] for row in rows(copy, "sparse")] == ["final"]
    assert [row["step"] for row in rows(copy, "dense")][:2] == [2, 3]
