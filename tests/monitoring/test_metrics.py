"""Metrics: rows survive kills, full disks and transient errors; damaged rows are skipped."""

import errno
import json
import os
import struct
import tracemalloc

import numpy as np
import pytest
from checkpoint_states import in_new_process
from hypothesis import given, settings
from hypothesis import strategies as st
from metric_rows import eval_row, train_row
from storage_faults import failing as failing_operations
from tensorboardX.proto import event_pb2

from sparse_dataflow.files import storage
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.monitoring import metrics
from sparse_dataflow.monitoring.metrics import MetricsReader, MetricsWriter, read_metrics


def written(folder, rows, step=0):
    writer = MetricsWriter(folder, step)
    for row in rows:
        writer.write(row)
    writer.close()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def events(path):
    """Reads the events of a TensorBoard file of records: length, checksum, data, checksum."""
    data, result = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        result.append(event_pb2.Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return result


def test_rows_after_the_checkpoint_and_the_final_evaluation_are_dropped(tmp_path):
    rows = [train_row(1), eval_row(1), train_row(2), train_row(3)]
    assert written(tmp_path, [*rows, eval_row(3, "final")]) == [*rows, eval_row(3, "final")]
    assert written(tmp_path, [], step=3) == rows
    assert written(tmp_path, [train_row(3, loss=2.0)], step=2) == [
        *rows[:3],
        train_row(3, loss=2.0),
    ]


@pytest.mark.parametrize(
    "damage",
    [
        b"\x00\xff\xfe\n",
        b'{"kind": "train", "step": 2',
        b"[1, 2]\n",
        b'{"step": 2}\n',
        b'{"kind": "train", "step": "2"}\n',
        b'{"kind": "train", "step": [2]}\n',
        b'{"kind": "train", "step": 2, "loss": 3.0}\n',
        b'{"kind": ["train"], "step": 2}\n',
    ],
)
def test_damaged_rows_are_skipped_with_a_message(tmp_path, damage, capfd, caplog):
    written(tmp_path, [train_row(1)])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(damage)
    assert written(tmp_path, [train_row(2)], step=1) == [train_row(1), train_row(2)]
    assert "skipped" in capfd.readouterr().err + caplog.text


def test_tensorboard_has_every_number_and_hides_repeated_steps(tmp_path):
    written(tmp_path, [train_row(1), train_row(2), eval_row(2)])
    written(tmp_path, [train_row(2)], step=1)
    first, second = (events(path) for path in sorted((tmp_path / "tensorboard").iterdir()))
    assert first[0].file_version == second[0].file_version == "brain.Event:2"
    start = event_pb2.SessionLog.START
    assert [(e.step, e.session_log.status) for e in (first[1], second[1])] == [
        (1, start),
        (2, start),
    ]
    scalars = [{v.tag: v.simple_value for v in event.summary.value} for event in first[2:]]
    assert [event.step for event in first[2:]] == [1, 2, 2]
    assert scalars[1]["train/tokens"] == 16 and scalars[2] == {
        "eval/tokens": 8, "eval/seconds": 0.5, "eval/loss": 3.0, "eval/bits_per_byte": 1.5
    }  # fmt: skip
    assert "train/mfu" not in scalars[0]


def test_a_full_disk_raises_at_once_and_leaves_earlier_rows_intact(tmp_path):
    output = in_new_process(
        """
        import pathlib, resource, sys
        from sparse_dataflow.files.errors import UserError
        from sparse_dataflow.monitoring.metrics import MetricsReader, MetricsWriter, read_metrics
        row = {"kind": "train", "step": 1} | {f"number_{i}": 1.0 for i in range(40)}
        resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, resource.RLIM_INFINITY))
        writer = MetricsWriter(pathlib.Path(sys.argv[1]))
        for action in (lambda: [writer.write(row) for _ in range(99)], writer.close):
            try:
                action()
            except UserError as error:
                print("ERROR", error)
        """,
        tmp_path,
    )
    assert output.count("ERROR Metrics cannot be written") >= 1
    assert f"{tmp_path} (File too large). Make room there" in output
    assert "Traceback" not in output and "Exception" not in output
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len([json.loads(line) for line in lines[:3]]) == 3


class Failing:
    """A file whose flushes fail as drawn, after only a part of the data has reached the disk."""

    def __init__(self, file, draws):
        self._file, self._draws = file, draws

    def flush(self):
        self._file.flush()
        number, lost = self._draws.pop(0) if self._draws else (0, 0)
        if number:
            os.truncate(self._file.name, max(0, self._file.tell() - lost))
            raise OSError(number, os.strerror(number))

    def __getattr__(self, name):
        return getattr(self._file, name)


@settings(max_examples=60)
@given(
    draws=st.lists(
        st.tuples(st.sampled_from([0, 0, errno.EIO, errno.ESTALE]), st.integers(0, 60)), max_size=9
    )
)
def test_rows_survive_transient_storage_errors(tmp_path_factory, draws):
    folder, remaining = tmp_path_factory.mktemp("metrics"), list(draws)
    rows = [train_row(step) for step in range(1, 6)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "WAITS", (0.0,) * 10)
        opened = storage.open_regular

        def failing(path, mode="rb"):
            file = opened(path, mode)
            return Failing(file, remaining) if mode == "a+b" else file

        patch.setattr(storage, "open_regular", failing)
        writer = MetricsWriter(folder)
        for row in rows:
            writer.write(row)
        writer.close()
    assert read_metrics(folder / "metrics.jsonl") == rows
    written_events = [e for path in (folder / "tensorboard").iterdir() for e in events(path)]
    assert {e.step for e in written_events if e.summary.value} >= {row["step"] for row in rows}


@settings(max_examples=40)
@given(st.integers(0, 12), st.integers(1, 5), st.sampled_from(sorted(storage.TRANSIENT)))
def test_opening_the_files_survives_transient_errors(tmp_path_factory, first, times, number):
    folder = tmp_path_factory.mktemp("metrics")
    written(folder, [train_row(1), train_row(2)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "WAITS", (0.0,) * 5)
        with failing_operations(folder, first, times, number):
            writer = MetricsWriter(folder, 1)
            writer.write(train_row(2, loss=2.0))
            writer.close()
    assert read_metrics(folder / "metrics.jsonl") == [train_row(1), train_row(2, loss=2.0)]


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ({1: "train", 2: "train", 3: "skipped", 4: "train"}, ""),
        ({1: "train", 4: "train"}, "the rows of 2 of the 4 steps until the checkpoint are missing"),
        ({5: "train", 6: "train"}, "4 of the 4 steps"),
        ({2: "train", 3: "eval", 4: "eval"}, "3 of the 4 steps"),
    ],
)
def test_rows_that_a_checkpoint_promised_and_are_missing_are_told(tmp_path, capsys, kinds, words):
    makers = {"train": train_row, "eval": eval_row}
    rows = [makers.get(kind, train_row)(step) | {"kind": kind} for step, kind in kinds.items()]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    MetricsWriter(tmp_path, 4).close()
    log = capsys.readouterr().err
    assert words in log if words else "missing" not in log


