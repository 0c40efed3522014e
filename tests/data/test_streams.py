"""Corpora that are streamed: what comes, in which order, from which place on."""

import collections
import dataclasses
import functools
import gzip
import itertools
import json
import sys
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_hub import FakeHub

from sparse_dataflow.core import collectives
from sparse_dataflow.data import lanes, shards, stream_batches, streamed
from sparse_dataflow.data.batches import TrainBatches
from sparse_dataflow.data.corpora import load_corpus
from sparse_dataflow.data.corpus.splits import Corpus
from sparse_dataflow.data.documents import identity
from sparse_dataflow.data.lanes import BlockStarts, Position
from sparse_dataflow.data.shards import Shard, Skipped
from sparse_dataflow.data.stream_batches import StreamBatches
from sparse_dataflow.data.streamed import Stream, streamed_corpus
from sparse_dataflow.data.tokenizer import byte_tokenizer
from sparse_dataflow.data.tokenizer_library import Identity
from sparse_dataflow.data.tokens import split_tokens
from sparse_dataflow.files import derived
from sparse_dataflow.files.errors import UserError

BYTES = byte_tokenizer(260)
DOCUMENTS = 120


def text(file, row):
    return f"file {file} row {row} " + "é" * (row % 40)


def write(path, texts, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [dict(zip((*columns, "text"), row)) for row in zip(*columns.values(), texts)]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=10)
        return path
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":
        data = pa.Codec("zstd").compress(data, asbytes=True)
    path.write_bytes(data)
    return path


@pytest.fixture(params=["parquet", "jsonl.gz", "jsonl.zst", "jsonl"])
def files(request, tmp_path):
    """Four files of 30 documents."""
    folder = tmp_path / "owner" / "name"
    return [
        str(write(folder / f"train-{n}.{request.param}", [text(n, row) for row in range(30)]))
        for n in range(4)
    ]


@pytest.fixture
def four(tmp_path, monkeypatch):
    """A stream of four files of one part each, whose blocks have two batches of four rows."""
    monkeypatch.setattr(lanes, "BUFFER_BATCHES", 2)
    monkeypatch.setattr(streamed, "MOST_PARTS", 4)
    paths = [
        str(write(tmp_path / f"{n}.parquet", [text(n, row) for row in range(30)])) for n in range(4)
    ]
    return streamed_corpus("four", {"train": paths})


def batches(stream, rows=None, weights=(1.0,), sources=None, **options):
    sources = sources or (stream,)
    return StreamBatches(
        (), 4, 16, 7, rows, sources=sources, weights=weights, tokenizer=BYTES, **options
    )


def documents_of(tokens):
    """The texts between the ends of text; the first and last may be cut."""
    ends = np.flatnonzero(tokens == BYTES.eot_id)
    return [BYTES.decode(piece[1:]) for piece in np.split(tokens, ends)][1:-1]


def lane_tokens(stream, number=0, count=1, blocks=3):
    lane = lanes.Lane(stream, number, count, BYTES, 7, 16, 8, BlockStarts(), Skipped())
    windows = np.concatenate([lane.block(block) for block in range(blocks)])
    return np.append(windows[:, :-1].ravel(), windows[-1, -1])


def test_every_document_of_training_comes_once_in_an_epoch(files):
    corpus = streamed_corpus("files", {"train": files})
    tokens = lane_tokens(corpus.stream, blocks=80)
    seen = collections.Counter(documents_of(tokens)[: DOCUMENTS * 2])
    held_out = {document.text for document in corpus.validation}
    expected = {text(n, row) for n in range(4) for row in range(30)} - held_out
    assert len(held_out) == 2 and set(seen) == expected
    whole_epoch = list(seen.elements())[: len(expected)]
    first = collections.Counter(documents_of(tokens)[: len(expected) - 1])
    assert max(first.values()) == 1 and len(whole_epoch) == len(expected)


