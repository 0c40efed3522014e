"""The live page: over HTTP, in a browser where there is one, and with damaged run folders."""

import json
import re
import shutil
import signal
import subprocess
import sys
import urllib.request

import pytest

from sparse_dataflow.config.presets import preset
from sparse_dataflow.files import loopback
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs import watch
from sparse_dataflow.training.run_files import RunRecord, to_bytes

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")


def write_run(folder, loss=3.0, **changes):
    config = preset("pico").change(run__twin="yes", **changes)
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
    (folder / "sparse" / "alerts.jsonl").write_text(json.dumps(alert) + "\nbroken\n3\n")
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
    assert len(re.findall("<svg", text)) == 4
    assert "model.d_model" not in text


def test_the_content_follows_the_run(folders):
    respond = watch.responder(folders[:1], refresh=1e-9)
    assert "21 of 40" not in respond("/content", {})[1]
    with (folders[0] / "dense" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 21, "tokens": 1344, "seconds": 3, "loss": 2.5}\n')
    assert "21 of 40" in respond("/content", {})[1]
    assert respond("/config.json", {}) is None


def test_a_run_that_has_not_begun_or_is_damaged_says_so(tmp_path, folders):
    (tmp_path / "empty").mkdir()
    (folders[0] / "config.json").write_text("{")
    lines = ['{"kind": "train", "step": 1, "seconds": "x", "loss": []}', "[]", "\x00"]
    (folders[1] / "sparse" / "metrics.jsonl").write_text("\n".join(lines))
    text = watch.responder([tmp_path / "empty", *folders], 1)("/", {})[1]
    assert "is not a run folder" in text and "is damaged" in text and "two" in text


def test_folders_are_checked(tmp_path):
    options = type("Options", (), {"run": str(tmp_path / "none"), "port": 0, "refresh": 1})
    with pytest.raises(UserError, match="is not a folder"):
        watch.serve(options)
    options.run = ""
    with pytest.raises(UserError, match="names 0 run folders; legal: 1 to 8"):
        watch.serve(options)


def test_the_experiment_serves_until_it_is_stopped(folders):
    command = [sys.executable, "-m", "experiments.watch", f"--run={folders[0]},{folders[1]}"]
    process = subprocess.Popen([*command, "--port=0"], stderr=subprocess.PIPE, text=True)
    try:
        line = process.stderr.readline()
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)", line)[1])
        assert "Settings that differ" in get(port, "/")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_browser_refreshes_the_page(folders, tmp_path):
    respond, requests = watch.responder(folders, 0.2), []

    def counted(path, query):
        requests.append(path)
        return respond(path, query)

    profile = f"--user-data-dir={tmp_path}/browser"
    with loopback.served(0, {"GET": counted}) as port:
        done = subprocess.run(
            [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", profile,
             "--virtual-time-budget=3000", "--dump-dom", f"http://127.0.0.1:{port}/"],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    assert "/content" in requests, done.stderr[-2000:]
    assert "read at" in done.stdout and done.stdout.count("<svg") == 4
    assert "Settings that differ" in done.stdout
