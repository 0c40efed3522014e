import gzip
import json
import sys

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparse_dataflow.data import cache, local_files
from sparse_dataflow.data.corpora import load_corpus
from sparse_dataflow.data.local_files import LocalSource
from sparse_dataflow.files.errors import UserError

TEXTS = [f"text {number}: né\nof two lines" for number in range(60)]
LINES = "".join(json.dumps({"text": text, "id": 7}) + "\n" for text in TEXTS).encode()


def write(path, data):
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(data))
    elif path.suffix == ".zst":
        with pa.CompressedOutputStream(str(path), "zstd") as file:
            file.write(data)
    else:
        path.write_bytes(data)
    return path


def texts(path):
    return [document.text for document in LocalSource(path).documents()]


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.json.gz", "a.json.zst"]
)
def test_lines_of_json_are_documents_compressed_or_not(tmp_path, name):
    assert texts(write(tmp_path / name, LINES)) == TEXTS


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst"])
@pytest.mark.parametrize("size", [10, 5 * 2**20])
def test_a_text_file_is_one_document_or_parts_compressed_or_not(tmp_path, name, size):
    content = ("some words é\n" * (size // 14 + 1)).encode()
    read = texts(write(tmp_path / name, content))
    assert "".join(read) == content.decode()
    assert (len(read) > 1) == (size > local_files.LONG_TEXT)


def test_gzip_files_that_were_joined_are_read_whole(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES) + gzip.compress(LINES))
    assert texts(tmp_path / "a.jsonl.gz") == TEXTS * 2


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_rows_of_parquet_are_documents_and_missing_texts_are_skipped(tmp_path, kind):
    column = pa.array([None, *TEXTS, "", "x" * 5 * 2**20], kind)
    pq.write_table(pa.table({"id": range(63), "text": column}), tmp_path / "a.parquet", 20)
    read = list(LocalSource(tmp_path / "a.parquet").documents())
    assert [document.text for document in read[:60]] == TEXTS
    assert [read[0].id, read[-1].id] == ["a.parquet:2", "a.parquet:63#19"]
    assert "".join(document.text for document in read[60:]) == "x" * 5 * 2**20


def test_a_folder_of_all_formats_is_one_corpus(tmp_path, caplog):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("a.jsonl", "b.json.gz", "c.jsonl.zst"):
        write(folder / name, LINES)
    pq.write_table(pa.table({"text": TEXTS}), folder / "d.parquet")
    (folder / "README.md").write_text("read too")
    (folder / "table.csv").write_text("no corpus")
    corpus = load_corpus(str(folder), tmp_path / "cache")
    assert len(corpus.train) + len(corpus.validation) == 241
    assert f"{folder}: skipped 1 files: .csv" in caplog.text


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.txt.gz"])
@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_damaged_file_is_refused_with_its_name(tmp_path, name, damage):
    path = tmp_path / name
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": TEXTS}), path)
    else:
        write(path, LINES * 50)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"something else")
    with pytest.raises(UserError, match=rf"{name} cannot be read"):
        texts(path)


def test_a_parquet_file_without_text_names_its_columns(tmp_path):
    pq.write_table(pa.table({"text": [1], "content": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match='no column "text" of strings; its columns: text, content'):
        texts(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.parquet"])
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, name):
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"needs the package pyarrow: pip install .*\[data\]"):
        texts(tmp_path / name)


@pytest.fixture
def saved(tmp_path):
    dataset = datasets.Dataset.from_dict({"text": [*TEXTS, None], "id": range(61)})
    dataset.save_to_disk(str(tmp_path / "saved"))
    return tmp_path / "saved"


def test_a_saved_dataset_is_split_by_the_hash_rule(saved, tmp_path):
    corpus = load_corpus(str(saved), tmp_path / "cache")
    read = {document.text for split in (corpus.train, corpus.validation) for document in split}
    assert read == set(TEXTS) and len(corpus.train) + len(corpus.validation) == 60
    moved = saved.rename(tmp_path / "moved")
    assert load_corpus(str(moved), tmp_path / "cache").content_hash == corpus.content_hash


def test_a_saved_dictionary_keeps_its_own_validation_split(tmp_path):
    make = datasets.Dataset.from_dict
    splits = {"train": make({"text": TEXTS}), "validation": make({"text": ["held out"]})}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    corpus = load_corpus(str(tmp_path / "saved"), tmp_path / "cache")
    assert [document.text for document in corpus.train] == TEXTS
    assert [document.text for document in corpus.validation] == ["held out"]


def test_a_saved_dataset_without_text_names_its_columns(tmp_path):
    numbers = {"number": list(range(60))}
    datasets.Dataset.from_dict(numbers).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(UserError, match=r'no column "text" of strings; its columns: number\.'):
        load_corpus(str(tmp_path / "saved"), tmp_path / "cache")


def test_a_damaged_saved_dataset_is_refused(saved, tmp_path):
    (saved / "state.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        load_corpus(str(saved), tmp_path / "cache")


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_the_text_is_in_the_named_column_or_in_the_only_one_of_strings(tmp_path, name):
    def written(**columns):
        table = pa.table({"n": list(range(60)), **columns})
        if name.endswith("parquet"):
            pq.write_table(table, tmp_path / name)
        else:
            lines = "".join(json.dumps(row) + "\n" for row in table.to_pylist())
            (tmp_path / name).write_text(lines)

    written(body=TEXTS)
    assert texts(tmp_path / name) == TEXTS
    written(body=TEXTS, title=["t"] * 60)
    with pytest.raises(UserError, match=r"legal for data\.column: body, title"):
        texts(tmp_path / name)
    named = LocalSource(tmp_path / name, column="body")
    assert [document.text for document in named.documents()] == TEXTS


ROWS = [(None, "", "  \n ", f"text number {i} is here.")[i % 4] for i in range(80)]


def write_jsonl(folder, rows):
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))


