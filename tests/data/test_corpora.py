import json
import os
import signal
import subprocess
import sys
import time
from pathlib import PurePath

import pytest
from marks import some

from sparse_dataflow.data import local_files
from sparse_dataflow.data.corpora import load_corpus
from sparse_dataflow.data.corpus import stored
from sparse_dataflow.data.documents import PythonStdlibSource
from sparse_dataflow.data.held_out import digest
from sparse_dataflow.files.errors import UserError


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def text_by_id(corpus):
    return {d.id: d.text for split in (corpus.train, corpus.validation) for d in split}


@pytest.fixture
def stories(tmp_path):
    return write(
        tmp_path / "stories", {f"part{i % 3}/{i}.txt": f"story {i} — né\r\n" for i in range(80)}
    )


def test_a_folder_is_stored_completely_and_split_by_the_hash_rule(stories, cache):
    corpus = load_corpus(str(stories), cache)
    assert text_by_id(corpus) == {f"part{i % 3}/{i}.txt": f"story {i} — né\r\n" for i in range(80)}
    assert len(corpus.train) + len(corpus.validation) == 80
    assert all(digest(document.text) % 20 == 0 for document in corpus.validation)
    assert not any(digest(document.text) % 20 == 0 for document in corpus.train)
    assert corpus.train[-1] == corpus.train[len(corpus.train) - 1]
    with pytest.raises(IndexError):
        corpus.train[len(corpus.train)]


def test_a_prepared_corpus_is_not_prepared_again(stories, cache, monkeypatch):
    first = load_corpus(str(stories), cache)

    def fail(*_):
        raise AssertionError("prepared twice")

    monkeypatch.setattr(stored, "_prepare", fail)
    second = load_corpus(str(stories), cache)
    assert second.content_hash == first.content_hash
    assert text_by_id(second) == text_by_id(first)


def test_the_content_hash_depends_on_content_and_not_on_the_path(stories, tmp_path, cache):
    original = load_corpus(str(stories), cache)
    moved = load_corpus(str(stories.rename(tmp_path / "moved")), cache)
    assert moved.content_hash == original.content_hash
    (tmp_path / "moved" / "part0" / "0.txt").write_text("another text")
    edited = load_corpus(str(tmp_path / "moved"), cache)
    assert edited.content_hash != original.content_hash
    assert text_by_id(edited)["part0/0.txt"] == "another text"


def test_nothing_is_written_to_the_terminal(stories, cache, capfd):
    load_corpus(str(stories), cache)
    assert capfd.readouterr() == ("", "")


def test_listing_a_folder_compares_no_file_with_all_others(tmp_path, monkeypatch):
    """So twice the files take twice the time."""
    files = [path for n in range(60) for path in (tmp_path / f"{n}.txt", tmp_path / f"{n}.bin")]
    for path in files:
        path.touch()
    compared = []
    equals = PurePath.__eq__
    monkeypatch.setattr(PurePath, "__eq__", lambda a, b: compared.append(a) or equals(a, b))
    assert local_files.LocalSource(tmp_path).files_read
    assert len(compared) < 3 * len(files)


def test_a_record_is_read_without_a_scan_of_the_file(stories, cache):
    """array_record reads a range in constant time, and a list of indices in that of the file."""
    records, reads = load_corpus(str(stories), cache).train.documents.records, []

    class Recorder:
        def __init__(self, reader):
            self.num_records, self._read = reader.num_records, reader.read

        def read(self, *arguments):
            reads.append(arguments)
            return self._read(*arguments)

    expected = [records[index] for index in range(len(records))]
    records._reader = Recorder(records._reader)
    assert list(records) == expected
    assert reads[: len(expected)] == [(n, n + 1) for n in range(len(expected))]


def test_lines_of_jsonl_are_documents(tmp_path, cache):
    lines = [json.dumps({"text": f"line {i}\nof two", "other": i}) for i in range(40)]
    lines[3:3] = ["", json.dumps({"text": "  "})]
    path = write(tmp_path, {"data.jsonl": "\ufeff" + "\n".join(lines)}) / "data.jsonl"
    documents = text_by_id(load_corpus(str(path), cache))
    assert sorted(documents.values()) == sorted(f"line {i}\nof two" for i in range(40))
    assert documents["data.jsonl:1"] == "line 0\nof two"


def test_a_single_document_is_cut_into_two_splits(tmp_path, cache):
    text = "".join(f"line {i}\n" for i in range(100))
    write(tmp_path, {"one.txt": text})
    corpus = load_corpus(str(tmp_path / "one.txt"), cache)
    assert [len(corpus.train), len(corpus.validation)] == [1, 1]
    assert corpus.train[0].text + corpus.validation[0].text == text


