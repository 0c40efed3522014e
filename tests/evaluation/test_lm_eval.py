"""lm-eval's own command line evaluates a run."""

import configparser
import importlib.util
import json
import sys

import pytest
from places import ROOT

from sparse_dataflow.commands import lm_eval as command
from sparse_dataflow.evaluation import trained
from sparse_dataflow.files.errors import UserError

SETUP = ROOT / "setup.cfg"
TASK = """
task: mine
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: [" of", " the"]
doc_to_target: 1
"""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="the extra eval is not installed"
)


def test_the_entry_point_names_the_registered_class():
    from lm_eval.api.registry import get_model

    from sparse_dataflow.commands.lm_eval_model import SparseDataflowLM

    parser = configparser.ConfigParser()
    parser.read(SETUP)
    name, _, value = parser["options.entry_points"]["lm_eval.models"].strip().partition(" = ")
    assert value == f"{SparseDataflowLM.__module__}:{SparseDataflowLM.__name__}"
    assert get_model(name) is SparseDataflowLM


def test_lm_eval_scores_a_run(harness, lm_eval_tasks, run_folder, tmp_path, monkeypatch, capsys):
    rows, task = tmp_path / "rows.jsonl", tmp_path / "mine.yaml"
    rows.write_text("".join(json.dumps({"question": word}) + "\n" for word in ("of", "the", "ab")))
    task.write_text(TASK.format(rows=rows))
    model = f"run={run_folder.path},variant=dense,checkpoint=best"
    flags = ["--model", "sparse_dataflow", "--model_args", model, "--tasks", str(task)]
    monkeypatch.setattr(sys, "argv", ["lm_eval", *flags, "--output_path", str(tmp_path / "out")])
    monkeypatch.setattr(command, "is_offline", lambda: False)  # It would set variables.
    command.main()
    assert "mine" in capsys.readouterr().out
    (written,) = (tmp_path / "out").rglob("results*.json")
    results = json.loads(written.read_text())["results"]["mine"]
    lm = harness.harness_lm(trained.load(run_folder.path, "dense", "best"))
    tasks = lm_eval_tasks.load_tasks(str(task), lm_eval_tasks.task_manager([str(task)]), ())
    for metric, score in harness.evaluate(lm, tasks, 0)["mine"].items():
        assert results[f"{metric},none"] == score.value


def test_a_folder_that_is_no_run_is_named(harness, tmp_path):
    from sparse_dataflow.commands.lm_eval_model import SparseDataflowLM

    with pytest.raises(UserError, match="not a run folder"):
        SparseDataflowLM(str(tmp_path))


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Couldn't reach 'baber/piqa' on the Hub"),
        FileNotFoundError("no cache\nand more"),
        RuntimeError("[Errno -3] Temporary failure in name resolution."),
    ],
)
@pytest.mark.parametrize("offline", [True, False])
def test_an_error_of_lm_eval_is_one_sentence(monkeypatch, error, offline):
    def load_dataset(*_, **__):
        raise error

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", load_dataset)
    monkeypatch.setattr(command, "is_offline", lambda: offline)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(UserError) as refused:
        command.main()
    assert str(refused.value).startswith(f"lm-eval ends: {str(error).splitlines()[0].rstrip('.')}.")
    assert ("cannot be reached" in str(refused.value)) == offline


def test_a_hub_that_cannot_be_reached_is_known_in_seconds(monkeypatch):
    import socket

    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(command, "SECONDS", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        assert not command.is_offline()
    for endpoint in (f"http://127.0.0.1:{port}", "https://no-host.invalid", "http://127.0.0.1:x"):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        assert command.is_offline()
    monkeypatch.setenv("https_proxy", "http://proxy.invalid:1")
    assert not command.is_offline()
