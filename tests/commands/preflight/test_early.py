"""What is wrong with a command line and its folders is said before jax is loaded."""

import os
import subprocess
import sys
import textwrap

import pytest

import sparse_dataflow as sd
from sparse_dataflow.commands import command_line, new_folder
from sparse_dataflow.commands.preflight import early, settling
from sparse_dataflow.commands.request import NAMED
from sparse_dataflow.data.corpus import names
from sparse_dataflow.files.errors import UserError

REFUSED = [
    (["--corpus=./nowhere"], "The corpus nowhere does not exist"),
    (["--corpus=~/no/such/place.txt"], "does not exist"),
    (["--corpus=empty"], "The corpus empty has no .txt"),
    (["--corpus=hidden"], "The corpus hidden has no .txt"),
    (["--corpus=text:0.5,empty:0.5"], "The corpus empty has no .txt"),
    (["--corpus=tinyshakespear"], "Did you mean 'tiny_shakespeare'?"),
    (["--corpus=ids"], "has token ids and no text to train a tokenizer on"),
    (["--set=data.validation=./nowhere.jsonl"], "The corpus nowhere.jsonl does not exist"),
    (["--set=data.tokenizer=./nowhere"], "data.tokenizer=./nowhere does not exist"),
    (["--set=data.tokenizer=none"], "data.tokenizer=none is for a corpus of token ids"),
    (["--set=run.init_from=./nowhere"], "--init_from=./nowhere does not exist"),
    (["--set=training.teacher=./nowhere"], "training.teacher=./nowhere does not exist"),
    (["--set=run.trackers=nonesuch"], "run.trackers has 'nonesuch'"),
    (["--out=taken"], "taken holds files that gpt13b_sparse may not replace (mine)"),
    (["--out=taken/mine/run"], "Not a directory"),
    (["--set=run.mirror=taken"], "legal: run.mirror with a missing or empty folder"),
    (["--block=48"], "Block 48 does not divide"),
    (["--density=0.3"], "Density 0.3 has no balanced layout"),
    (["--evolution=gradual", "--steps=1"], "with 1 steps one of them has none"),
    (["--evolution=rigl:every=100", "--steps=50"], "leaves --evolution=rigl no update"),
    (["--evolution=set:every=9", "--steps=3"], "leaves --evolution=set no update"),
]

SCRIPT = """
import sys
from sparse_dataflow.commands import command_line
from sparse_dataflow.commands.preflight import early
from sparse_dataflow.commands.request import NAMED

for flags in {flags!r}:
    [request] = command_line.arguments(["", *flags], tuple(NAMED), None)
    try:
        early.refuse(request, "gpt13b_sparse")
        print("taken")
    except ValueError as error:
        print(error)
    assert not {{"jax", "orbax", "flax"}} & set(sys.modules), flags
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with corpora and folders that runs are started beside."""
    root = tmp_path_factory.mktemp("early")
    files = ("text/a.txt", "hidden/.a.txt", "hidden/.b/a.txt", "ids/train.bin", "taken/mine")
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("some words\n" * 50)
    (root / "empty/below").mkdir(parents=True)
    return root


def request(*flags):
    [made] = command_line.arguments(["", "--scale=pico", *flags], tuple(NAMED), None)
    return made


def test_what_folders_and_settings_say_by_themselves_is_refused_without_jax(place):
    lines = [
        [
            *(["--corpus=text"] if "--corpus" not in flags[0] else []),
            *(["--scale=pico"] if "init_from" not in flags[0] else []),
            *flags,
        ]
        for flags, _ in REFUSED
    ]
    script = textwrap.dedent(SCRIPT).format(flags=lines)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=place, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    answers = done.stdout.splitlines()
    assert len(answers) == len(REFUSED)
    for (flags, words), answer in zip(REFUSED, answers, strict=True):
        assert words in answer, flags
    assert not (place / "runs").exists() and list((place / "taken").iterdir()) == [
        place / "taken/mine"
    ]