@pytest.mark.parametrize(
    "files, name, message",
    [
        ({}, "missing", "does not exist|no corpus"),
        ({}, "missing.txt", "does not exist"),
        ({"a.csv": "text"}, ".", "has no .txt, .md"),
        ({"a.csv": "text"}, "a.csv", "has no .txt, .md"),
        ({".a.txt": "text", ".git/b.txt": "text"}, ".", "has no .txt, .md"),
        ({"a.txt": "", "b/c.jsonl": "\n \n"}, ".", "empty"),
        ({"a.txt": "fine", "b.txt": b"caf\xe9"}, ".", r"b\.txt is not UTF-8.*byte 3"),
        ({"a.txt": "fine", "b.jsonl": b'{"text": "caf\xe9"}'}, ".", r"b\.jsonl is not UTF-8"),
        ({"b.jsonl": '{"text": "x"}\n{"text": '}, ".", r"b\.jsonl, line 2, is not JSON"),
        ({"b.jsonl": '{"body": 3}'}, ".", r'b\.jsonl, line 1, has no column "text"'),
        ({"b.jsonl": '["text"]'}, ".", r"b\.jsonl, line 1, has no field"),
        ({"b.jsonl": '{"text": "\\ud800"}'}, ".", r"b\.jsonl, line 1, .* surrogate"),
        ({"b.txt": "x"}, ".", "too short"),
    ],
)
def test_invalid_input_raises(tmp_path, cache, monkeypatch, files, name, message):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(write(tmp_path / "folder", files))
    with pytest.raises(UserError, match=message):
        load_corpus(name, cache)


LONG = "".join(f"line {number}, and more words: é\n" for number in range(200_000))


@pytest.mark.parametrize("text", [LONG, "é" * 5_000_000, "\ufeff" + LONG])
@pytest.mark.parametrize("suffix", some(["txt", "jsonl"], "jsonl"))
def test_a_long_text_becomes_several_documents(tmp_path, cache, text, suffix):
    text = text if suffix == "txt" else text.removeprefix("\ufeff")
    content = text if suffix == "txt" else json.dumps({"text": text})
    (tmp_path / f"long.{suffix}").write_text(content, encoding="utf-8")
    source = local_files.LocalSource(tmp_path / f"long.{suffix}")
    read = list(source.documents())
    assert "".join(document.text for document in read) == text.removeprefix("\ufeff")
    assert len({document.id for document in read}) == len(read) > 8
    assert max(len(document.text.encode()) for document in read) <= 2 * local_files.PIECE
    if "\n" in text:
        assert all(document.text.endswith("\n") for document in read)
    corpus = load_corpus(str(tmp_path / f"long.{suffix}"), cache)
    assert 0 < len(corpus.validation) < len(corpus.train)


def test_a_text_that_is_not_utf_8_far_inside_is_refused_with_the_byte(tmp_path):
    (tmp_path / "long.txt").write_bytes(b"words\n" * 1_000_000 + b"\xff" + b"words\n")
    with pytest.raises(UserError, match=r"not UTF-8 .* at byte 6000000"):
        list(local_files.LocalSource(tmp_path / "long.txt").documents())


def test_a_line_without_end_is_refused(tmp_path, cache):
    with (tmp_path / "long.jsonl").open("wb") as file:
        file.truncate(300 * 2**20)
    with pytest.raises(UserError, match=r"long\.jsonl, line 1, is longer than 64 MiB"):
        load_corpus(str(tmp_path / "long.jsonl"), cache)


@pytest.mark.parametrize("name", ["pipe.txt", "pipe.jsonl"])
def test_a_named_pipe_is_refused(tmp_path, cache, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="neither a folder nor a regular file"):
        load_corpus(str(tmp_path / name), cache)


def test_records_are_stored_in_order_on_disk_too(tmp_path, cache, monkeypatch):
    """tfds kept them in memory, and needed tensorflow for more than 1 GB."""
    monkeypatch.setattr("tensorflow_datasets.core.shuffle.MAX_MEM_BUFFER_SIZE", 1000)
    lines = [json.dumps({"text": f"document {number}"}) for number in range(2000)]
    (tmp_path / "many.jsonl").write_text("\n".join(lines))
    corpus = load_corpus(str(tmp_path / "many.jsonl"), cache)
    for split in (corpus.train, corpus.validation):
        numbers = [int(document.text.split()[1]) for document in split]
        assert numbers == sorted(numbers)
    assert len(corpus.train) + len(corpus.validation) == 2000


def test_an_unknown_name_suggests_the_closest_legal_name(cache):
    with pytest.raises(UserError, match=r"Did you mean 'python_stdlib'.*a folder"):
        load_corpus("python_stlib", cache)


