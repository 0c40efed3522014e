"""A run is continued, exported and imported by commands, as a user does it."""

import json
import subprocess
import sys

import numpy as np
import pytest

from sparse_dataflow.evaluation import trained
from sparse_dataflow.evaluation.generate import generate
from sparse_dataflow.interchange import huggingface


@pytest.mark.slow
def test_a_run_writes_exports_and_is_begun_from(job, refused, undisturbed, tmp_path):
    model = trained.load(undisturbed, "sparse")
    prompt = "the of and"
    (expected,) = generate(model, [model.tokenizer.encode(prompt).tolist()], max_new_tokens=8)
    written = job.run(
        f"--run={undisturbed}", f"--prompt={prompt}", "--max_new_tokens=8", experiment="generate"
    )
    assert written.returncode == 0, written.stderr
    assert written.stdout == prompt + expected.text + "\n"
    for variant in ("sparse", "dense"):
        flags = (f"--variant={variant}", "--activation_sparsity=0.4", "--max_new_tokens=8")
        with_zeros = job.run(
            f"--run={undisturbed}", f"--prompt={prompt}", *flags, experiment="generate"
        )
        assert with_zeros.returncode == 0, with_zeros.stderr
        assert with_zeros.stdout.startswith(prompt)

    for form in huggingface.FORMS:
        done = job.run(
            f"--run={undisturbed}", f"--to={tmp_path / form}", f"--form={form}", experiment="export"
        )
        assert done.returncode == 0, done.stderr
        card = (tmp_path / form / "README.md").read_text()
        record = json.loads((undisturbed / "run.json").read_text())
        for fact in (
            "density 0.25",
            "bits per byte",
            record["date"],
            f"jax {record['versions']['jax']}",
        ):
            assert fact in card
        options = [word for word in record["command"][1:] if str(job.corpus.parent) not in word]
        assert "sparse-dataflow train" in card and all(option in card for option in options)
        assert str(job.corpus.parent) not in card
    sparse = huggingface.read(tmp_path / "sparse")
    assert sparse.model == model.model and sparse.tokenizer == model.tokenizer
    again = (f"--run={undisturbed}", f"--to={tmp_path / 'dense'}")
    assert "exists already" in refused(*again, experiment="export")

    begun = tmp_path / "begun"
    sizes = ("--block=16", "--density=0.25", "--steps=2", "--twin=no")
    start = f"--init_from={tmp_path / 'dense'}"
    done = job.run(*sizes, f"--corpus={job.corpus}", start, f"--out={begun}")
    assert done.returncode == 0, done.stderr
    record = json.loads((begun / "run.json").read_text())
    assert record["init_from"]["path"] == str(tmp_path / "dense")
    first = trained.load(begun, "sparse", "0")
    # The best quarter of the blocks are those that were stored, as the others are zeros, and the
    # fit returns their weights to rounding.
    for name in ("qkv", "mlp_out"):
        was, now = (m.params["blocks"][name]["values"] for m in (model, first))
        np.testing.assert_allclose(np.sum(np.square(was)), np.sum(np.square(now)), rtol=1e-4)


def test_lines_are_continued_until_the_input_ends(job, undisturbed):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "experiments.generate"),
            *(f"--run={undisturbed}", "--interactive", "--max_new_tokens=3"),
        ],
        input="the of\n" + 99 * "word " + "\nand to\n",
        cwd=job.corpus.parent,
        env=job.environment,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr
    assert "the of" in done.stdout and "and to" in done.stdout
    assert "in the context of 64" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("experiment", "arguments", "message"),
    [
        ("generate", [], "No run is named"),
        ("generate", ["--run=nowhere"], "nowhere does not exist; no run is in"),
        ("generate", ["--run=RUN", "--variant=small"], "legal: sparse, dense"),
        ("generate", ["--run=RUN", f"--prompt={'word ' * 99}"], "in the context of 64"),
        ("export", ["--run=RUN"], "give a new one with --to"),
        ("gpt13b_sparse", ["--init_from=nowhere"], "neither a run folder nor a Hugging Face"),
        (
            "gpt13b_sparse",
            ["--init_from=nowhere"],
            "Legal: a folder on this machine, an address",
        ),
        ("gpt13b_sparse", ["--scale=pico", "--block=64"], "with block=8 or 16"),
        ("gpt13b_sparse", ["--init_from=RUN", "--scale=nano"], "--scale with --init_from"),
    ],
)
def test_bad_input_is_named(refused, undisturbed, experiment, arguments, message):
    given = [argument.replace("RUN", str(undisturbed)) for argument in arguments]
    assert message in refused(*given, experiment=experiment)


def test_a_run_without_its_tokenizer_is_named(refused, copy):
    (copy / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in refused(f"--run={copy}", experiment="generate")
