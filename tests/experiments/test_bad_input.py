"""What a user can get wrong: refused in words before any work, and nothing is left behind."""

import json

import pytest
from main_job import PICO, checkpoint_steps, complaint, rows, write_corpus
from sparse_dataflow.config.model import ModelConfig

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
        (["--sequence=65"], ["--sequence=65", "64", "--positions=rotary"]),
        (["--accumulation=3"], ["--accumulation=3", "8", "legal: 1, 2, 4, 8"]),
        (["--batch=6", "--accumulation=4"], ["--accumulation=4", "1, 2, 3, 6"]),
        (["--corpus=nowhere/"], ["nowhere"]),
        (["--corpus=./nowhere"], ["nowhere", "does not exist", ".txt", ".jsonl"]),
        (["--corpus=python_stdlb"], ["python_stdlb", "python_stdlib"]),
        (["--scale=13b"], ["--scale=13b", "GiB", "this machine has", "fit"]),
        (["--scale=13b", "--batch=1"], ["--scale=13b", "--scale=", "--remat=full"]),
        (["--evolution=rigl"], ["--evolve_every=100", "--evolution=rigl", "step 1 of 2", "legal"]),
        (["--evolution=rigl", "--evolve_every=1", "--density=1"], ["rigl", "density 1", "below 1"]),
        (["--evolution=set", "--density=0.3"], ["Density 0.3", "legal", "1/8 (0.125)"]),
        (["--evolution=gradual", "--density=1"], ["gradual", "density 1 stores every block"]),
        (["--evolution=low_rank_tail", "--rank=4"], ["2 models in turn", "2 steps", "--evolve_at"]),
        (["--evolution=gradual"], ["3 models in turn", "2 steps", "--steps"]),
    ],
)
def test_illegal_flags(new, arguments, words):
    error = new(*arguments)
    assert all(word in error for word in words), error


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, ["has no .txt or .jsonl file"]),
        ({"a.md": b"text"}, ["has no .txt or .jsonl file"]),
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
        assert f"Run folder {tmp_path / name} cannot be written" in error and "--out" in error


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
    assert "another experiment" in resumed(experiment="gpt13b_dense")


def test_a_resumed_folder_that_is_none(refused, undisturbed, tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "nowhere"):
        error = refused(f"--resume={tmp_path / name}")
        assert "not a run folder" in error and "config.json" in error
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: "{", ["config.json is damaged"]),
        (lambda c: "\x00\xff", ["config.json is damaged"]),
        (lambda c: [], ["config.json is damaged"]),
        (lambda c: c | {"flags": 3}, ["config.json is damaged"]),
        (lambda c: c | {"flags": c["flags"] | {"density": "much"}}, ["density", "not a number"]),
        (lambda c: c | {"flags": c["flags"] | {"density": 7}}, ["--density=7", "(0, 1]"]),
        (lambda c: c | {"flags": c["flags"] | {"scale": "nana"}}, ["nana", "did you mean nano"]),
        (lambda c: {k: v for k, v in c.items() if k != "variants"}, ["damaged", "variants"]),
        (lambda c: c | {"variants": {"sparse": c["variants"]["sparse"]}}, ["damaged", "dense"]),
        (lambda c: c | {"corpus": "text"}, ["config.json is damaged"]),
        (lambda c: changed(c, "training", "steps", -1), ["config.json is damaged"]),
        (lambda c: changed(c, "training", "batch", 4), ["sparse.training.batch is 4 there", "8"]),
        (lambda c: changed(c, "model", "d_model", 256), ["sparse.model.d_model is 256 there"]),
        (lambda c: c | {"flags": c["flags"] | {"seed": 1}}, ["seed is 0 there and 1 here"]),
        (lambda c: c | {"tokenizer": "0" * 64}, ["tokenizer", "000000000000", "--resume"]),
        (lambda c: c | {"corpus": {"name": "x", "hash": "0"}}, ["has changed since"]),
        (lambda c: c | {"experiment": "gpt13b_dense"}, ["a run of gpt13b_dense", "--resume"]),
    ],
)
def test_a_config_that_was_changed(resumed, copy, change, words):
    config = change(json.loads((copy / "config.json").read_text()))
    text = config if isinstance(config, str) else json.dumps(config)
    (copy / "config.json").write_text(text, encoding="latin-1")
    error = resumed()
    assert all(word in error for word in words), error


def changed(config, part, name, value):
    config["variants"]["sparse"][part][name] = value
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
    config["flags"]["corpus"] = str(corpus)
    (copy / "config.json").write_text(json.dumps(config))
    error = refused(f"--resume={copy}")
    assert f"corpus {corpus} has changed since {copy} was started" in error
    assert checkpoint_steps(copy, "sparse") == [6, 9, 12]


@pytest.mark.slow
def test_checkpoints_of_another_config(job, copy):
    """Flags and resolved config agree with each other, but not with what the weights are from."""
    config = json.loads((copy / "config.json").read_text())
    config["flags"]["learning_rate"] = 0.5
    for variant in config["variants"].values():
        variant["training"]["learning_rate"] = 0.5
    (copy / "config.json").write_text(json.dumps(config))
    error = complaint(job.resume(copy))
    assert "was made under another config" in error and "learning_rate" in error
    assert checkpoint_steps(copy, "sparse") == [6, 9, 12]


@pytest.mark.slow
def test_damaged_metrics_are_passed_over(job, copy):
    """They are a record only: a run goes on without the rows that are lost."""
    (copy / "sparse" / "metrics.jsonl").write_bytes(b"\x00\xff\n[]\n{}\n")
    path = copy / "dense" / "metrics.jsonl"
    path.write_text(path.read_text().replace('"loss"', '"loss', 1))
    done = job.resume(copy)
    assert done.returncode == 0 and "passed over" in done.stderr, done.stderr
    assert [row["kind"] for row in rows(copy, "sparse")] == ["final"]
    assert [row["step"] for row in rows(copy, "dense")][:2] == [2, 3]