def test_a_validation_split_is_held_out_and_all_of_training_is_trained(tmp_path):
    train = write(tmp_path / "train.jsonl", ["a", "b"])
    held_out = write(tmp_path / "test.jsonl", ["c", "d"])
    corpus = streamed_corpus("x", {"train": [str(train)], "test": [str(held_out)]})
    assert [document.text for document in corpus.validation] == ["c", "d"]
    assert set(documents_of(lane_tokens(corpus.stream))) == {"a", "b"}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(streamed.Stream)])
def test_a_sample_is_identified_by_its_stream_without_reading_it(files, field):
    stream = streamed_corpus("files", {"train": files}, whole=True).stream
    changed = {
        "name": "other", "shards": stream.shards[1:], "column": "other", "file_bytes": 1,
        "held_out": np.array([7], np.uint64),
    }  # fmt: skip
    samples = [
        streamed.SampleDocuments(each)
        for each in (stream, dataclasses.replace(stream, **{field: changed[field]}))
    ]
    assert derived.key(identity(samples[0])) != derived.key(identity(samples[1]))
    assert not any("_documents" in vars(sample) for sample in samples)


def test_streamed_documents_are_those_of_stored_text(files, tmp_path):
    tokenizer = dataclasses.replace(BYTES, identity=Identity(prefix=(7, 9)))
    stream = streamed_corpus("files", {"train": files}, whole=True).stream
    lane = lanes.Lane(stream, 0, 1, tokenizer, 7, 16, 8, BlockStarts(), Skipped())
    tokens = np.concatenate([lane.block(block)[:, :-1].ravel() for block in range(40)])
    documents = list(streamed.SampleDocuments(stream))
    stored = Corpus("stored", documents, documents, "x" * 64)
    ids = split_tokens(stored, "train", tokenizer, tmp_path / "cache").tokens[:]
    end = tokenizer.eot_id
    split = lambda ids: [tuple(d) for d in np.split(ids, np.flatnonzero(ids == end) + 1)[:-1]]  # noqa: E731
    assert len(split(tokens)) > 10 and set(split(tokens)) <= set(split(ids))
    assert all(document[:2] == (7, 9) for document in split(ids))


def test_a_batch_depends_on_its_step_alone_and_a_process_reads_its_rows(four):
    whole = batches(four.stream)
    assert whole.lanes == 4
    expected = [whole[step].tokens for step in range(9)]
    other = batches(four.stream)
    for step in (5, 0, 8, 3):
        np.testing.assert_array_equal(other[step].tokens, expected[step])
    for rows in ((0, 1), (2, 3), (1,)):
        local = batches(four.stream, rows)
        for step, batch in zip(range(9), local.iterate(), strict=False):
            np.testing.assert_array_equal(batch.tokens, expected[step][list(rows)])
        blocks = [block for block, *_ in local.positions(9)[0]]
        assert [n for n, block in enumerate(blocks) if block] == list(rows)


def test_windows_of_a_block_are_shuffled_and_complete(four):
    lane = lanes.Lane(four.stream, 0, 1, BYTES, 7, 16, 8, BlockStarts(), Skipped())
    mixed, block = [lane.window(number) for number in range(8)], lane.block(0)
    assert not np.array_equal(mixed, block)
    np.testing.assert_array_equal(sorted(map(tuple, mixed)), sorted(map(tuple, block)))


@pytest.mark.parametrize("step", [0, 1, 2, 5, 17, 40])
def test_a_resumed_stream_continues_at_the_exact_document(four, step):
    first = batches(four.stream)
    expected = [first[s].tokens for s in range(step + 3)][step:]
    positions = json.loads(json.dumps(first.positions(step)))
    resumed = batches(four.stream)
    resumed.resume(positions)
    iterator = resumed.iterate(step)
    for tokens in expected:
        np.testing.assert_array_equal(next(iterator).tokens, tokens)