@pytest.mark.parametrize(
    "flags",
    [
        ["--corpus=text"],
        ["--corpus=text/a.txt", "--out=new/folder"],
        ["--corpus=text", "--out=empty/below"],
        ["--corpus=ids", "--set=data.tokenizer=none"],
        ["--corpus=text", "--evolution=rigl:every=10", "--steps=50"],
        ["--corpus=./nowhere", "--chips=h100:8"],
        ["--corpus=./nowhere", "--describe"],
        ["--corpus=s3://bucket/text"],
        ["--corpus=hf:allenai/c4/en", "--set=data.tokenizer=gpt2"],
        ["--corpus=tiny_shakespeare"],
    ],
)
def test_what_may_be_there_is_left_to_whoever_reads_it(flags, place, monkeypatch):
    monkeypatch.chdir(place)
    if flags == ["--corpus=tiny_shakespeare"]:
        with pytest.raises(UserError, match="stream the same text"):
            early.refuse(request(*flags), "gpt13b_sparse")
        return
    early.refuse(request(*flags), "gpt13b_sparse")
    assert not (place / "new").exists()


def test_the_scale_that_a_machine_decides_is_checked_where_there_is_none_but_cpus(
    place, monkeypatch
):
    monkeypatch.chdir(place)
    [auto] = command_line.arguments(["", "--corpus=text", "--block=48"], tuple(NAMED), None)
    monkeypatch.setattr(early.detect, "only_cpu", lambda: False)
    early.refuse(auto, "gpt13b_sparse")
    monkeypatch.setattr(early.detect, "only_cpu", lambda: True)
    with pytest.raises(UserError, match="Block 48 does not divide"):
        early.refuse(auto, "gpt13b_sparse")


@pytest.mark.parametrize("name", ["config.json", "run.json"])
def test_half_a_run_is_not_a_run(name, tmp_path):
    (tmp_path / name).write_text("{}")
    new_folder.refuse_run(tmp_path, "--out")
    for each in ("config.json", "run.json"):
        (tmp_path / each).write_text("{}")
    with pytest.raises(UserError, match="holds a run already; pass --resume="):
        new_folder.refuse_occupied(str(tmp_path), "gpt13b_sparse", "--out")


def test_the_search_for_a_text_ends_at_the_first(tmp_path, monkeypatch):
    """A corpus of a million files is not listed twice."""
    (tmp_path / "a.txt").write_text("words")
    for name in ("b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "d.txt").write_text("words")
    walked = []
    walk = os.walk

    def noted(root, **options):
        for each in walk(root, **options):
            walked.append(each[0])
            yield each

    monkeypatch.setattr("sparse_dataflow.data.local_files.os.walk", noted)
    names.refuse_missing(str(tmp_path), tmp_path)
    assert walked == [str(tmp_path)]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"data__corpus": "./nowhere"}, "The corpus nowhere does not exist"),
        ({"sparsity__block": 48}, "Block 48 does not divide"),
        ({"run__trackers": "nonesuch"}, "run.trackers has 'nonesuch'"),
        ({"evolution__method": "gradual", "training__steps": 1}, "with 1 steps"),
    ],
)
def test_a_call_from_python_is_refused_before_its_plan(changes, words, tmp_path, monkeypatch):
    def planned(*_):
        raise AssertionError("the run was planned first")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(settling, "settled", planned)
    with pytest.raises(UserError, match=words):
        sd.train(sd.preset("pico").change(**changes))
    assert not list(tmp_path.iterdir())


def test_a_process_of_several_leaves_folders_to_the_time_after_they_joined(place, monkeypatch):
    monkeypatch.chdir(place)
    several = [f"--set=parallel.{name}" for name in ("coordinator=a:1", "processes=2", "process=1")]
    early.refuse(request("--corpus=./nowhere", "--out=taken", *several), "gpt13b_sparse")
    with pytest.raises(UserError, match="Block 48"):
        early.refuse(request("--block=48", *several), "gpt13b_sparse")
