"""Small files of somebody else that unfold to gigabytes are refused, or read in bounded memory."""

import gzip
import json
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparse_dataflow.data import packed_files
from sparse_dataflow.data.corpora import load_corpus
from sparse_dataflow.data.local_files import LocalSource
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError

MIB = 2**20


def shared(path, value, rows):
    """Parquet in which all rows have one value, which is stored once."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([value]))
    kind = pa.string() if isinstance(value, str) else pa.binary()
    schema = pa.schema([("text", pa.dictionary(pa.int32(), kind))])
    options = {"compression": "zstd", "store_schema": False, "dictionary_pagesize_limit": 2**30}
    with pq.ParquetWriter(path, schema, **options) as out:
        out.write_table(pa.table({"text": column}))


def most_memory(work):
    """Bytes of Python and of Arrow at the most while a function runs."""
    pool = pa.default_memory_pool()
    before, most = pool.bytes_allocated(), 0
    tracemalloc.start()
    try:
        for _ in work():
            most = max(most, pool.bytes_allocated() - before)
        return most + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture
def strict(monkeypatch):
    monkeypatch.setattr(packed_files, "FREE_BYTES", 8 * MIB)


@pytest.mark.parametrize("rows", [3, 40])
def test_a_value_that_many_rows_share_is_in_memory_once(tmp_path, rows):
    shared(tmp_path / "a.parquet", "a b " * MIB, rows)
    source = LocalSource(tmp_path / "a.parquet")
    assert most_memory(source.documents) < 60 * MIB
    assert sum(len(document.text) for document in source.documents()) == rows * 4 * MIB


def test_the_rows_of_parquet_are_those_that_were_written(tmp_path):
    texts = [None if n % 7 == 0 else f"text {n % 13} é" * (n % 50) for n in range(3000)]
    for name, kind in (("plain", pa.string()), ("large", pa.large_string())):
        table = pa.table({"text": pa.array(texts, kind)})
        path = tmp_path / f"{name}.parquet"
        pq.write_table(table, path, row_group_size=700, use_dictionary=name == "large")
        with packed_files.local_parquet(path) as table:
            groups = range(len(table.group_rows))
            assert [text for group in groups for text in table.values("text", group)] == texts


def unfolding(folder, kind):
    if kind == "parquet of text":
        shared(folder / "a.parquet", "a b " * (MIB // 4), 1000)
    elif kind == "parquet of long pages":
        texts = pa.table({"text": ["a b " * (20 * MIB)]})
        pq.write_table(texts, folder / "a.parquet", compression="zstd", use_dictionary=False)
    elif kind == "parquet of ids":
        lists = pa.array([np.zeros(10**6, np.int32)] * 9)
        pq.write_table(pa.table({"input_ids": lists}), folder / "a.parquet", compression="zstd")
    elif kind == "gzip":
        (folder / "a.txt.gz").write_bytes(gzip.compress(b"a b\n" * (5 * MIB)))
    else:
        content = pa.compress(b'{"text": "%s"}\n' % (b"a b " * 500) * 8000, "zstd", asbytes=True)
        (folder / "a.jsonl.zst").write_bytes(content)


KINDS = ("parquet of text", "parquet of long pages", "parquet of ids", "gzip", "zstd")


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_unfolds_to_far_more_than_its_bytes_is_refused(tmp_path, strict, kind):
    folder = tmp_path / "corpus"
    folder.mkdir()
    unfolding(folder, kind)
    with pytest.raises(UserError, match=r"unfolds to more than|a value of more than 64 MiB"):
        len(load_corpus(str(folder), tmp_path / "cache").train)


def test_json_with_millions_of_lists_is_refused_before_it_is_read():
    text = "[" + "[]," * (json_files.MOST_CONTAINERS + 1) + "0]"
    with pytest.raises(ValueError, match="lists and objects"):
        json_files.parse(text)
    with pytest.raises(ValueError, match="lists and objects"):
        json_files.parse(text.replace("[]", "{}").encode())
    assert json_files.parse(json.dumps({"a": ["[" * 10**6]})) == {"a": ["[" * 10**6]}