def merged_positions(readers, step, monkeypatch):
    """Positions of processes that each read their rows, as one process gets them from all."""
    tables = [np.asarray(reader.positions(step), np.int32) for reader in readers]
    with monkeypatch.context() as patch:
        patch.setattr(collectives.jax, "process_count", lambda: len(readers))
        patch.setattr(
            collectives.multihost_utils, "process_allgather", lambda table: np.stack(tables)
        )
        return readers[0].positions(step)


def test_positions_of_another_form_are_refused(four):
    resumed, positions = batches(four.stream), batches(four.stream).positions(0)
    for wrong in (
        None,
        positions[0],
        [*positions, [[0]]],
        [[[0.5, *row[1:]] for row in positions[0]]],
    ):
        with pytest.raises(
            UserError, match=r"data positions of the shape .* resume with the corpus"
        ):
            resumed.resume(wrong)


@pytest.mark.parametrize(
    "starts",
    [
        [((0,), (1, 2, 3))] * 4,
        [((0, 1), (2,), (3,)), ((0,), (1,), (2,), (3,)), ((0, 1, 2), (3,))],
        [((0, 1, 2, 3),), ((0, 2), (1, 3)), ((2, 3), (0, 1)), ((1,), (0, 2, 3))],
    ],
)
def test_a_stream_resumed_again_and_again_on_other_processes_continues(four, monkeypatch, starts):
    expected, positions = batches(four.stream), None
    for number, rows_of_processes in enumerate(starts):
        first, last = 11 * number, 11 * (number + 1)
        readers = [batches(four.stream, rows) for rows in rows_of_processes]
        for reader in readers:
            if positions is not None:
                reader.resume(positions)
            for step in range(first, last):
                np.testing.assert_array_equal(
                    reader[step].tokens, expected[step].tokens[list(reader.rows)]
                )
        positions = merged_positions(readers, last, monkeypatch)