def test_an_unwritable_cache_raises_user_error(stories, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        load_corpus(str(stories), tmp_path / "file" / "cache")


def test_a_full_disk_while_storing_raises_user_error(stories, cache, monkeypatch):
    from array_record.python import array_record_module

    class Full(array_record_module.ArrayRecordWriter):
        def write(self, data):
            raise RuntimeError("write() failed: No space left on device")

    monkeypatch.setattr(array_record_module, "ArrayRecordWriter", Full)
    with pytest.raises(UserError, match="No space left"):
        load_corpus(str(stories), cache)
    monkeypatch.undo()
    assert len(text_by_id(load_corpus(str(stories), cache))) == 80


def test_stored_documents_are_compared_with_the_source(stories, cache, monkeypatch):
    from sparse_dataflow.data import stored_documents

    real = stored_documents.Records.__getitem__

    def lossy(self, index):
        record = real(self, index)
        return record | {"text": record["text"].upper()}

    monkeypatch.setattr(stored_documents.Records, "__getitem__", lossy)
    with pytest.raises(UserError, match="differ from their source"):
        load_corpus(str(stories), cache)
    monkeypatch.undo()
    assert "story 1 — né\r\n" in text_by_id(load_corpus(str(stories), cache)).values()


def test_a_truncated_file_is_made_again(stories, cache, caplog):
    whole = text_by_id(load_corpus(str(stories), cache))
    (records,) = cache.rglob("*documents.array_record*")
    records.write_bytes(records.read_bytes()[:100])
    assert text_by_id(load_corpus(str(stories), cache)) == whole
    assert "made again" in caplog.text


@pytest.fixture
def stdlib(tmp_path, monkeypatch):
    root = tmp_path / "lib"
    write(root, {f"pkg/module{i}.py": f"x = {i}\n" for i in range(40)})
    write(
        root,
        {
            "latin.py": b"# -*- coding: latin-1 -*-\nname = 'caf\xe9'\n",
            "broken.py": b"name = 'caf\xe9'\n",
            "empty.py": "",
            "notes.txt": "not source",
            "test/test_os.py": "excluded",
            "pkg/tests/deep/a.py": "excluded",
            "idlelib/idle_test/a.py": "excluded",
            "site-packages/numpy/a.py": "excluded",
            "__pycache__/a.py": "excluded",
            "_sysconfigdata__linux_.py": "excluded",
            "sitecustomize.py": "excluded",
            "testing.py": "y = 1\n",
        },
    )
    monkeypatch.setattr(PythonStdlibSource, "from_interpreter", classmethod(lambda cls: cls(root)))
    return root


def test_the_standard_library_excludes_its_tests(stdlib, cache):
    documents = text_by_id(load_corpus("python_stdlib", cache))
    assert documents == {f"pkg/module{i}.py": f"x = {i}\n" for i in range(40)} | {
        "latin.py": "# -*- coding: latin-1 -*-\nname = 'café'\n",
        "testing.py": "y = 1\n",
    }


def test_each_interpreter_version_has_its_own_dataset(stdlib, cache, monkeypatch):
    original = load_corpus("python_stdlib", cache)
    monkeypatch.setattr("platform.python_version", lambda: "3.99.0")
    load_corpus("python_stdlib", cache)
    assert any("cpython-3.99.0" in p.read_text() for p in (cache / "texts").glob("*.record"))
    write(stdlib, {"new.py": "z = 1\n"})
    assert load_corpus("python_stdlib", cache).content_hash != original.content_hash


def test_an_interpreter_without_source_raises_user_error(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(
        PythonStdlibSource, "from_interpreter", classmethod(lambda cls: cls(tmp_path / "no"))
    )
    with pytest.raises(UserError, match=r"no \.py files"):
        load_corpus("python_stdlib", cache)


def test_the_real_standard_library_is_found():
    documents = {d.id: d for d in PythonStdlibSource.from_interpreter().documents()}
    assert {"os.py", "json/decoder.py", "unittest/case.py"} <= set(documents)
    folders = {folder for name in documents for folder in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages"}
    assert sum(len(d.text) for d in documents.values()) > 5e6


PREPARE = """
import sys, time
from pathlib import Path
from sparse_dataflow.data import local_files
from sparse_dataflow.data.corpora import load_corpus
real = local_files._read_file
def read(path, name, *rest):
    if sys.argv[3] == "hang" and path.name == "79.txt":
        Path(sys.argv[2], "writing").touch()
        time.sleep(600)
    return real(path, name, *rest)
local_files._read_file = read
print(load_corpus(sys.argv[1], Path(sys.argv[2])).content_hash)
"""


def start(stories, cache, mode):
    return subprocess.Popen(
        [sys.executable, "-c", PREPARE, str(stories), str(cache), mode],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_kill_while_preparing_leaves_a_usable_cache(stories, cache):
    cache.mkdir()
    process = start(stories, cache, "hang")
    deadline = time.monotonic() + 600
    while not (cache / "writing").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(cache.rglob("*.partial"))
    assert len(text_by_id(load_corpus(str(stories), cache))) == 80
    assert not list(cache.rglob("*.partial"))


def test_concurrent_processes_prepare_the_same_corpus(stories, cache):
    processes = [start(stories, cache, "plain") for _ in range(2)]
    hashes = {process.communicate(timeout=1500)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert hashes == {load_corpus(str(stories), cache).content_hash}


def test_a_folder_of_text_needs_no_tensorflow_datasets(stories, cache):
    code = (
        "import sys, pathlib; from sparse_dataflow.data.corpora import load_corpus;"
        "corpus = load_corpus(sys.argv[1], pathlib.Path(sys.argv[2]));"
        "assert len(corpus.train) + len(corpus.validation) == 80;"
        "sys.exit('tensorflow_datasets' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(stories), str(cache)], timeout=300, check=False
    )
    assert done.returncode == 0
