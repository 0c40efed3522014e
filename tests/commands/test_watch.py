"""The live page: over HTTP, in a browser where there is one, and with damaged run folders."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
import warnings

import pytest
from marks import some

import sparse_dataflow as sd
from sparse_dataflow.commands import watch
from sparse_dataflow.evaluation.run_files import RunRecord, to_bytes
from sparse_dataflow.files import loopback
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.run_config import preset

PROJECTIONS = ("qkv", "attn_out", "mlp_in", "mlp_out")
PICTURES = 2 * (3 + len(PROJECTIONS))  # Of two runs: loss, two other curves, a layer's layouts.
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")


def write_run(folder, loss=3.0, **changes):
    changes = {"run__twin": "yes", "sparsity__block": 8} | changes
    config = preset("pico").change(**changes)
    record = RunRecord(
        "gpt13b_sparse", ("python",), "now", {}, "cpu", "text", "a", "b", 300,
        {name: 40 for name in config.variants},
    )  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_bytes(to_bytes(config.to_json()))
    (folder / "run.json").write_bytes(to_bytes(record.to_json()))
    for name in config.variants:
        (folder / name).mkdir()
        common = {"tokens": 640, "seconds": 2.0}
        rows = [
            {"kind": "train", "step": step, "tokens": 64 * step, "seconds": 0.1 * step,
             "loss": loss + 1 / step, "learning_rate": 1e-3, "gradient_norm": 1.0,
             "tokens_per_second": 6400.0 + step}
            for step in range(1, 21)
        ]  # fmt: skip
        rows += [{"kind": "eval", "step": 20, **common, "loss": loss, "bits_per_byte": 1.25}]
        rows += [
            {"kind": "evolution", "step": 11, **common, "update_seconds": 0.1, "exchanged": 0.3,
             "parameters": 123456}
        ]  # fmt: skip
        (folder / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    alert = {"kind": "spike", "step": 7, "time": 1.0, "text": "loss <b>99</b>"}
    (folder / config.variants[0] / "alerts.jsonl").write_text(json.dumps(alert) + "\nbroken\n3\n")
    return folder


@pytest.fixture
def folders(tmp_path):
    return [write_run(tmp_path / "one"), write_run(tmp_path / "two", training__batch=16)]


def get(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return answer.read().decode()


def test_the_page_shows_runs_side_by_side_with_what_differs(folders):
    with loopback.served(0, {"GET": watch.responder(folders, 5)}) as port:
        text = get(port, "/")
        assert get(port, "/content") in text
    assert text.count("<section") == 3
    for shown in ("20 of 40", "3.050", "1.250", "6,420", "30.0%", "123,456", "training.batch"):
        assert shown in text, shown
    assert "loss &lt;b&gt;99&lt;/b&gt;" in text and "<b>99" not in text
    assert len(re.findall("<svg", text)) == PICTURES
    assert "model.d_model" not in text


def test_the_content_follows_the_run(folders):
    respond = watch.responder(folders[:1], refresh=1e-9)
    assert "21 of 40" not in respond("/content", {})[1]
    with (folders[0] / "dense" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 21, "tokens": 1344, "seconds": 3, "loss": 2.5}\n')
    assert "21 of 40" in respond("/content", {})[1]
    assert respond("/config.json", {}) is None


@pytest.mark.parametrize(
    "field", some(["loss", "tokens", "seconds", "tokens_per_second", "step"], "loss")
)
@pytest.mark.parametrize(
    "values",
    some(
        {"1e300": ((1e300, -1e300),), "3e38": ((3e38, 1e-300),), "0": ((0, 0),),
         "10**350": ((10**350, -(10**350)),)},
        "3e38", "10**350",
    ),
)  # fmt: skip
def test_numbers_that_cannot_be_drawn_are_cut(folders, field, values):
    path = folders[1] / "dense" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0][field], rows[19][field] = values
    rows[-1] |= {"parameters": values[0], "exchanged": values[1]}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = watch.responder(folders, 5)("/", {})[1]
    assert "one" in text and "cannot be drawn" not in text


def test_a_figure_that_fails_is_replaced_by_words(folders, monkeypatch):
    def fails(*_):
        raise ValueError("Axis limits cannot be <b>NaN</b>")

    monkeypatch.setattr("sparse_dataflow.reporting.figures.drawings._frame_loss", fails)
    text = watch.responder(folders, 5)("/", {})[1]
    assert "This figure cannot be drawn: Axis limits cannot be &lt;b&gt;NaN" in text
    assert "<svg" in text and "tokens per second" in text.lower()


def test_a_static_layout_is_drawn_once_and_the_layer_can_be_chosen(folders):
    respond = watch.responder(folders[:1], 5)
    text = respond("/", {"layer": "1"})[1]
    assert "Since step 0, unchanged." in text and "of them are new" not in text
    assert "Layout of qkv, layer 1" in text and 'value="1"' in text
    assert "Layout of qkv, layer 1" in respond("/content", {"layer": "99"})[1]
    with pytest.raises(UserError, match="legal: a number from 0"):
        respond("/", {"layer": "<b>"})


def test_a_dense_run_says_that_it_has_no_layouts(tmp_path):
    folder = write_run(tmp_path / "dense", sparsity__projections=(), run__twin="no")
    text = watch.responder([folder], 5)("/", {})[1]
    assert "it stores every block" in text and "Layout of" not in text


@pytest.fixture(scope="module")
def evolving(tmp_path_factory):
    """A run whose layouts changed before steps 3 and 5, with checkpoints of steps 3 and 6."""
    folder = tmp_path_factory.mktemp("runs") / "evolving"
    config = preset("pico").change(
        model__num_layers=1, sparsity__block=16, training__batch=2, training__steps=6,
        evolution__method="set", evolution__every=2, evolution__share=0.5, run__twin="no",
        run__checkpoint_every=3, run__out=str(folder),
    )  # fmt: skip
    sd.train(config, texts=[f"Document {number} has words. " * 60 for number in range(40)])
    return folder


@pytest.mark.slow
def test_layouts_follow_the_checkpoints_of_a_run_that_changes_them(evolving, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(evolving, folder)
    respond = watch.responder([folder], 1e-9)
    text = respond("/", {})[1]
    assert "After 6 steps, in the newest checkpoint; new since step 0." in text
    assert "% of all layers&#39; are new" in text and "var(--category4)" in text
    assert "Share of blocks exchanged at each layout update" in text
    shutil.rmtree(folder / "sparse" / "checkpoints" / "6")
    assert "After 3 steps, in the newest checkpoint" in respond("/", {})[1]
    shutil.rmtree(folder / "sparse" / "checkpoints" / "3" / "state")
    assert "After 3 steps" in respond("/", {})[1]  # It was read before.
    assert "The layouts cannot be read now" in watch.responder([folder], 1)("/", {})[1]


def test_a_run_that_has_not_begun_or_is_damaged_says_so(tmp_path, folders):
    (tmp_path / "empty").mkdir()
    (folders[0] / "config.json").write_text("{")
    lines = ['{"kind": "train", "step": 1, "seconds": "x", "loss": []}', "[]", "\x00"]
    (folders[1] / "sparse" / "metrics.jsonl").write_text("\n".join(lines))
    text = watch.responder([tmp_path / "empty", *folders], 1)("/", {})[1]
    assert "is not a run folder" in text and "is damaged" in text and "two" in text


def test_folders_are_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # A checkout may have runs of its own.
    options = type("Options", (), {"run": str(tmp_path / "none"), "port": 0, "refresh": 1})
    with pytest.raises(UserError, match=r"none does not exist; no run is in"):
        watch.serve(options)
    options.run = ""
    with pytest.raises(UserError, match="names 0 run folders; legal: 1 to 8"):
        watch.serve(options)


@pytest.mark.slow
def test_the_experiment_serves_until_it_is_stopped(folders, evolving):
    command = [sys.executable, "-m", "experiments.watch", f"--run={folders[0]},{evolving}"]
    # It must not take the chip of the training, here one that does not exist.
    environment = os.environ | {"JAX_PLATFORMS": "tpu"}
    process = subprocess.Popen(
        [*command, "--port=0"], stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        line = process.stderr.readline()
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)", line)[1])
        text = get(port, "/")
        assert "Settings that differ" in text and "After 6 steps" in text
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_browser_refreshes_the_page(folders, tmp_path):
    respond, requests = watch.responder(folders, 0.2), []

    def counted(path, query):
        requests.append((path, query.get("layer")))
        return respond(path, query)

    profile = f"--user-data-dir={tmp_path}/browser"
    with loopback.served(0, {"GET": counted}) as port:
        done = subprocess.run(
            [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", profile,
             "--virtual-time-budget=3000", "--dump-dom", f"http://127.0.0.1:{port}/?layer=1"],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    assert ("/content", "1") in requests, done.stderr[-2000:]
    assert "read at" in done.stdout
    assert done.stdout.count("<svg") == PICTURES
    assert "Layout of mlp_in, layer 1" in done.stdout
    assert "Settings that differ" in done.stdout