@pytest.fixture
def often_interrupted():
    """Threads that take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def while_others_run(work, others, times=300):
    """Calls `work` while each of the others is called again and again in a thread."""
    ended = threading.Event()

    def run(other):
        for number in itertools.count():
            if ended.is_set():
                return
            other(number)

    threads = [threading.Thread(target=run, args=(other,)) for other in others]
    for thread in threads:
        thread.start()
    try:
        return [work() for _ in range(times)]
    finally:
        ended.set()
        for thread in threads:
            thread.join()


@pytest.mark.usefixtures("often_interrupted")
@pytest.mark.parametrize("lanes_of_threads", [("a", "a"), ("a", "b", "c"), ("b", "c", "a", "a")])
def test_starts_of_blocks_are_right_while_threads_add_others(monkeypatch, lanes_of_threads):
    monkeypatch.setattr(lanes, "_STARTS_KEPT", 20)
    starts = BlockStarts()
    others = [
        lambda n, lane=lane: starts.add(lane, n % 97 + 1, Position(row=n % 97 + 1))
        for lane in lanes_of_threads
    ]
    for block, start in while_others_run(lambda: starts.latest("a", 60), others):
        assert block <= 60 and start == Position(row=block)


@pytest.mark.usefixtures("often_interrupted")
def test_skipped_rows_are_counted_and_said_while_threads_skip_more():
    skipped = Skipped()
    counted = [0, 0, 0]

    def skip(thread, number):
        counted[thread] += 1
        skipped.add(f"of kind {number % 1009}", "here")

    others = [functools.partial(skip, thread) for thread in range(len(counted))]
    words = while_others_run(skipped.words, others, 60)
    assert words[-1] and sum(skipped.counts.values()) == sum(counted)


def test_a_resumed_stream_reads_nothing_before_its_document(four, monkeypatch):
    first = batches(four.stream)
    first[6]
    positions = first.positions(6)
    starts = sorted(row for _, _, _, row, _ in positions[0])
    read, texts = [], shards.texts

    def noted(shard, column, row, skipped):
        if threading.current_thread() is threading.main_thread():
            read.append(row)
        return texts(shard, column, row, skipped)

    monkeypatch.setattr(shards, "texts", noted)
    resumed = batches(four.stream)
    resumed.resume(positions)
    monkeypatch.setattr(resumed._ahead, "submit", lambda work: None)
    resumed[6]
    assert any(starts) and sorted(read) == starts


def test_positions_of_another_corpus_are_refused(four):
    with pytest.raises(UserError, match="resume with the corpus and batch of its run"):
        batches(four.stream).resume([[[0, 0, 0, 0, 0]]])


def test_the_lanes_divide_the_batch_and_have_shards():
    def stream(count):
        return Stream("x", tuple(Shard(str(n)) for n in range(count)), "text", 1)

    counts = [lanes.lane_count([stream(n)], batch) for n, batch in ((1, 8), (7, 12), (999, 1024))]
    assert counts == [1, 6, 64]
    assert lanes.lane_count([stream(9), stream(2)], 12) == 2


def test_a_mixture_has_windows_of_a_stream_and_of_stored_tokens(four):
    stored = np.full(17 * 16 + 1, 258, np.uint16)
    mixed = batches(None, weights=(0.75, 0.25), sources=(four.stream, stored))
    tokens = np.concatenate([mixed[step].tokens for step in range(8)])
    is_stored = (tokens == 258).all(axis=1)
    assert abs(is_stored.sum() - 8) <= 2 and not (tokens[~is_stored] == 258).any()
    resumed = batches(None, weights=(0.75, 0.25), sources=(four.stream, stored))
    resumed.resume(mixed.positions(6))
    np.testing.assert_array_equal(resumed[6].tokens, mixed[6].tokens)
    assert isinstance(mixed, TrainBatches)


def test_rows_without_text_are_skipped_counted_and_said(tmp_path, caplog):
    lines = ['{"text": "a"}', "{broken", '{"text": null}', '{"text": 3}', "[]", "", '{"text": " "}']
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, '{"text": "b \\ud800"}']) + "\n")
    skipped = Skipped()
    rows = list(shards.texts(Shard(str(tmp_path / "a.jsonl")), "text", 0, skipped))
    assert rows == [(0, "a"), (7, "b ?")]
    assert skipped.counts == {
        "that are no JSON object": 2,
        "without text": 2,
        'with a "text" that is no string': 1,
    }
    assert "row 1" in skipped.words() and "left out" in caplog.text


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_byte_order_mark_is_no_text(tmp_path, name):
    rows = ['{"text": "é"}', '{"text": "b"}'] if name == "a.jsonl" else ["é", "b"]
    path = tmp_path / name
    path.write_text("\n".join(rows), encoding="utf-8-sig")
    assert shards.text_column(str(path), "") == "text"
    read = shards.texts(Shard(str(path)), "text", 0, Skipped())
    assert [(row, text.strip()) for row, text in read] == [(0, "é"), (1, "b")]


@pytest.mark.parametrize("row", [0, 1, 9, 10, 11, 29, 30])
def test_rows_are_numbered_in_the_file_whatever_the_first_is(files, row):
    for file in files[:1]:
        rows = list(shards.texts(Shard(file), "text", row, Skipped()))
        assert rows == [(n, text(0, n)) for n in range(row, 30)]


def test_parts_of_a_parquet_file_have_each_row_once(tmp_path):
    path = str(write(tmp_path / "a.parquet", [text(0, row) for row in range(45)]))
    pieces = shards.parts(path, 3)
    rows = [row for piece in pieces for row, _ in shards.texts(piece, "text", 0, Skipped())]
    assert len(pieces) == 3 and rows == list(range(45))
    assert len(shards.parts(path, 99)) == 5


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_damaged_shard_is_named(tmp_path, name, damage):
    path = write(tmp_path / name, [text(0, row) * 50 for row in range(500)])
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] if damage == "cut" else b"x" * len(data))
    with pytest.raises(UserError, match=r"shard .*a\..* is damaged after row"):
        list(shards.texts(Shard(str(path)), "text", 0, Skipped()))


def test_the_column_is_the_named_one_or_text_or_the_only_one(tmp_path):
    for kind in ("parquet", "jsonl"):
        both = str(write(tmp_path / f"both.{kind}", ["a", "b"], title=["c", "d"], n=[1, 2]))
        one = tmp_path / f"one.{kind}"
        rows = [{"body": "a", "n": 1}]
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), one)
        else:
            one.write_text(json.dumps(rows[0]))
        assert shards.text_column(both, "") == "text"
        assert shards.text_column(both, "title") == "title"
        assert shards.text_column(str(one), "") == "body"
        with pytest.raises(UserError, match=r'no column "n" of strings.*legal for data.column'):
            shards.text_column(both, "n")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A fake hub that the libraries of this process use."""
    server = FakeHub(tmp_path / "hub")
    with server.used_here(monkeypatch, tmp_path / "cached"):
        yield server
    server.close()


