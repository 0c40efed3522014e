"""Copies that tfds prepared, of any file format, and names that it cannot prepare here."""

import functools
import http.server
import importlib.util
import socket
import struct
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import google_crc32c
import pytest
import tensorflow_datasets as tfds
from places import ROOT
from tensorflow_datasets.core.download import downloader

from sparse_dataflow.data import tfds_copies
from sparse_dataflow.data.corpora import load_corpus
from sparse_dataflow.files.errors import UserError


class CopiedProse(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version("1.2.3")

    def _info(self):
        features = {"title": tfds.features.Text(), "text": tfds.features.Text()}
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(60), "validation": self._generate_examples(4)}

    def _generate_examples(self, count):
        for i in range(count):
            yield i, {"title": f"title {i}", "text": f"text {i} ü of {count}"}


def masked(data):
    crc = google_crc32c.value(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def tfrecord(records):
    """The bytes of a TFRecord file, as its format is published."""
    frames = []
    for record in records:
        length = struct.pack("<Q", len(record))
        frames.append(length + masked(length) + record + masked(record))
    return b"".join(frames)


def prepared(root, kind):
    """The folder of a copy in a file format; a TFRecord one is made of the array_record one."""
    written = "array_record" if kind == "tfrecord" else kind
    builder = CopiedProse(data_dir=root, file_format=written)
    builder.download_and_prepare()
    folder = Path(builder.data_path)
    if kind == "tfrecord":
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        for path in folder.glob("*.array_record*"):
            source = ArrayRecordDataSource([str(path)])
            data = tfrecord([source[i] for i in range(len(source))])
            path.with_name(path.name.replace("array_record", "tfrecord")).write_bytes(data)
            path.unlink()
        info = folder / "dataset_info.json"
        info.write_text(info.read_text().replace("array_record", "tfrecord"))
    return folder


def texts(documents):
    return [document.text for document in documents]


@pytest.mark.parametrize("kind", ["array_record", "tfrecord", "parquet"])
def test_a_prepared_copy_of_any_format_reads_by_its_folder_and_its_name(
    tmp_path, monkeypatch, kind
):
    folder = prepared(tmp_path / "copies", kind)
    corpus = load_corpus(str(folder), tmp_path / "cache")
    assert texts(corpus.train) == [f"text {i} ü of 60" for i in range(60)]
    assert texts(corpus.validation) == [f"text {i} ü of 4" for i in range(4)]
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "copies"))
    for name in ("copied_prose", "copied_prose:1.2.3"):
        named = load_corpus(name, tmp_path / "cache")
        assert texts(named.train) == texts(corpus.train)
    titles = load_corpus(str(folder), tmp_path / "cache", column="title")
    # Four titles are held out too, and left out of training.
    assert texts(titles.train) == [f"title {i}" for i in range(4, 60)]
    with pytest.raises(UserError, match=r"legal for data\.column: (title, text|text, title)"):
        load_corpus(str(folder), tmp_path / "cache", column="body")


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda data: data[:-40], "is damaged: record"),
        (lambda data: data[:60] + b"?" + data[61:], "is damaged"),
        (lambda data: b"", "is damaged: record 0 of 60"),
        (lambda data: data + data, "is damaged: record 120 of 60"),
    ],
)
def test_a_damaged_tfrecord_copy_is_refused(tmp_path, damage, message):
    folder = prepared(tmp_path / "copies", "tfrecord")
    path = next(folder.glob("*train*"))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=message):
        load_corpus(str(folder), tmp_path / "cache")


def test_a_parquet_copy_that_lost_records_is_refused(tmp_path):
    folder = prepared(tmp_path / "copies", "parquet")
    info = folder / "dataset_info.json"
    info.write_text(info.read_text().replace('"60"', '"61"'))
    with pytest.raises(UserError, match="has 60 of the 61 records"):
        load_corpus(str(folder), tmp_path / "cache")


@pytest.mark.parametrize("kind", ["riegeli", "zarr"])
def test_a_copy_of_another_format_is_refused(tmp_path, kind):
    folder = prepared(tmp_path / "copies", "array_record")
    info = folder / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", kind))
    with pytest.raises(UserError, match=rf"{folder}.*{kind}"):
        load_corpus(str(folder), tmp_path / "cache")


@pytest.mark.parametrize(
    "name, package, hub",
    [
        ("c4/en", "apache_beam", "hf:allenai/c4/en"),
        ("c4/realnewslike:3.0.1", "apache_beam", "hf:allenai/c4/realnewslike"),
        ("wiki40b/de", "apache_beam", "hf:google/wiki40b/de"),
        ("wikipedia/20230601.fr", "apache_beam", "hf:wikimedia/wikipedia/20231101.fr"),
        ("lm1b", "tensorflow", "hf:billion-word-benchmark/lm1b@refs/convert/parquet"),
        ("pg19", "tensorflow", "hf:emozilla/pg19"),
        ("tiny_shakespeare", "tensorflow", "hf:karpathy/tiny_shakespeare@refs/convert/parquet"),
    ],
)
def test_a_name_that_cannot_be_prepared_says_what_it_needs_and_the_name_on_the_hub(
    tmp_path, monkeypatch, name, package, hub
):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        tfds_copies.importlib.util, "find_spec", lambda n: None if n == package else find(n)
    )
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: pytest.fail("asks the network"))
    with pytest.raises(UserError) as refused:
        load_corpus(name, tmp_path)
    text = str(refused.value)
    assert f"needs the package {package}" in text and text.endswith(f"--corpus={hub}.")


def test_a_name_that_cannot_be_prepared_is_refused_without_importing_tfds(tmp_path):
    program = (
        "import sys, time; from pathlib import Path\n"
        "from sparse_dataflow.data.corpora import load_corpus\n"
        "try: load_corpus('c4/en', Path(sys.argv[1]))\n"
        "except ValueError as error: print(error)\n"
        "print('tensorflow_datasets' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert "hf:allenai/c4/en" in done.stdout and done.stdout.endswith("False\n"), done.stderr


class ServedProse(CopiedProse):
    URL = ""

    def _split_generators(self, dl_manager):
        path = dl_manager.download_and_extract(self.URL)
        return {"train": self._lines(path)}

    def _lines(self, path):
        for i, line in enumerate(Path(path).read_text().splitlines()):
            yield i, {"title": "", "text": line}


def test_a_corpus_is_downloaded_and_prepared_end_to_end(tmp_path):
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "corpus.txt").write_text("\n".join(f"line {i} ü" for i in range(200)))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    ServedProse.URL = f"http://127.0.0.1:{server.server_port}/corpus.txt"
    corpus = load_corpus("served_prose", tmp_path / "cache")
    server.shutdown()
    expected = sorted(f"line {i} ü" for i in range(200))
    assert sorted(texts([*corpus.train, *corpus.validation])) == expected
    assert corpus.validation
    # From the cache, as nothing is served any more.
    again = load_corpus("served_prose", tmp_path / "cache")
    assert again.content_hash == corpus.content_hash


class UnreachableProse(ServedProse):
    URL = "http://corpus.invalid/corpus.txt"


def test_without_a_network_a_download_is_tried_once(tmp_path, monkeypatch):
    """tfds retries ten times with growing pauses, which takes three minutes."""
    asked = []

    def unknown(host, *arguments, **options):
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    with pytest.raises(UserError, match="'unreachable_prose' could not be prepared"):
        load_corpus("unreachable_prose", tmp_path / "cache")
    assert asked.count("corpus.invalid") == 1
    assert downloader.MAX_RETRIES > 1
