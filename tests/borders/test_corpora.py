"""Files of text that somebody else wrote are read or refused."""

import gzip
import io
import json

import drawn
import pyarrow
import pyarrow.parquet
from drawn_inputs import DrawnInputs

from sparse_dataflow.data.documents import Document
from sparse_dataflow.data.local_files import LocalSource


def content(draw, suffix):
    """(bytes of a file with this suffix)"""
    if suffix == ".txt":
        data = drawn.text(draw, 500).encode(errors=draw.choice(["replace", "surrogatepass"]))
        return drawn.damaged(draw, data) if draw.random() < 0.3 else data
    if suffix == ".parquet":
        values = [draw.choice([drawn.text(draw).encode(errors="replace").decode(), None])]
        kind = draw.choice([pyarrow.string(), pyarrow.large_string(), pyarrow.binary()])
        values = [
            value.encode() if value and kind == pyarrow.binary() else value for value in values
        ]
        table = pyarrow.table({draw.choice(["text", "other"]): pyarrow.array(values, kind)})
        file = io.BytesIO()
        pyarrow.parquet.write_table(table, file)
        return drawn.damaged(draw, file.getvalue()) if draw.random() < 0.4 else file.getvalue()
    example = draw.choice(
        [
            {"text": "a b"},
            {"prompt": "a", "answer": "b"},
            {"messages": [{"role": "user", "content": "a"}]},
        ]
    )
    return b"\n".join(
        drawn.json_bytes(draw, example) if draw.random() < 0.3 else json.dumps(example).encode()
        for _ in range(draw.randint(0, 4))
    )


def test_a_foreign_file_of_text_is_read_or_refused(tmp_path):
    counts = DrawnInputs("corpora")
    for number in counts:
        draw = counts.draw
        suffix = draw.choice([".txt", ".jsonl", ".jsonl", ".parquet"])
        data = content(draw, suffix)
        if suffix != ".parquet" and draw.random() < 0.3:
            data, suffix = gzip.compress(data), suffix + ".gz"
            data = drawn.damaged(draw, data) if draw.random() < 0.3 else data
        path = tmp_path / f"{number}{suffix}"
        path.write_bytes(data)
        with counts.one((path, data)):
            for document in LocalSource(path, draw.random() < 0.3).documents():
                assert isinstance(document, Document) and document.text.encode()
        path.unlink()