def serve(hub, files=4, rows=30, kind="parquet", config=""):
    folder = hub.folder / "owner" / "name" / config
    for n in range(files):
        name = f"train-{n:05d}-of-{files:05d}.{kind}"
        write(folder / name, [text(n, row) for row in range(rows)])


def test_a_dataset_of_the_hub_is_streamed_and_its_name_has_the_revision(hub, tmp_path):
    serve(hub)
    corpus = load_corpus("hf:owner/name", tmp_path / "cache")
    assert corpus.name == f"hf:owner/name@{hub.revision('owner/name')}"
    assert corpus.streamed and len(corpus.validation) == 2
    again = load_corpus(corpus.name, tmp_path / "cache")
    assert (again.name, again.content_hash) == (corpus.name, corpus.content_hash)
    assert {document.text for document in corpus.train} | {
        document.text for document in corpus.validation
    } == {text(n, row) for n in range(4) for row in range(30)}


def test_files_of_a_configuration_are_those_of_its_readme(hub, tmp_path):
    serve(hub, kind="jsonl.gz", config="en")
    serve(hub, files=1, config="de")
    (hub.folder / "owner" / "name" / "README.md").write_text(
        "---\nconfigs:\n- config_name: en\n  data_files: en/*\n"
        "- config_name: de\n  data_files: de/*\n---\n"
    )
    corpus = load_corpus("hf:owner/name/en", tmp_path / "cache")
    assert [shard.address.rpartition("/")[2] for shard in corpus.stream.shards] == [
        f"train-{n:05d}-of-00004.jsonl.gz" for n in range(4)
    ]
    with pytest.raises(UserError, match=r"'fr' not found.*\['en', 'de'\]"):
        load_corpus("hf:owner/name/fr", tmp_path / "cache")


