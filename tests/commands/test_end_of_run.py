"""What a run needs after its last step does not end it."""

from types import SimpleNamespace

import numpy as np
import pytest

import sparse_dataflow as sd
from sparse_dataflow.commands import run_report
from sparse_dataflow.core.executors.executor import SINGLE_DEVICE
from sparse_dataflow.data.corpora import corpus_of_texts
from sparse_dataflow.data.tokenizer import byte_tokenizer
from sparse_dataflow.files.errors import UserError

TEXTS = [f"Document {number} has a few words.\n" * 60 for number in range(40)]


def continuations(sequence, monkeypatch, continued):
    trainer = SimpleNamespace(
        name="sparse",
        executor=SINGLE_DEVICE,
        model=SimpleNamespace(bidirectional=False),
        training=SimpleNamespace(sequence=sequence),
    )
    monkeypatch.setattr(run_report, "_continued", continued)
    return run_report._continuations([trainer], corpus_of_texts(TEXTS), byte_tokenizer(260))


@pytest.mark.parametrize("sequence", [2, 3, 4, 100])
def test_prompts_leave_room_for_a_continuation(monkeypatch, sequence):
    lengths = []

    def continued(trainer, prompts):
        lengths.extend(map(len, prompts))
        return np.array(prompts), 1.0

    shown, seconds = continuations(sequence, monkeypatch, continued)
    assert shown and seconds == {"sparse": 1.0}
    assert 1 <= min(lengths) and max(lengths) < sequence


@pytest.mark.parametrize("sequence", [1, 2, 64])
def test_a_refused_continuation_is_said(monkeypatch, capsys, sequence):
    def continued(trainer, prompts):
        raise UserError("these prompts are refused.")

    assert continuations(sequence, monkeypatch, continued) == ([], {})
    assert "no continuations in the report" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_of_sequences_of_one_token_has_a_report(tmp_path):
    config = sd.preset("pico").change(
        model__vocab_size=300, sparsity__block=16, training__steps=1, training__batch=2,
        training__sequence=1, run__twin=False, run__out=str(tmp_path / "run"),
    )  # fmt: skip
    run = sd.train(config, texts=TEXTS)
    assert run.finished and (run.folder / "report.html").exists()
