"""Which model of a run another run begins with, and what is said about it."""

import dataclasses
import json
import types

import pytest

import sparse_dataflow as sd
from sparse_dataflow.commands import train
from sparse_dataflow.commands.job import build
from sparse_dataflow.commands.request import Request
from sparse_dataflow.core.training.programs import compile_programs
from sparse_dataflow.data import cache
from sparse_dataflow.evaluation import run_files
from sparse_dataflow.interchange import starting_point
from sparse_dataflow.monitoring.metrics import read_metrics

TEXTS = [
    f"Document {number} says that {number} follows {number - 1}. " * 30 for number in range(40)
]
SHORT = {
    "training.steps": 1, "training.batch": 2, "training.sequence": 16, "run.trackers": "none",
    "run.twin": "no",
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run of a sparse model and its twin."""
    folder = tmp_path_factory.mktemp("beginnings")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "FOLDER", folder / "cache")
        config = sd.preset("pico").change(
            model__num_layers=1, model__vocab_size=300, sparsity__block=16, run__twin="yes",
            training__sequence=16, training__batch=2, training__steps=1, run__trackers="none",
            run__out=str(folder / "run"),
        )  # fmt: skip
        sd.train(config, texts=TEXTS)
        yield folder


def request_of(place, **changes):
    paths = {name.replace("__", "."): value for name, value in changes.items()}
    return Request(changes={**SHORT, "run.init_from": str(place / "run"), **paths})


@pytest.mark.parametrize(
    ("sparse", "named", "expected"),
    [
        (True, "", "sparse"), (False, "", "dense"), (True, "dense", "dense"),
        pytest.param(False, "sparse", "sparse", marks=pytest.mark.slow),
        pytest.param(False, "dense", "dense", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_setting_chooses_the_model_else_the_kind_of_the_new_run(place, sparse, named, expected):
    config = request_of(place, run__init_variant=named).config(sparse=sparse)
    start = starting_point.read_for(config)
    assert start.provenance["variant"] == expected
    assert bool(start.model.sparse_projections) == (expected == "sparse")
    assert start.words == f"the {expected} model of {place / 'run'} after step 1"
    if expected == "sparse" and sparse:  # Its layouts come with it, so nothing is pruned.
        assert config.sparsity.block == 16


@pytest.mark.parametrize("corpus", [{}, {"data__corpus": "python_stdlib"}])
def test_a_model_without_a_text_says_what_it_trains_on(place, monkeypatch, capfd, corpus):
    monkeypatch.setattr(train, "train", lambda *_, **__: types.SimpleNamespace(status=0))
    assert train.train_experiment(request_of(place, **corpus), "gpt13b_sparse") == 0
    words = "".join(capfd.readouterr())
    assert ("no --corpus is given, so it trains on python_stdlib" in words) == (not corpus)


@pytest.mark.parametrize("named", ["narrow", "sparse"])
def test_a_model_that_there_is_not_is_refused(place, named, tmp_path):
    folder = place / "run"
    if named == "sparse":
        folder = sd.save(sd.load(folder), tmp_path / "directory", "dense")
    request = request_of(place, run__init_variant=named, run__init_from=str(folder))
    with pytest.raises(sd.UserError, match=r"legal: sparse, dense|which has one; leave it out"):
        request.config()
    with pytest.raises(
        sd.UserError, match=r"init_variant names a model of a run; legal with run\.init_from"
    ):
        sd.preset("pico").change(run__init_variant="sparse")


def test_weights_that_do_not_fit_are_refused_before_a_folder_or_a_corpus(place, monkeypatch):
    monkeypatch.setattr(train.run_folder, "opened", None)
    for changes, words in (
        ({"sparsity__block": 32, "sparsity__density": 0.25}, "block size"),
        ({"model__experts": 4, "model__top_k": 1}, r"legal: model\.top_k of 2 or more"),
    ):
        config = sd.preset(place / "run").change(run__twin="no", **changes)
        with pytest.raises(sd.UserError, match=words):
            sd.train(config, texts=TEXTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sparsity__block": 32, "sparsity__density": 0.25}, "block size"),
        ({"model__norm": "rmsnorm"}, "norm is layernorm"),
    ],
)
def test_weights_that_do_not_fit_leave_no_run(place, changes, words, tmp_path):
    config = sd.preset(place / "run").change(
        training__steps=1, training__batch=2, run__twin="no", run__out=str(tmp_path / "run"),
        **changes,
    )  # fmt: skip
    with pytest.raises(sd.UserError, match=words):
        sd.train(config, texts=TEXTS)
    assert not (tmp_path / "run").exists()


def test_what_a_run_begins_with_is_said_with_its_loss(place, capfd):
    config = request_of(place, run__init_variant="dense", run__out=str(place / "pruned")).config()
    run, log = sd.train(config, texts=TEXTS), capfd.readouterr().err
    words = f"begins with the dense model of {place / 'run'} after step 1, pruned to 12.5% of its"
    assert words in log
    rows = read_metrics(run.folder / "sparse" / "metrics.jsonl")
    [before] = [row for row in rows if row["kind"] == "eval" and row["step"] == 0]
    assert f"held-out loss before the first step {before['loss']:.4f} nats, " in log
    adapted = request_of(place, training__adapter_rank=2, run__out=str(place / "adapted"))
    assert sd.train(adapted.config(), texts=TEXTS).finished
    assert f"adapters on the sparse model of {place / 'run'}" in capfd.readouterr().err


@pytest.mark.slow
def test_a_resumed_run_begins_with_the_model_of_its_record(place, monkeypatch):
    """As runs of earlier versions did, whose configs name no model and which took the twin."""
    out = place / "stopped"
    config = request_of(place, run__init_variant="dense", run__out=str(out)).config()
    with monkeypatch.context() as patch:
        patch.setattr("sparse_dataflow.commands.job.train_models._trainer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sd.train(config, texts=TEXTS)
    fields = json.loads((out / run_files.CONFIG).read_text())
    del fields["run"]["init_variant"]
    (out / run_files.CONFIG).write_text(json.dumps(fields))
    read, variants = starting_point.read, []

    def recording(folder, variant="", preferred="sparse"):
        variants.append(variant or preferred)
        return read(folder, variant, preferred)

    monkeypatch.setattr(starting_point, "read", recording)
    config = config.change(run__init_variant="")
    monkeypatch.setattr(
        "sparse_dataflow.commands.job.train_models._trainer", interrupted_after_start
    )
    with pytest.raises(KeyboardInterrupt):
        sd.train(dataclasses.replace(config), texts=TEXTS, resume=True)
    assert variants[-1] == "dense"


def test_programs_that_outlive_a_run_leave_its_parameter_server(place, tmp_path, monkeypatch):
    kept = []

    def kept_programs(*arguments):
        kept.append(compile_programs(*arguments))
        return kept[-1]

    monkeypatch.setattr(build, "compile_programs", kept_programs)
    server, out = str(tmp_path / "server"), str(tmp_path / "run")
    request = request_of(
        place, run__out=out, parallel__executor="relay", parallel__server_dir=server
    )
    sd.train(request.config(), texts=TEXTS)
    assert sd.train(request.config(), texts=TEXTS, resume=True).finished and kept


def interrupted(*arguments):
    raise KeyboardInterrupt


def interrupted_after_start(config, model, *arguments):
    model.start()
    raise KeyboardInterrupt
