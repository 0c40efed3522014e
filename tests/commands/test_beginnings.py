"""Which model of a run another run begins with, and what is said about it."""

import dataclasses
import json

import pytest

import sparse_dataflow as sd
from sparse_dataflow.commands.request import Request
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


@pytest.mark.slow
def test_what_a_run_begins_with_is_said_with_its_loss(place, capfd):
    config = request_of(place, run__init_variant="dense", run__out=str(place / "pruned")).config()
    run, log = sd.train(config, texts=TEXTS), capfd.readouterr().err
    words = f"begins with the dense model of {place / 'run'} after step 1, pruned to 12.5% of its"
    assert words in log
    rows = read_metrics(run.folder / "sparse" / "metrics.jsonl")
    [before] = [row for row in rows if row["kind"] == "eval" and row["step"] == 0]
    assert f"held-out loss before the first step {before['loss']:.4f}" in log
    adapted = request_of(place, training__adapter_rank=2, run__out=str(place / "adapted"))
    assert sd.train(adapted.config(), texts=TEXTS).finished
    assert f"adapters on the sparse model of {place / 'run'}" in capfd.readouterr().err


@pytest.mark.slow
def test_a_resumed_run_begins_with_the_model_of_its_record(place, monkeypatch):
    """As runs of earlier versions did, whose configs name no model and which took the twin."""
    out = place / "stopped"
    config = request_of(place, run__init_variant="dense", run__out=str(out)).config()
    with monkeypatch.context() as patch:
        patch.setattr("sparse_dataflow.commands.job.Job._trainer", interrupted)
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
    monkeypatch.setattr("sparse_dataflow.commands.job.Job._trainer", interrupted_after_start)
    with pytest.raises(KeyboardInterrupt):
        sd.train(dataclasses.replace(config), texts=TEXTS, resume=True)
    assert variants[-1] == "dense"


def interrupted(*arguments):
    raise KeyboardInterrupt


def interrupted_after_start(job, *arguments):
    job._weights()
    raise KeyboardInterrupt