@pytest.mark.parametrize("name", ["alerts.jsonl", "goodput.jsonl", "times.jsonl"])
@pytest.mark.parametrize("obstacle", ["folder", "pipe", "full disk"])
def test_a_side_file_that_cannot_be_written_is_told_once(tmp_path, capsys, name, obstacle):
    path = tmp_path / name
    if obstacle == "folder":
        path.mkdir()
    elif obstacle == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/full")
    side = metrics.SideFile(path)
    for line in (b"1", b"2"):
        side.append(line)
    side.close()
    assert capsys.readouterr().err.count(f"{name} cannot be written") == 1


@settings(max_examples=40)
@given(data=st.data())
def test_a_truncated_metrics_file_keeps_its_complete_rows(tmp_path_factory, data):
    rows = [{"kind": "train", "step": step, "loss": 1 / step} for step in range(1, 7)]
    lines = [json.dumps(row).encode() + b"\n" for row in rows]
    content = b"".join(lines)
    cut = data.draw(st.integers(0, len(content)))
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    path.write_bytes(content[:cut])
    # A line without its newline is complete.
    ends = np.cumsum([len(line) for line in lines]) - 1
    assert read_metrics(path) == rows[: int((ends <= cut).sum())]


def test_a_reader_parses_each_line_of_a_growing_file_once(tmp_path, monkeypatch):
    path, parsed = tmp_path / "metrics.jsonl", []
    parse = metrics.json_files.parse
    monkeypatch.setattr(
        metrics.json_files, "parse", lambda line: parsed.append(line) or parse(line)
    )
    reader = metrics.MetricsReader(path)
    assert reader.read() == []
    rows = [{"kind": "train", "step": step} for step in range(1, 41)]
    for row in rows:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n" + '{"kind": "tr')  # A line that is not finished.
        assert reader.read() == rows[: row["step"]]
        path.write_bytes(path.read_bytes().removesuffix(b'{"kind": "tr'))
    assert len(parsed) == 40


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_a_reader_reads_a_replaced_file_anew(tmp_path, kept):
    path = tmp_path / "metrics.jsonl"
    rows = [{"kind": "train", "step": step, "loss": 1.0} for step in range(1, 6)]
    again = [{**row, "loss": 2.0} for row in rows[kept:]] + [{"kind": "train", "step": 6}]
    write = lambda rows: path.write_text("".join(json.dumps(row) + "\n" for row in rows))  # noqa: E731
    reader = metrics.MetricsReader(path)
    write(rows)
    assert reader.read() == rows
    write(rows[:kept] + again)
    assert reader.read() == read_metrics(path) == rows[:kept] + again
    path.unlink()
    assert reader.read() == []


def test_a_resumed_runs_rows_replace_the_repeated_ones(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = [{"kind": "train", "step": s, "loss": 1.0} for s in (1, 2, 3)]
    again = [{"kind": "train", "step": s, "loss": 2.0} for s in (3, 4)]
    text = "".join(json.dumps(row) + "\n" for row in first) + '{"kind": "tra\n'
    path.write_text(text + "".join(json.dumps(row) + "\n" for row in again))
    assert read_metrics(path) == [*first[:2], *again]
    assert read_metrics(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("content", [b"\0" * 2**20, b"x\n" * 2000, b'{"kind": 1}\n' * 2000])
@pytest.mark.parametrize("ended", [True, False])
def test_a_file_that_is_no_metrics_is_refused_without_being_read_whole(tmp_path, content, ended):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "train", "step": 1}\n' + content)
    with path.open("rb+") as file:
        file.truncate(2**30 + (1 if content[0] == 0 else 0))
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=r"bytes; legal|is damaged"):
            MetricsReader(path).read(ended)
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()
