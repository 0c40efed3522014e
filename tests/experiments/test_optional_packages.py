"""Code that runs only where an optional package is installed, over the default pattern.

`make optional` installs all of them; elsewhere a test is skipped and names its package.
"""

import configparser
import json
import re

import numpy as np
import pytest
from main_job import PICO, ROOT, rows

import sparse_dataflow as sd

PACKAGES = (
    "torch", "transformers", "wandb", "mlflow", "pyarrow", "datasets", "zstandard", "qwix",
    "equinox", "equimo", "dm", "mamba", "google", "chex", "maxtext", "tokamax", "aqtp",
    "pathwaysutils", "omegaconf",
)  # fmt: skip
SHORT = ("--twin=no", "--steps=2", "--set=run.eval_every=2")
TRACKERS = "--set=run.trackers="


def needed(*names):
    """Returns the modules; skips the test where one is absent."""
    modules = [pytest.importorskip(name, reason=f"{name} is not installed") for name in names]
    return modules[0] if len(names) == 1 else modules


def trained(job, folder, *flags, **environment):
    """Trains two steps of the default pattern into a folder; returns the last held-out loss."""
    done = job.start(*job.plan(folder, *SHORT, *flags), environment=environment)
    assert done.wait() == 0, done.stderr
    (final,) = [row for row in rows(folder, "sparse") if row["kind"] == "final"]
    assert np.isfinite(final["loss"])
    return final["loss"]


def test_the_extra_has_every_package():
    extras = configparser.RawConfigParser()
    extras.read(ROOT / "setup.cfg")
    listed = dict(extras["options.extras_require"])
    for name in re.search(r"sparse_dataflow\[(.*)\]", listed["optional"])[1].split(","):
        listed["optional"] += listed[name]
    names = re.findall(r"^[a-z]+", listed["optional"], re.M)
    # google-crc32c, of the extra `data`, and gguf are in the extra `dev` too.
    assert {*names} - {"sparse_dataflow", "sparse", "gguf"} == {*PACKAGES}


@pytest.mark.slow
@pytest.mark.parametrize("bench", ["step_bench", "kernel_bench"])
def test_torch_is_timed_beside_ours(job, tmp_path, bench):
    needed("torch")
    shapes = {
        "step_bench": (*PICO, "--rounds=1"),
        "kernel_bench": ("--shapes=64x128", "--blocks=16", "--densities=0.25", "--tokens=64",
                         "--rounds=1", "--products=forward"),
    }  # fmt: skip
    done = job.run(*shapes[bench], "--peers", f"--keep={tmp_path}", experiment=bench)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())["rows"]
    names = [*result] if bench == "step_bench" else {row["implementation"] for row in result}
    assert any("torch" in name for name in names), names


@pytest.mark.slow
def test_transformers_loads_an_exported_run(job, tmp_path):
    transformers, torch = needed("transformers", "torch")
    trained(job, tmp_path / "run")
    model = sd.load(tmp_path / "run")
    sd.save(model, tmp_path / "exported", form="dense")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    ids = np.asarray(model.tokenizer.encode("the of and to in is it was for on"))
    assert tokenizer("the of and to in is it was for on")["input_ids"] == ids.tolist()
    with torch.no_grad():
        expected = theirs(torch.from_numpy(ids[None]).long()).logits.numpy()
    mine = np.asarray(sd.logits(model, ids[None]))[..., : expected.shape[-1]]
    np.testing.assert_allclose(mine, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_run_is_tracked_by_weights_and_biases(job, tmp_path):
    needed("wandb")
    trained(job, tmp_path / "run", f"{TRACKERS}wandb", WANDB_MODE="offline", WANDB_SILENT="true")
    (path,) = (tmp_path / "run").rglob("*.wandb")
    assert b"train/loss" in path.read_bytes()


@pytest.mark.slow
def test_a_run_is_tracked_by_mlflow(job, tmp_path):
    mlflow = needed("mlflow")
    address = f"sqlite:///{tmp_path}/mlflow.db"
    loss = trained(job, tmp_path / "run", f"{TRACKERS}mlflow", MLFLOW_TRACKING_URI=address)
    client = mlflow.MlflowClient(address)
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert loss in run.data.metrics.values()
    assert run.data.params["sparsity.pattern"] == sd.preset("pico").sparsity.pattern


def parquet(lines, folder):
    arrow, tables = needed("pyarrow", "pyarrow.parquet")
    tables.write_table(arrow.table({"text": lines}), folder / "corpus.parquet")
    return folder / "corpus.parquet"


def saved_dataset(lines, folder):
    datasets = needed("datasets")
    datasets.Dataset.from_dict({"text": lines}).save_to_disk(str(folder / "corpus"))
    return folder / "corpus"


def zstd(lines, folder):
    """Two frames, as parallel writers leave them."""
    zstandard = needed("zstandard")
    needed("pyarrow")
    halves = lines[: len(lines) // 2], lines[len(lines) // 2 :]
    text = ("".join(json.dumps({"text": line}) + "\n" for line in half) for half in halves)
    frames = [zstandard.ZstdCompressor().compress(each.encode()) for each in text]
    (folder / "corpus.jsonl.zst").write_bytes(b"".join(frames))
    return folder / "corpus.jsonl.zst"


@pytest.mark.slow
@pytest.mark.parametrize("write", [parquet, saved_dataset, zstd])
def test_a_corpus_that_a_library_wrote_trains(job, tmp_path, write):
    """The same loss as from the same texts in lines of JSON."""
    lines = [path.read_text() for path in sorted(job.corpus.iterdir())]
    plain = tmp_path / "corpus.jsonl"
    plain.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    corpus = write(lines, tmp_path)
    # The ids of documents, of which the split is a hash, come from the name of the corpus.
    expected = trained(job, tmp_path / "expected", f"--corpus={plain}")
    loss = trained(job, tmp_path / "run", f"--corpus={corpus}")
    assert loss == pytest.approx(expected, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_products_are_quantized_by_qwix(job, tmp_path, precision):
    needed("qwix")
    wide = trained(job, tmp_path / "wide")
    loss = trained(job, tmp_path / "run", f"--set=model.precision={precision}")
    assert loss != wide and loss == pytest.approx(wide, rel=0.05)
