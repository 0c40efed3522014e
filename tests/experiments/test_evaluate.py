"""One command evaluates a run: the numbers agree with the run's own, or what is wrong is named."""

import importlib.util
import json

import jax
import pytest
from exit_status import exit_status
from main_job import rows

from experiments import evaluate
from sparse_dataflow.commands import library
from sparse_dataflow.commands.models import evaluation_report
from sparse_dataflow.commands.train import train
from sparse_dataflow.data import cache
from sparse_dataflow.evaluation.run_files import read_config
from sparse_dataflow.interchange import huggingface
from sparse_dataflow.interchange.load import load
from sparse_dataflow.reporting.report_data import ReportData

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="the extra eval is not installed"
)

GOOD = {"context": "the", "choices": [" of", " and"], "answer": 1}


@pytest.fixture
def evaluated(job, tmp_path, monkeypatch, capsys):
    """evaluated(flag, ...) -> (exit status, stdout, the error's line) of `evaluate` in this
    process."""

    monkeypatch.setattr(cache, "FOLDER", job.cache / "sparse_dataflow")
    monkeypatch.chdir(tmp_path)

    def evaluated(*arguments):
        status = exit_status(evaluate, *arguments)
        out, err = capsys.readouterr()
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        return status, out, errors[0] if errors else ""

    return evaluated


def test_a_run_and_its_twin(evaluated, copy):
    mine = [GOOD | {"context": context} for context in ("the", "of", "and")]
    (copy / "mine.jsonl").write_text("".join(json.dumps(item) + "\n" for item in mine))
    tasks = f"cloze,last_word,{copy / 'mine.jsonl'}"
    status, out, error = evaluated(
        f"--run={copy}", f"--tasks={tasks}", "--num_fewshot=0,1", "--items=9", "--limit=6"
    )
    assert (status, error) == (0, "")
    result = json.loads((copy / "evaluation.json").read_text())
    assert list(result["models"]) == ["sparse", "dense"]
    first, *asked = result["rows"]
    for name, told in first["models"].items():
        # The same windows as the run's last evaluation, so the same loss.
        final = rows(copy, name)[-1]
        assert final["kind"] == "final"
        assert told["value"] == pytest.approx(final["loss"], rel=1e-4)
        assert told["bits_per_byte"] == pytest.approx(final["bits_per_byte"], rel=1e-4)
        assert result["models"][name]["step"] == final["step"]
    both = [first["models"][name]["value"] for name in ("sparse", "dense")]
    assert first["paired"]["dense"]["difference"] == pytest.approx(both[0] - both[1])
    assert [(row["task"], row["shots"]) for row in asked] == [
        (task, shots) for shots in (0, 1) for task in ("cloze", "last_word", "mine")
    ]
    for row in asked:
        assert row["items"] == (3 if row["task"] == "mine" else 6) and row["metric"] == "acc"
        assert row["chance"] == {"cloze": 0.25, "last_word": 0.0, "mine": 0.5}[row["task"]]
        assert set(row["baselines"]) == {"unigram", "bigram"}
        for told in row["models"].values():
            assert told["value"] == pytest.approx(sum(told["values"]) / len(told["values"]))
    for word in ("cloze", "1-shot", "chance", "bigram", "sparse", "dense", "clustered by document"):
        assert word in out
    # A prompt of two questions does not fit every item into 64 tokens, or it does: both are said.
    assert all("lost their beginning" in note for note in result["notes"])
    report = ReportData.from_json(json.loads((copy / "report.json").read_text()))
    assert report.evaluation == evaluation_report.data(result)
    assert [v.name for v in report.variants] == ["sparse", "dense"]
    page = (copy / "report.html").read_text()
    assert 'id="evaluation"' in page and "last_word, 1-shot" in page


def evaluation_refusal(evaluated, *arguments):
    status, _, error = evaluated(*arguments)
    assert status == 2
    return error


@pytest.mark.slow
def test_an_export_is_evaluated_alone_and_beside_its_run(evaluated, copy, job, tmp_path):
    model = load(copy, "sparse")
    for form in huggingface.FORMS:
        library.save(model, tmp_path / form, form)
    options = ("--tasks=last_word", "--num_fewshot=0", "--items=4")
    status, _, error = evaluated(f"--run={tmp_path / 'sparse'}", f"--corpus={job.corpus}", *options)
    assert (status, error) == (0, "")
    alone = json.loads((tmp_path / "sparse" / "evaluation.json").read_text())
    assert list(alone["models"]) == ["sparse"] and alone["models"]["sparse"]["step"] == 0
    tokens = alone["rows"][0]["items"]
    assert any(note.endswith(f"of the first {tokens:,} tokens.") for note in alone["notes"])
    # The same held-out windows as those of the run's last evaluation.
    final = rows(copy, "sparse")[-1]
    assert alone["rows"][0]["models"]["sparse"]["value"] == pytest.approx(final["loss"], rel=1e-4)
    status, _, error = evaluated(f"--run={copy}", f"--against={tmp_path / 'dense'}", *options)
    assert (status, error) == (0, "")
    first, *_ = json.loads((copy / "evaluation.json").read_text())["rows"]
    (compared,) = first["paired"].values()
    assert compared["difference"] == pytest.approx(0, abs=1e-4)
    # Several, a model of a run by its name among them.
    against = f"--against={tmp_path / 'sparse'},{copy}:dense,{tmp_path / 'dense'}"
    status, out, error = evaluated(f"--run={copy}", against, *options)
    assert (status, error) == (0, "") and "- dense (95%)" in out
    first, *_ = json.loads((copy / "evaluation.json").read_text())["rows"]
    names = ["sparse", "sparse of sparse", "dense", "dense of dense"]
    assert list(first["models"]) == names and list(first["paired"]) == names[1:]
    assert first["paired"]["sparse of sparse"]["difference"] == pytest.approx(0, abs=1e-4)
    none = f"--against={copy}:narrow"
    assert f"{copy} has no narrow model" in evaluation_refusal(evaluated, f"--run={copy}", none)
    (tmp_path / "other.txt").write_text("Another corpus.")
    other = (f"--run={copy}", f"--corpus={tmp_path / 'other.txt'}")
    assert "other.txt contradicts the run" in evaluation_refusal(evaluated, *other)