def test_a_large_dataset_is_never_fetched_whole(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_BLOCK", 4096)
    monkeypatch.setattr(streamed, "HELD_OUT_CHARACTERS", 1000)
    draw = np.random.default_rng(0)
    for n in range(4):
        texts = [draw.bytes(400).hex() for _ in range(2000)]
        path = write(hub.folder / "owner" / "name" / f"train-{n}-of-4.parquet", [])
        pq.write_table(pa.table({"text": texts}), path, row_group_size=100)
    size = sum(path.stat().st_size for path in hub.files("owner/name"))
    corpus = load_corpus("hf:owner/name", tmp_path / "cache")
    batch = batches(corpus.stream)[0].tokens
    assert batch.shape == (4, 16)
    assert hub.bytes_of(".parquet") < size / 2
    assert not list(tmp_path.glob("cache/**/*.parquet"))


@pytest.mark.parametrize(
    "name, files, message",
    [
        ("hf:owner/missing", {}, r"missing could not be listed.*legal: hf:OWNER/NAME"),
        ("hf:owner/name", {"train.csv": "text\na\n"}, r"files such as train\.csv; legal: \.parq"),
        ("hf:owner/name", {"README.md": "# nothing"}, "could not be listed"),
        ("hf:owner/name", {"train.jsonl": '{"n": 1}\n'}, r'no column "text" of strings.*: n\.'),
        ("hf:owner/name", {"test.jsonl": '{"text": "a"}\n'}, "no split 'train'"),
        ("hf:owner/name", {"train.jsonl": '{"text": "a"}\n'}, "1 documents; legal: 2 or more"),
    ],
)
def test_an_unusable_dataset_is_refused(hub, tmp_path, name, files, message):
    for file, content in files.items():
        path = hub.folder / "owner" / "name" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    with pytest.raises(UserError, match=message):
        load_corpus(name, tmp_path / "cache")


def test_a_connection_that_breaks_is_opened_again_at_its_row(four, monkeypatch):
    monkeypatch.setattr(shards.storage, "WAITS", (0.0, 0.0))
    rows, broken = shards._rows, []

    def breaks(shard, column, row):
        for number, value, reason in rows(shard, column, row):
            if number % 4 == 3 and (shard, number) not in broken:
                broken.append((shard, number))
                raise ConnectionResetError("peer")
            yield number, value, reason

    expected = [batches(four.stream)[step].tokens for step in range(3)]
    monkeypatch.setattr(shards, "_rows", breaks)
    again = [batches(four.stream)[step].tokens for step in range(3)]
    np.testing.assert_array_equal(expected, again)
    assert broken
    broken.clear()
    monkeypatch.setattr(shards, "_rows", lambda *_: (_ for _ in ()).throw(TimeoutError("slow")))
    with pytest.raises(UserError, match="check the network, and resume the run"):
        batches(four.stream)[0]


def test_a_row_that_is_left_out_counts_once_where_a_connection_breaks(tmp_path, monkeypatch):
    monkeypatch.setattr(shards.storage, "WAITS", (0.0, 0.0))
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "a"}\n\xff\n[]\n{"text": 1}\n{"text": ""}\n{"text": "b"}\n')
    rows, broken = shards._rows, []

    def breaks(shard, column, row):
        for number, value, reason in rows(shard, column, row):
            if number not in broken:
                broken.append(number)
                raise ConnectionResetError("peer")
            yield number, value, reason

    monkeypatch.setattr(shards, "_rows", breaks)
    skipped = shards.Skipped()
    shard = shards.Shard(str(path))
    assert list(shards.texts(shard, "text", 0, skipped)) == [(0, "a"), (5, "b")]
    assert broken == list(range(6)) and set(skipped.counts.values()) == {1}
    assert len(skipped.counts) == 4


def test_a_lane_reads_ahead_and_its_error_comes_when_it_is_needed(four, monkeypatch):
    read = []
    block = lanes.Lane.block
    monkeypatch.setattr(lanes.Lane, "block", lambda lane, n: read.append(n) or block(lane, n))
    ahead = batches(four.stream)
    monkeypatch.setattr(ahead._ahead, "submit", lambda work: work())
    ahead[0]
    assert 1 in read
    assert Position() == (0, 0, 0, 0) and stream_batches._UNKNOWN < 0


@pytest.mark.parametrize("listed", [0, 2, 4, 10**6])
def test_a_shard_of_another_size_than_listed_is_no_whole(listed, tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a\nb")
    assert len(list(shards.texts(shards.Shard(str(path)), "text", 0, shards.Skipped()))) == 2
    monkeypatch.setattr(shards, "size", lambda address: listed)
    monkeypatch.setattr(shards.storage, "WAITS", ())
    with pytest.raises(UserError, match=f"it ends after 3 of {listed:,} bytes"):
        list(shards.texts(shards.Shard(str(path)), "text", 0, shards.Skipped()))