def write_ndjson(folder, rows):
    (folder / "ROWS.NDJSON").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))


def write_json(folder, rows):
    (folder / "rows.json").write_text(json.dumps([{"text": row} for row in rows], indent=2))


def write_parquet(folder, rows):
    pq.write_table(pa.table({"text": rows}), folder / "rows.Parquet")


def write_dataset(folder, rows):
    datasets.Dataset.from_dict({"text": rows}).save_to_disk(str(folder))


def write_shuffled_dataset(folder, rows):
    """Rows behind a mapping of indices, and a format that hides the text."""
    dataset = datasets.Dataset.from_dict({"text": rows, "n": list(range(len(rows)))})
    dataset.shuffle(seed=0).with_format("numpy", columns=["n"]).save_to_disk(str(folder))


def write_text_files(folder, rows):
    for number, row in enumerate(rows):
        (folder / f"{number}.rst").write_text(row or "")


@pytest.mark.parametrize(
    "write_rows",
    [
        write_jsonl,
        write_ndjson,
        write_json,
        write_parquet,
        write_dataset,
        write_shuffled_dataset,
        write_text_files,
    ],
)
def test_null_empty_and_blank_rows_are_no_documents_in_any_format(tmp_path, caplog, write_rows):
    folder = tmp_path / write_rows.__name__
    folder.mkdir()
    write_rows(folder, ROWS)
    corpus = load_corpus(str(folder), tmp_path / "cache")
    read = [document.text for split in (corpus.train, corpus.validation) for document in split]
    assert sorted(read) == sorted(row for row in ROWS if row and row.strip())
    assert "60 rows or files of blank" in caplog.text or "60 of 80 rows are blank" in caplog.text


def test_files_of_other_kinds_are_skipped_and_said(tmp_path, caplog):
    (tmp_path / "package.json").write_text('{\n "name": "no text"\n}')
    (tmp_path / "notes.MD").write_text("notes")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints" / "notes.md").write_text("an older copy")
    for name in ("a.csv", "b.csv", "c.tar.xz"):
        (tmp_path / name).write_text("x")
    assert [document.id for document in LocalSource(tmp_path).documents()] == ["notes.MD"]
    assert f"{tmp_path}: skipped 3 files: .csv, .tar.xz" in caplog.text
    assert "skipped a file" in caplog.text and "package.json" in caplog.text
    with pytest.raises(UserError, match='has no field "text"'):
        list(LocalSource(tmp_path / "package.json").documents())


def test_runs_and_the_cache_inside_a_folder_of_text_are_no_text(tmp_path, monkeypatch):
    """They change while the corpus is read."""
    monkeypatch.setattr(cache, "FOLDER", tmp_path / "cache" / "sparse_dataflow")
    for place in ("runs/a/run.json", "runs/a/sparse/metrics.jsonl"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text('{"text": "not mine"}')
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    corpus = load_corpus(str(tmp_path), cache.FOLDER)
    assert len(corpus.train) + len(corpus.validation) == 40
    assert len(load_corpus(str(tmp_path), cache.FOLDER).train) == len(corpus.train)


def test_copies_in_a_saved_dataset_are_in_one_split(tmp_path):
    write_dataset(tmp_path / "saved", [f"text {number // 2}" for number in range(400)])
    corpus = load_corpus(str(tmp_path / "saved"), tmp_path / "cache")
    train, validation = ({d.text for d in split} for split in (corpus.train, corpus.validation))
    assert validation and not train & validation


def test_rows_of_a_saved_dataset_that_its_validation_split_has_are_left_out(tmp_path, caplog):
    rows = {"train": [f"text {n}" for n in range(40)], "test": ["text  7\n", "text 9", "new"]}
    splits = {split: datasets.Dataset.from_dict({"text": texts}) for split, texts in rows.items()}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    corpus = load_corpus(str(tmp_path / "saved"), tmp_path / "cache")
    assert {d.text for d in corpus.train} == set(rows["train"]) - {"text 7", "text 9"}
    assert [d.text for d in corpus.validation] == rows["test"]
    assert "2 of 40 documents of training have text that is held out" in caplog.text


def test_a_corpus_of_the_users_own_is_held_out_and_all_of_the_other_is_trained(tmp_path):
    for folder, word in (("train", "a"), ("held_out", "b")):
        (tmp_path / folder).mkdir()
        for number in range(40):
            (tmp_path / folder / f"{number}.txt").write_text(f"{word} {number}")
    cache = tmp_path / "cache"
    corpus = load_corpus(str(tmp_path / "train"), cache, validation=str(tmp_path / "held_out"))
    assert {document.text for document in corpus.train} == {f"a {n}" for n in range(40)}
    assert {document.text for document in corpus.validation} == {f"b {n}" for n in range(40)}
    assert corpus.content_hash != load_corpus(str(tmp_path / "train"), cache).content_hash