def test_thresholds_need_one_device(evaluated, copy, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    said = evaluation_refusal(evaluated, f"--run={copy}", "--activation_sparsity=0.4")
    assert "needs one device, and this process has 2; legal here: 0" in said


@pytest.mark.slow
def test_thresholds_change_the_loss_and_are_noted(evaluated, copy):
    options = ("--variant=dense", "--tasks=last_word", "--num_fewshot=0", "--items=4")
    status, out, error = evaluated(f"--run={copy}", "--activation_sparsity=0.6", *options)
    assert (status, error) == (0, "") and "smallest 60% of each projection's inputs" in out
    first, *_ = json.loads((copy / "evaluation.json").read_text())["rows"]
    value, exact = first["models"]["dense"]["value"], rows(copy, "dense")[-1]["loss"]
    assert 1e-4 < abs(value - exact) < 1


def test_runs_that_cannot_be_evaluated(evaluated, copy, tmp_path):
    assert "No run is named; give a run folder" in evaluation_refusal(evaluated)
    assert "not a run folder" in evaluation_refusal(evaluated, f"--run={tmp_path}")
    run = f"--run={copy}"
    assert "whole numbers" in evaluation_refusal(evaluated, run, "--num_fewshot=0,x")
    assert "--items=1" in evaluation_refusal(evaluated, run, "--items=1")
    assert "newest, best or a step" in evaluation_refusal(evaluated, run, "--checkpoint=last")
    (copy / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in evaluation_refusal(evaluated, run)
    assert not (copy / "evaluation.json").exists()


@pytest.fixture
def no_loading(monkeypatch):
    """Fails where a model is loaded."""
    from sparse_dataflow.commands.models import evaluate

    monkeypatch.setattr(evaluate, "load", lambda *args: pytest.fail("a model was loaded"))


def test_tasks_that_cannot_be_asked(evaluated, copy, tmp_path, no_loading):
    run = f"--run={copy}"
    error = evaluation_refusal(evaluated, run, "--tasks=clozes")
    assert "no task 'clozes'" in error and "Did you mean cloze?" in error
    assert "needs Python source" in evaluation_refusal(evaluated, run, "--tasks=call_name")
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"context": "a"}) + "\n")
    assert "line 1, lacks choices and answer" in evaluation_refusal(
        evaluated, run, f"--tasks={path}"
    )
    path.write_text(json.dumps(GOOD) + "\n")
    assert "too few for 5 different ones" in evaluation_refusal(evaluated, run, f"--tasks={path}")
    assert not (copy / "evaluation.json").exists()


def test_without_a_network_the_own_tasks_are_named(evaluated, copy, no_loading, monkeypatch):
    import datasets

    def unreachable(path, **kwargs):
        raise ConnectionError(f"Couldn't reach {path!r} on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    error = evaluation_refusal(evaluated, f"--run={copy}", "--tasks=cloze,hellaswag")
    assert "data of the task hellaswag cannot be downloaded (Couldn't reach" in error
    assert "last_word, continuation, cloze, agreement, copying, " in error
    assert error.endswith(" need no network.")
    assert not (copy / "evaluation.json").exists()


def test_runs_that_cannot_be_compared(evaluated, copy, undisturbed):
    record = json.loads((copy / "run.json").read_text())
    record["corpus_hash"] = "0" * 64
    (copy / "run.json").write_text(json.dumps(record))
    error = evaluation_refusal(evaluated, f"--run={undisturbed}", f"--against={copy}")
    assert "different corpora" in error
    assert "has changed since" in evaluation_refusal(evaluated, f"--run={copy}")


@pytest.mark.slow
def test_a_run_is_compared_with_the_run_of_another_corpus_that_it_began_with(
    evaluated, undisturbed, tmp_path
):
    """The usual finetuning; the held-out text is that of the first run."""
    (tmp_path / "sea").mkdir()
    for number in range(60):
        text = f"{number} waves and {number + 1} gulls. " * 40
        (tmp_path / "sea" / f"{number}.txt").write_text(text)
    config = read_config(undisturbed).change(
        run__init_from=str(undisturbed), run__twin="no", run__out=str(tmp_path / "tuned"),
        training__steps=1, data__corpus=str(tmp_path / "sea"),
    )  # fmt: skip
    run = train(config)
    tasks = tmp_path / "mine.jsonl"
    items = [GOOD | {"context": context} for context in ("the", "of", "and")]
    tasks.write_text("".join(json.dumps(item) + "\n" for item in items))
    options = (f"--tasks={tasks}", "--num_fewshot=0")
    for first, second in ((run.folder, undisturbed), (undisturbed, run.folder)):
        status, out, error = evaluated(f"--run={first}", f"--against={second}:sparse", *options)
        assert (status, error) == (0, "") and "held-out text" in out


def test_without_lm_eval_the_extra_is_named(evaluated, copy, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "sparse_dataflow[eval]" in evaluation_refusal(evaluated, f"--run={copy}")
