"""Runs on data that people bring: their held-out text, their tokenizer, their token ids."""

import json
import shutil

import numpy as np
import pytest
from main_job import PICO, rows

from sparse_dataflow.data.tokenizer import byte_tokenizer

PLAN = (*PICO, "--steps=6", "--set=run.checkpoint_every=3", "--set=run.eval_every=3", "--notwin")


@pytest.mark.slow
def test_a_run_with_a_tokenizer_and_held_out_text_of_its_own_resumes_without_the_tokenizer(
    job, tmp_path
):
    byte_tokenizer(300).save(tmp_path / "mine" / "tokenizer.json")
    (tmp_path / "held_out.txt").write_text("zzz qqq " * 400)
    arguments = [
        *(*PLAN, f"--corpus={job.corpus}", f"--out={tmp_path / 'run'}"),
        f"--set=data.tokenizer={tmp_path / 'mine'}",
        f"--set=data.validation={tmp_path / 'held_out.txt'}",
    ]
    killed = job.run(*arguments, events=[(r"checkpoints/6\.saving", 1, "SIGKILL")])
    assert "held-out documents: 1\n" in killed.stderr, killed.stderr
    shutil.rmtree(tmp_path / "mine")
    done = job.resume(tmp_path / "run", whole=True)
    assert done.returncode == 0, done.stderr
    assert "resumes after step 3 of 6" in done.stderr
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["tokenizer"].startswith("300 tokens")
    assert any("zzz qqq" in row["prompt"] for row in report["continuations"])
    assert rows(tmp_path / "run", "sparse")[-1]["kind"] == "final"


@pytest.mark.slow
def test_a_run_on_token_ids_without_a_tokenizer(job, tmp_path):
    ids = np.arange(20_000) % 500
    ids.astype("<u2").tofile(tmp_path / "train.bin")
    done = job.run(
        *(*PLAN, f"--corpus={tmp_path / 'train.bin'}", f"--out={tmp_path / 'run'}"),
        *("--set=data.tokenizer=none", "--set=model.vocab_size=512"),
        whole=True,
    )
    assert done.returncode == 0, done.stderr
    losses = [row["loss"] for row in rows(tmp_path / "run", "sparse") if row["kind"] == "train"]
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert "no continuations in the report" in done.stderr


def test_bad_data_is_refused_in_a_sentence_before_anything_is_made(job, refused, tmp_path):
    (tmp_path / "train.bin").write_bytes(b"\0" * 4000)
    folder = f"--out={tmp_path / 'run'}"
    for arguments, message in (
        ((f"--corpus={tmp_path / 'train.bin'}",), "has token ids and no text to train a tokenizer"),
        ((f"--corpus={job.corpus}", "--set=data.tokenizer=none"), "is for a corpus of token ids"),
        ((f"--corpus={job.corpus}", "--set=data.tokenizer=/missing"), "legal: bpe, gpt2, none"),
        ((f"--corpus={job.corpus}", "--set=data.validation=/missing"), "does not exist"),
        (("--corpus=c4/en",), "stream the same text with --corpus=hf:allenai/c4/en"),
        (("--set=data.tokenizer=",), "data.tokenizer is empty"),
    ):
        assert message in refused(*PLAN, folder, *arguments), arguments
        assert not (tmp_path / "run").exists()
